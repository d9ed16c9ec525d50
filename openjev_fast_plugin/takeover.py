"""Put a loaded `DecisionModel` on a backend. Knows a model by its documented names; imports no torch."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .settings import AUTO, ORIGINAL, BackendError, Selection, Settings, origin

if TYPE_CHECKING:
    from .hookspecs import Engine, Scores

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

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"name": self.name, "decided_by": self.decided_by}
        if self.requested is not None:
            about["requested"] = self.requested
        if self.reason is not None:
            about["reason"] = self.reason
        if self.engine is not None:
            about.update(self.engine.describe())
        return about


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

    chosen = plugin.find(backend)
    reason = chosen.refusal(model)
    if reason is not None:
        raise BackendError(f"{origin(selection)}: backend {backend!r} cannot take this model: {reason}")
    engine = chosen.build(model, settings or Settings.read())
    return _attach(model, Takeover(backend, decided_by, engine))


def _choose(model: Any, settings: Settings, selection: Selection) -> Any:
    from . import plugin

    refusals: list[str] = []
    for name in plugin.AUTO_ORDER:
        candidate = plugin.find(name)
        reason = candidate.refusal(model)
        if reason is None:
            taken = Takeover(name, selection.decided_by, candidate.build(model, settings))
            taken.reason = "; ".join(refusals) or "the best backend takes this model"
            taken.requested = AUTO
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

    def score(records: list[dict]) -> Scores:
        if getattr(model, "training", False):
            raise BackendError(
                f"backend {takeover.name!r} is for inference only; this model is in training mode"
            )
        scores = engine.score(records)
        model.last_input_tokens = scores.input_tokens
        model.last_stats = scores.stats
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

    model.forward = forward
    # What `prefix_cache` asks for: shared prefixes are computed once here, whatever it is set to.
    model.score_cached = score_cached
    model.last_stats = {}
    return _set(model, takeover)


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
