"""onnxruntime.InferenceSession: made from the machine's prepared model if there is one.

The seam is the method that makes the compiled session, ``_create_inference_session``: construction,
its retry on the CPU, ``set_providers`` and the fallback of ``run`` all end there. So do subclasses
and programs that imported the class by name. The class object itself is never replaced.

    hit       the original, on a clone of the user's options (no optimisation: that has been done)
              and the path of the prepared model; then the session's attributes read as before
    no hit    the original, untouched; the daemon has the model prepared meanwhile, for the next one

If anything goes wrong on a hit, the attributes are put back and the original makes the session as
if nothing had been tried, so errors are the original's. Nothing here raises ValueError or
RuntimeError into onnxruntime, which would take it for a failing provider and print that.

Once the program calls ``onnxruntime.set_seed``, its sessions are left to onnxruntime.

The lease of a prepared model lives as long as the compiled session: other objects may hold that one
(an IOBinding, metadata), and ``set_providers`` replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import onnxruntime.capi.onnxruntime_inference_collection as collection
import onnxruntime.capi.onnxruntime_pybind11_state as binding

from trims_shim import diagnostics, patches
from trims_shim.client.cache import cache
from trims_shim.client.prepared import PreparedModel
from trims_shim.errors import NotServed, PatchError, TrimsError
from trims_shim.late_imports import ensure_imported
from trims_shim.memory import heap
from trims_shim.patches import onnxruntime_models as models
from trims_shim.patches import onnxruntime_records as records
from trims_shim.patches.asking import is_strict
from trims_shim.patches.onnxruntime_recipe import (
    NO_PREPACKING,
    Settings,
    open_prepared,
    read_settings,
    recipe_of,
)
from trims_shim.patches.points import PatchPoint, is_being_imported
from trims_shim.wire.messages import SessionRecipe

__all__ = ["POINTS"]

_CPU = "CPUExecutionProvider"
_GRAPH_BYTES = 16 << 20
"""What a session of a few hundred nodes allocates for itself. In addition, one weight at a time is
packed: at most half of the prepared model, which has the weights and their packed forms."""
_is_seed_set = False
"""Whether the program was seen to set a seed; no call takes it back. A random node without a seed
of its own starts from it plus its number in the graph, and nodes of a prepared model have other
numbers. Until somebody sets a seed, it is the time: then only two sessions of one process, one of
them of the prepared model, can be told apart. With onnxruntime alone they draw the same numbers."""
_has_sessions: bool | None = False
"""Whether this process has made a session; from then on, options no longer set what the making
thread does with denormal numbers. None if that is not known: one may have been made before the
patches were applied, and one that failed may have been made in part."""
_ATTRIBUTES = ("_model_path", "_model_bytes", "_sess_options", "_read_config_from_model", "_sess")
"""Attributes of a session that the original reads or sets, and that this file depends on."""


class _Plan(NamedTuple):
    """A session that could be made from a prepared model."""

    model: models.Model
    settings: Settings
    recipe: SessionRecipe

    @property
    def extra_entries(self) -> dict[str, str]:
        """Config entries that the setting asks for, and that the program leaves open."""
        is_open = NO_PREPACKING not in self.settings.record.entries
        return {NO_PREPACKING: "1"} if is_open and self.recipe.prepack == "off" else {}


def _create(session: Any, original: Callable[[], Any], arguments: tuple[Any, Any, Any]) -> None:
    """Make the compiled session of ``session``, in place of ``original``."""
    plan = _plan(session, arguments)
    if plan is None:
        original()
        return
    offer: Callable[[], None] | None = None
    if plan.model.data is None:
        prepared = _ask(plan, plan.model.path or "")
    else:
        prepared, offer = _ask_for_bytes(plan, plan.model.data)
    failure: Exception | None = None
    if prepared is not None:
        try:
            _create_prepared(session, original, plan, prepared)
        # Border: nothing has changed; whatever it was, the original makes the session.
        except Exception as error:
            failure = error
            # The frames hold the unfinished session; its memory is to be free for the other one.
            traceback.clear_frames(error.__traceback__)
        else:
            return
    try:
        _create_plainly(session, original, plan)
        if failure is not None:
            # Only now: if the original fails as well, the failure is not ours to report.
            with _Border(plan.model.name, reason="prepared_failed"):
                raise failure
    finally:
        failure = None  # Its traceback refers to this frame.
    if offer is not None:
        offer()


def _plan(session: Any, arguments: tuple[Any, Any, Any]) -> _Plan | None:
    """What to ask for; None (counted) if the original has to make the session."""
    with _Border("a session"):
        config = cache().config
        model = models.model_of(session)
        if session._read_config_from_model:
            raise NotServed("model_config", f"{model.name}: its options are in the model")
        if _is_seed_set:
            raise NotServed("random_seed", f"{model.name}: onnxruntime.set_seed was called")
        settings = read_settings(session._sess_options, *arguments)
        recipe = recipe_of(settings, prepack=config.ort_prepack, has_sessions=_has_sessions)
        return _Plan(model, settings, recipe)
    return None


# --- asking the daemon ----------------------------------------------------------------------------


def _ask(plan: _Plan, path: str) -> PreparedModel | None:
    with (
        _Border(path),
        models.opened(path, min_bytes=models.least_bytes(cache().config)) as descriptor,
    ):
        full_path = models.absolute(path)
        cache().refuse_excluded(full_path)
        return open_prepared(plan.recipe, descriptor=descriptor, path=full_path)
    return None


def _ask_for_bytes(
    plan: _Plan, data: bytes
) -> tuple[PreparedModel | None, Callable[[], None] | None]:
    """Ask for bytes by digest; if they are unknown, return what to do once the session exists.

    Only then are they copied for the daemon, so that the first session waits for nothing.
    """
    digest = ""
    with _Border(plan.model.name):
        shared = cache()
        models.check_size(data, min_bytes=models.least_bytes(shared.config))
        # Before the digest: a gigabyte is not hashed for a daemon that is not there.
        shared.welcome(may_start=shared.config.autostart)
        digest = models.digest_of(data)
        try:
            return open_prepared(plan.recipe, digest=digest), None
        except NotServed as error:
            if error.reason != "unknown":
                raise
        diagnostics.fallback("unknown", what=plan.model.name)
        return None, functools.partial(_offer, plan, data, digest)
    return None, None


def _offer(plan: _Plan, data: bytes, digest: str) -> None:
    """Have these bytes prepared for the next session. Ours exists already: nothing may fail."""
    try:
        with models.offered(data) as descriptor:
            open_prepared(plan.recipe, descriptor=descriptor, digest=digest).release()
        reason = "hit"
    # Border: the session has been made; there is nothing to fall back to.
    except Exception as error:
        diagnostics.pass_on(error)
        reason = diagnostics.reason_of(error)
        what = plan.model.name
        diagnostics.log(logging.DEBUG, "%s is not offered to the daemon: %r", what, error)
    diagnostics.count("offered", reason)


# --- making the session ---------------------------------------------------------------------------


def _create_prepared(
    session: Any, original: Callable[[], Any], plan: _Plan, prepared: PreparedModel
) -> None:
    """Make it from the prepared model. Raises whatever goes wrong; then nothing has changed."""
    settings = plan.settings
    with _undone_on_error(session, prepared):
        options = records.clone(
            settings.options,
            settings.record,
            level=binding.GraphOptimizationLevel.ORT_DISABLE_ALL,
            entries=plan.extra_entries,
        )
        shown = records.clone(settings.options, settings.record)
        with (
            heap.given_back(room_bytes=_GRAPH_BYTES + prepared.size_bytes // 2),
            _with_attributes(session, prepared.path, None, options),
            _on_device(session, options, prepared.path, plan.recipe),
        ):
            original()
            # It has opened them by name, and somebody may have moved directories meanwhile.
            prepared.check()
        session._sess_options = shown
        weakref.finalize(session._sess, prepared.release).atexit = False
    # What is shared on a device is counted when it is opened, and is not mapped here.
    if _is_on_host(plan.recipe):
        diagnostics.count("bytes_shared", amount=prepared.size_bytes)
    diagnostics.count("served", "onnxruntime")


def _create_plainly(session: Any, original: Callable[[], Any], plan: _Plan) -> None:
    """Make it by the original, with the entries of a hit, so that both give equal results."""
    settings = plan.settings
    options = shown = None
    with _Border(plan.model.name):
        if plan.extra_entries:
            shown = records.clone(settings.options, settings.record)
            options = records.clone(settings.options, settings.record, entries=plan.extra_entries)
    if options is None:
        original()
        # onnxruntime hands it out without a record, and the next session may be given it.
        with contextlib.suppress(TypeError):
            records.adopt(session._sess_options, settings.record.copy())
        return
    with _with_attributes(session, session._model_path, session._model_bytes, options):
        original()
    session._sess_options = shown


@contextlib.contextmanager
def _with_attributes(
    session: Any, path: str | None, data: bytes | None, options: Any
) -> Iterator[None]:
    """Let the original find another model and other options; the model is put back in any case.

    The options are only on failure: the original replaces them by the compiled session's.
    """
    before = session._model_path, session._model_bytes
    options_before = session._sess_options
    session._model_path, session._model_bytes, session._sess_options = path, data, options
    try:
        yield
    except BaseException:
        session._sess_options = options_before
        raise
    finally:
        session._model_path, session._model_bytes = before


def _on_device(
    session: Any, options: Any, path: str, recipe: SessionRecipe
) -> contextlib.AbstractContextManager[None]:
    if _is_on_host(recipe):
        return contextlib.nullcontext()
    ensure_imported("trims_shim.patches.onnxruntime_cuda")
    from trims_shim.patches import onnxruntime_cuda

    return onnxruntime_cuda.creating(session, options, path, recipe.providers)


def _is_on_host(recipe: SessionRecipe) -> bool:
    return recipe.providers[0][0] == _CPU


@contextlib.contextmanager
def _undone_on_error(session: Any, prepared: PreparedModel) -> Iterator[None]:
    """Put back all that the original has set, also a compiled session: it may be the wrong one."""
    before = dict(vars(session))
    try:
        yield
    except BaseException:
        vars(session).update(before)
        prepared.release()
        raise


class _Border:
    """Counts an error in its block, under its own reason or ``reason``, and swallows it."""

    def __init__(self, what: str, *, reason: str = "internal_error") -> None:
        self._what = what
        self._reason = reason

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if isinstance(error, TrimsError):
            if error.reason not in diagnostics.EXPECTED_REASONS and is_strict():
                return False
            diagnostics.fallback(error.reason, error, what=self._what)
            return True
        # Border: the shim never makes a session fail; whatever it was, the original makes it.
        if is_strict():
            text = f"{self._what}: {type(error).__name__}: {error}"
            raise PatchError(text) from error
        diagnostics.fallback(self._reason, error, what=self._what)
        return True


# --- the patch point ------------------------------------------------------------------------------


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    global _has_sessions
    if not is_being_imported(collection.__name__):
        _has_sessions = _has_sessions or None

    @functools.wraps(original)
    def _create_inference_session(self: Any, *args: Any, **kwargs: Any) -> None:
        global _has_sessions
        arguments = _arguments(args, kwargs) if patches.active() else None
        create = functools.partial(original, self, *args, **kwargs)
        try:
            if arguments is None:
                create()
            else:
                _create(self, create, arguments)
            _has_sessions = True
        finally:
            _has_sessions = _has_sessions or None

    return _create_inference_session


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """(providers, provider_options, disabled_optimizers); None for a call onnxruntime refuses."""
    names = ("providers", "provider_options", "disabled_optimizers")
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or given.keys() & kwargs.keys() or not kwargs.keys() <= set(names):
        return None
    given.update(kwargs)
    if len(given) < 2 or not given.keys() >= {"providers", "provider_options"}:
        return None
    return given["providers"], given["provider_options"], given.get("disabled_optimizers")


def _probe() -> str | None:
    method = vars(collection.InferenceSession).get("_create_inference_session")
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    if code is None:
        return "InferenceSession._create_inference_session is not the method it was"
    if code.co_varnames[: code.co_argcount] != (
        "self",
        "providers",
        "provider_options",
        "disabled_optimizers",
    ):
        return "InferenceSession._create_inference_session has other arguments"
    # From 1.32 on a method of its own keeps the compiled session.
    bind = getattr(vars(collection.InferenceSession).get("_bind_session"), "__code__", None)
    names = {*code.co_names, *(bind.co_names if "_bind_session" in code.co_names and bind else ())}
    missing = set(_ATTRIBUTES) - names
    if missing:
        return f"InferenceSession has no {', '.join(sorted(missing))}"
    return None


def _wrap_set_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_seed(*args: Any, **kwargs: Any) -> Any:
        global _is_seed_set
        result = original(*args, **kwargs)
        _is_seed_set = True
        return result

    # The original's is its binding's, where pickle would look for ours.
    set_seed.__qualname__ = set_seed.__name__
    return set_seed


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "onnxruntime.capi.onnxruntime_pybind11_state:set_seed",
        "1.19+",
        _wrap_set_seed,
        has_holders=True,
    ),
    PatchPoint(
        "onnxruntime.capi.onnxruntime_inference_collection:"
        "InferenceSession._create_inference_session",
        "1.19+",
        _wrap,
        probe=_probe,
    ),
)
