"""InferenceSession: every way to name a model and its providers."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import onnxruntime

from .registry import Work, attempt, case, cases
from .sessions import CPU, described, made, model_file, opened, options, ran

AZURE = "AzureExecutionProvider"


class Named:
    """An os.PathLike that is no Path."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


class Text(str):
    """A path with a class of its own."""


class Content(bytes):
    """A model's bytes with a class of their own."""


PATHS = {
    "str": str,
    "path": Path,
    "path_like": lambda path: Named(str(path)),
    "relative": lambda path: path.name,
    "dotted": lambda path: f"./../{path.parent.name}/./{path.name}",
    "double_slash": lambda path: f"..//{path.parent.name}//.//{path.name}",
}


@cases(PATHS, served=True)
def by_path(work: Work, spell: Any) -> object:
    sample = made()
    return opened(sample, spell(model_file(work, sample)), options())


@case(served=False, reason="arguments")
def by_text_of_another_class(work: Work) -> object:
    sample = made()
    return opened(sample, Text(model_file(work, sample)), options())


@cases({"bytes_path": lambda path: Named(os.fsencode(path.name)), "trailing_slash": "{}/".format})
def by_odd_path(work: Work, spell: Any) -> object:
    sample = made()
    path = model_file(work, sample)
    return attempt(opened, sample, spell(path), options())


@cases(
    {
        "snowman": "m\N{SNOWMAN}del.onnx",
        "space": "my model.onnx",
        "no_suffix": "model",
        "undecodable": os.fsdecode(b"m\xff.onnx"),
        "long": "m" * 250,
        "other": "model.pb",
    }
)
def file_names(work: Work, name: str) -> object:
    sample = made("metadata")
    seen = attempt(opened, sample, model_file(work, sample, name), options())
    # The observer's answer is JSON, which has no place for undecodable names.
    return repr(seen) if isinstance(seen, Exception) else {**seen, "path": ascii(seen["path"])}


@case(served=True)
def by_links(work: Work) -> object:
    sample = made(seed=1)
    path = model_file(work, sample)
    work.file("link.onnx", lambda link: link.symlink_to(path))
    work.file("hard.onnx", lambda link: os.link(path, link))
    return [opened(sample, name, options()) for name in ("link.onnx", "hard.onnx")]


@case()
def by_descriptor(work: Work) -> object:
    sample = made(seed=1)
    with open(model_file(work, sample), "rb") as file:
        seen = opened(sample, f"/proc/self/fd/{file.fileno()}", options())
        return {**seen, "path": None}


@cases({"bytes": bytes, "subclass": Content}, served=True)
def by_bytes(work: Work, kind: Any) -> object:
    sample = made(seed=1)
    content = kind(sample.content)
    session = onnxruntime.InferenceSession(content, options())
    return [described(session), session._model_bytes is content, ran(session, sample.feeds)]


WRONG = {
    "bytearray": bytearray,
    "memoryview": memoryview,
    "file": io.BytesIO,
    "none": lambda content: None,
    "number": lambda content: 5,
    "empty_path": lambda content: "",
    "empty_bytes": lambda content: b"",
    "null_in_path": lambda content: "mo\0del.onnx",
    "text_as_path": lambda content: content[:5000].decode("latin-1"),
}


@case(served=False)
def by_something_else(work: Work) -> object:
    content = made().content
    seen = {
        name: attempt(onnxruntime.InferenceSession, kind(content)) for name, kind in WRONG.items()
    }
    return {name: repr(each)[:300] for name, each in seen.items()}


# --- providers ------------------------------------------------------------------------------------

PROVIDERS: dict[str, dict[str, Any]] = {
    "default": {},
    "empty": {"providers": []},
    "cpu": {"providers": CPU},
    "tuple": {"providers": tuple(CPU)},
    "azure_first": {"providers": [AZURE, *CPU]},
    "pair": {"providers": [(CPU[0], {})]},
    "arena": {"providers": [(CPU[0], {"arena_extend_strategy": "kSameAsRequested"})]},
    "numbers": {"providers": [(CPU[0], {"use_arena": 0})]},
    "parallel": {"providers": CPU, "provider_options": [{"use_arena": "1"}]},
    "twice": {"providers": [*CPU, *CPU]},
    "cuda_first": {"providers": ["CUDAExecutionProvider", *CPU]},
    "cuda_with_options": {"providers": [("CUDAExecutionProvider", {"device_id": 0}), CPU[0]]},
    "unknown": {"providers": ["NoSuchExecutionProvider", *CPU]},
}


@cases(PROVIDERS, served=True)
def providers(work: Work, keywords: dict[str, Any]) -> object:
    sample = made()
    return opened(sample, model_file(work, sample), options(), **keywords)


ODD_PROVIDERS: dict[str, dict[str, Any]] = {
    "azure_only": {"providers": [AZURE]},
    "only_unknown": {"providers": ["NoSuchExecutionProvider"]},
    "text": {"providers": "CPU"},
    "set": {"providers": set(CPU)},
    "number": {"providers": [1]},
    "triple": {"providers": [(CPU[0], {}, 1)]},
    "lengths_differ": {"providers": CPU, "provider_options": [{}, {}]},
    "options_are_text": {"providers": CPU, "provider_options": ["x"]},
    "options_twice": {"providers": [(CPU[0], {})], "provider_options": [{}]},
    "options_only": {"provider_options": [{"a": 1}]},
    "tensorrt_twice": {
        "providers": ["TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"]
    },
    "tensorrt": {"providers": ["TensorrtExecutionProvider", "CUDAExecutionProvider", *CPU]},
    "no_fallback": {"providers": {1: 2}, "enable_fallback": 0},
}


@cases(ODD_PROVIDERS)
def odd_providers(work: Work, keywords: dict[str, Any]) -> object:
    sample = made(seed=1)
    return attempt(opened, sample, model_file(work, sample), options(), **keywords)


# --- other arguments ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "list": ["ConstantFolding", "GeluFusionL2"],
    "set": {"LayerNormFusion", "AttentionFusion", "MatMulAddFusion"},
    "empty": [],
    "unknown": ["NoSuchOptimizer"],
}


@cases(OPTIMIZERS, served=True)
def disabled_optimizers(work: Work, names: Any) -> object:
    sample = made("transformer")
    path = model_file(work, sample)
    return opened(sample, path, options(), disabled_optimizers=names)


ODD_OPTIMIZERS: dict[str, Any] = {
    "generator": lambda: (name for name in ("MatMulAddFusion",)),
    "text": lambda: "ConstantFolding",
    "numbers": lambda: [1, 2],
    "number": lambda: 5,
}


@cases(ODD_OPTIMIZERS, served=False, reason="arguments")
def odd_disabled_optimizers(work: Work, names: Any) -> object:
    sample = made("transformer")
    path = model_file(work, sample)
    return attempt(opened, sample, path, options(), disabled_optimizers=names())


@case(served=True)
def keywords(work: Work) -> object:
    sample = made(seed=1)
    path = model_file(work, sample)
    return [
        opened(sample, path, options(), CPU, [{}]),
        opened(sample, path_or_bytes=path, sess_options=options(), providers=CPU),
        opened(sample, path, None, None, None),
        opened(sample, path, options(), enable_fallback=0),
        opened(sample, path, options(), nobody_reads_this=1),
        opened(sample, path, options(), read_config_from_model=0),
    ]


@case()
def wrong_keywords(work: Work) -> object:
    path = model_file(work, made())
    return [
        attempt(onnxruntime.InferenceSession, path, 5),
        attempt(onnxruntime.InferenceSession, path, {"intra_op_num_threads": 1}),
        attempt(onnxruntime.InferenceSession, path, enable_fallback="many"),
        attempt(onnxruntime.InferenceSession, path, read_config_from_model="maybe"),
        attempt(onnxruntime.InferenceSession),
        attempt(onnxruntime.InferenceSession, path, None, None, None, None),
    ]


def _configured(work: Work, config: str) -> Any:
    from onnx import helper
    from onnx_models import save

    sample = made(seed=1)
    helper.set_model_props(sample.model, {"ort_config": config})
    return sample, work.file("model.onnx", save(sample))


CONFIGS = {
    "threads": '{"session_options": {"intra_op_num_threads": 2, "graph_optimization_level": 1}}',
    "wrong": '{"session_options": {"graph_optimization_level": 77}}',
    "no_json": "{",
}


@cases(CONFIGS)
def config_in_the_model(work: Work, config: str) -> object:
    sample, path = _configured(work, config)
    by_keyword = attempt(opened, sample, path, options(), read_config_from_model=1)
    os.environ["ORT_LOAD_CONFIG_FROM_MODEL"] = "1"
    return [by_keyword, attempt(opened, sample, path, options())]


@cases(CONFIGS, served=True)
def config_in_the_model_is_not_read(work: Work, config: str) -> object:
    sample, path = _configured(work, config)
    return opened(sample, path, options())


# --- several --------------------------------------------------------------------------------------


@case(served=True)
def two_sessions(work: Work) -> object:
    """Both live, one ends, the other goes on; a third comes."""
    sample = made(seed=1)
    path = model_file(work, sample)
    first = onnxruntime.InferenceSession(path, options())
    second = onnxruntime.InferenceSession(path, options())
    seen = [ran(first, sample.feeds), ran(second, sample.feeds), first._sess is second._sess]
    del first
    seen.append(ran(second, sample.feeds))
    third = onnxruntime.InferenceSession(str(path), options())
    return [*seen, ran(third, sample.feeds), ran(second, sample.feeds)]


@case(served=True)
def twenty_sessions(work: Work) -> object:
    sample = made("recogniser", seed=1)
    path = model_file(work, sample)
    sessions = [onnxruntime.InferenceSession(path, options()) for _ in range(20)]
    return [ran(session, sample.feeds[:1]) for session in sessions]


@case(served=True)
def bytes_and_path_of_one_model(work: Work) -> object:
    sample = made(seed=1)
    path = model_file(work, sample)
    return [opened(sample, sample.content, options()), opened(sample, path, options())]


@case(served=True)
def outputs_outlive_the_session(work: Work) -> object:
    sample = made("straight_through", seed=1)
    session = onnxruntime.InferenceSession(model_file(work, sample), options())
    results = ran(session, sample.feeds)
    again = session.run(["w"], sample.feeds[0])[0]
    # An output that is an initializer is the caller's own: writing to it changes no later run.
    again[:] = 0
    results.append(ran(session, sample.feeds))
    del session
    return results
