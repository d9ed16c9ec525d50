"""Put a loaded `DecisionModel` on a backend. Knows a model by its documented names; imports no torch."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .build import BuildError
from .settings import AUTO, ORIGINAL, BackendError, Selection, Settings, origin

if TYPE_CHECKING:
    from .exchange import Exchange
    from .hookspecs import Backend, Engine, Scores

log = logging.getLogger("openjev_fast")


@dataclass
class Takeover:
    """Kept as `model.openjev_fast`: who computes this model's answers, and who decided that."""

    name: str
    decided_by: str
    # None: the original forward (`torch`, or `auto` that found no better).
    engine: Engine | None = None
    # Why `auto` chose as it did.
    reason: str | None = None
    requested: str | None = None
    # Called with every HTTP exchange once it is over.
    observers: list[Callable[[Exchange], None]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"name": self.name, "decided_by": self.decided_by}
        if self.requested is not None:
            about["requested"] = self.requested
        if self.reason is not None:
            about["reason"] = self.reason
        if self.engine is not None:
            about.update(self.engine.describe())
        return about

    @property
    def concurrent(self) -> bool:
        """Whether several requests may be scored at the same time."""
        return bool(getattr(self.engine, "concurrent", False))

    @property
    def metrics(self) -> Callable[[], tuple[bytes, str]] | None:
        """What `GET /metrics` answers, body and content type; None for an engine that counts nothing."""
        counted = getattr(self.engine, "metrics", None)
        return None if counted is None else counted.render

    @property
    def exchanged(self) -> Callable[[Exchange], None] | None:
        """Counts an HTTP request that is over; None for an engine that counts nothing."""
        counted = getattr(self.engine, "metrics", None)
        return None if counted is None else counted.exchanged

    @property
    def broken(self) -> str | None:
        """Why the engine answers nothing any more; None while it works, or where it cannot tell."""
        return getattr(self.engine, "broken", None)

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Have `callback(reason)` called once, on a request's thread, when the engine has lost its device."""
        register = getattr(self.engine, "on_broken", None)
        if register is not None:
            register(callback)

    def counted(self) -> contextlib.AbstractContextManager[None]:
        """Counts one request, by what becomes of it, in the engine's metrics."""
        counted = getattr(self.engine, "metrics", None)
        return contextlib.nullcontext() if counted is None else counted.request()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `copy.deepcopy` and `pickle` ask for; an engine belongs to the one model it was built for."""
        if self.engine is not None:
            raise TypeError(
                f"a model on backend {self.name!r} cannot be copied or pickled; load its checkpoint once more instead"
            )
        return super().__reduce_ex__(protocol)


def accelerate(
    model: Any, backend: str = "fast", settings: Settings | None = None, decided_by: str = "argument"
) -> Any:
    """Hand a loaded model to a backend and return it: `model(records)` then runs the backend's engine.

    Raises BackendError, before anything is changed, when there is no such backend or it cannot take this
    model. `auto` takes the first backend that can, else leaves the model as it is, and logs which and why.
    """
    if getattr(model, "openjev_fast", None) is not None:
        raise BackendError(f"this model already runs on backend {model.openjev_fast.name!r}")
    selection = Selection(backend, decided_by)
    if backend == ORIGINAL:
        return _set(model, Takeover(ORIGINAL, decided_by))
    if backend == AUTO:
        return _choose(model, settings or Settings.read(), selection)
    from . import plugin

    engine, reason = _build(plugin.find(backend), model, settings or Settings.read())
    if engine is None:
        assert reason is not None
        best = origin(Selection(AUTO, decided_by))
        raise BackendError(
            f"{origin(selection)}: backend {backend!r} cannot take this model: {reason.rstrip()}\n"
            f"{best} takes the best backend that can"
        )
    return _attach(model, Takeover(backend, decided_by, engine))


def _build(backend: Backend, model: Any, settings: Settings) -> tuple[Engine | None, str | None]:
    """The engine of a backend for this model, or why there is none; the model is unchanged then."""
    reason = backend.refusal(model)
    if reason is not None:
        return None, reason
    try:
        return backend.build(model, settings), None
    except (ValueError, BuildError) as error:
        log.debug("openjev-fast: backend %s could not be built", backend.name, exc_info=True)
        return None, str(error)


def _choose(model: Any, settings: Settings, selection: Selection) -> Any:
    from . import plugin

    refusals: list[str] = []
    for name in plugin.AUTO_ORDER:
        engine, reason = _build(plugin.find(name), model, settings)
        if engine is not None:
            taken = Takeover(name, selection.decided_by, engine, requested=AUTO)
            taken.reason = "; ".join(refusals) or "the best backend takes this model"
            _attach(model, taken)
            break
        refusals.append(f"{name}: {reason}")
    else:
        taken = Takeover(ORIGINAL, selection.decided_by, reason="; ".join(refusals), requested=AUTO)
        _set(model, taken)
    log.warning("openjev-fast: %s chose backend %s (%s)", origin(selection), taken.name, taken.reason)
    return model


def _set(model: Any, takeover: Takeover) -> Any:
    model.openjev_fast = takeover
    return model


def _attach(model: Any, takeover: Takeover) -> Any:
    engine = takeover.engine
    assert engine is not None
    # The functions below are attributes of the model: a strong reference to it would keep it, and its weights,
    # until the next garbage collection.
    owner: Any = weakref.proxy(model)

    def score(records: list[dict]) -> Scores:
        if getattr(owner, "training", False):
            raise BackendError(
                f"backend {takeover.name!r} is for inference only; this model is in training mode"
            )
        scores = engine.score(records)
        owner.last_input_tokens = scores.input_tokens
        owner.last_stats = scores.stats
        calls = _calls.get()
        if calls is not None:
            calls.append(scores.stats)
        return scores

    def forward(records: list[dict]) -> list[Any]:
        return score(records).logits

    def score_cached(records: list[dict], *, batch_size: int = 0) -> tuple[list[Any], dict[str, Any]]:
        scores = score(records)
        stats = {
            "enabled": True,
            "mode": f"openjev_{takeover.name}",
            "logical_input_tokens": scores.input_tokens,
        }
        return scores.logits, stats

    _set(model, takeover)
    model.forward = forward
    # What `prefix_cache` asks for: shared prefixes are computed once here, whatever it is set to.
    model.score_cached = score_cached
    model.last_stats = {}
    return model


# Stats of the engine calls made for the request this thread is answering.
_calls: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("calls", default=None)


@contextlib.contextmanager
def collect_stats() -> Iterator[list[dict[str, Any]]]:
    """The stats of every engine call made inside, in order. Safe with several threads on one model."""
    calls: list[dict[str, Any]] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def total(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts added up over the calls of one request; of anything else, the last."""
    merged: dict[str, Any] = {}
    for stats in calls:
        for key, value in stats.items():
            counts = isinstance(value, int | float) and not isinstance(value, bool)
            merged[key] = merged[key] + value if counts and key in merged else value
    return merged
