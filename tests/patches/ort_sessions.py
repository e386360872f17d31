"""Sessions in tests of the patches: made with and without the shim, and what is seen of them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import onnxruntime
from onnx_models import Sample
from preparations import Preparations

import trims_shim
from trims_shim import diagnostics
from trims_shim.wire.messages import OpenPreparedReply

CPU = ["CPUExecutionProvider"]
META = (
    "custom_metadata_map",
    "description",
    "domain",
    "graph_description",
    "graph_name",
    "producer_name",
    "version",
)
READABLE = tuple(
    name for name, each in vars(onnxruntime.SessionOptions).items() if isinstance(each, property)
)


def new(*args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("providers", CPU)
    return onnxruntime.InferenceSession(*args, **kwargs)


def plain(*args: Any, **kwargs: Any) -> Any:
    with trims_shim.disabled():
        return new(*args, **kwargs)


def outcomes() -> dict[str, int]:
    return diagnostics.stats().fallbacks


def is_hit(session: Any) -> bool:
    return session is not None and diagnostics.stats().served > 0


def outputs(session: Any, made: Sample) -> list[bytes]:
    return [each.tobytes() for feed in made.feeds for each in session.run(None, feed)]


def arguments(nodes: Any) -> list[Any]:
    return [(node.name, node.type, list(node.shape)) for node in nodes]


def described(session: Any) -> dict[str, Any]:
    options = session.get_session_options()
    meta = session.get_modelmeta()
    return {
        "path": session._model_path,
        "bytes": session._model_bytes,
        "options": {name: getattr(options, name) for name in READABLE},
        "has_providers": hasattr(options, "has_providers") and options.has_providers(),
        "initial": session._sess_options_initial,
        "providers": session.get_providers(),
        "provider_options": session.get_provider_options(),
        "fallback": session._fallback_providers,
        "inputs": arguments(session.get_inputs()),
        "outputs": arguments(session.get_outputs()),
        "overridable": arguments(session.get_overridable_initializers()),
        "meta": {name: getattr(meta, name) for name in META},
        "attributes": sorted(vars(session)),
    }


def hit(*args: Any, **kwargs: Any) -> Any:
    """A session of the second request, from the prepared model."""
    new(*args, **kwargs)
    before = diagnostics.stats().served
    session = new(*args, **kwargs)
    assert diagnostics.stats().served == before + 1, outcomes()
    return session


def complaint(create: Any, *args: Any, **kwargs: Any) -> Any:
    """What is raised, and its cause; or what was made in the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            session = create(*args, **kwargs)
        except Exception as error:
            texts = f"{type(error)}: {error}", repr(error.__cause__)
            return [re.sub("0x[0-9a-f]+", "", text) for text in texts]
    return {**described(session), "initial": None}


def break_model(preparations: Preparations) -> None:
    """The prepared model is no model any more."""
    for directory in preparations.made.values():
        (directory / "model.onnx").chmod(0o600)
        (directory / "model.onnx").write_bytes(b"rubbish")


def changed(preparations: Preparations) -> OpenPreparedReply:
    """A hit whose weights are not those that the daemon looked at."""
    (directory,) = preparations.made.values()
    reply = preparations._hit(directory)
    assert reply.weights_identity is not None
    return reply._replace(weights_identity=reply.weights_identity._replace(mtime_ns=1))
