"""jev.serving: `load_predictor` takes `backend=` and returns a predictor on that backend.

Knows the seven keyword-only parameters below; further ones that have a default (later versions add some,
`backend` among them) are passed on. Values of a host's own `backend` that are not ours reach it untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import backend_flag
from ..settings import (
    ACCESS_LOG_VARIABLE,
    AUTO,
    ORIGINAL,
    WARMUP_VARIABLE,
    BackendError,
    Selection,
    Settings,
    resolve,
)
from . import Changes, Known, UnknownUpstream, jev_server, log

if TYPE_CHECKING:
    from ..access_log import AccessLog
    from ..takeover import Takeover
    from ..warm_start import WarmUp

LOAD_PREDICTOR = Known(
    "jev.serving.load_predictor",
    keyword_only=("checkpoint", "model_id", "revision", "device", "max_length", "batch_size", "prefix_cache"),
    defaults={
        "checkpoint": None,
        "model_id": None,
        "revision": None,
        "device": "cuda:0",
        "max_length": None,
        "batch_size": 32,
        "prefix_cache": False,
    },
    grows=True,
)


def apply(module: ModuleType) -> Callable[[], None]:
    original = vars(module).get("load_predictor")
    if hasattr(original, "openjev_fast"):
        return lambda: None
    LOAD_PREDICTOR.verify(original)
    with Changes() as changes:
        changes.rebind(module, "load_predictor", _load_predictor)
    return changes.undo


def _load_predictor(original: Callable) -> Callable:
    host_has_backend = "backend" in (original.__kwdefaults__ or {})

    @functools.wraps(original)
    def load_predictor(*args: Any, **arguments: Any) -> Any:
        given, warmup = arguments.get("backend"), backend_flag.take_warmup()
        selection: Selection | None = None
        try:
            flag, argument = backend_flag.split(given)
            selection = resolve(flag, argument, arguments.get("checkpoint"))
            if not host_has_backend:
                arguments.pop("backend", None)
            if selection is not None and _is_ours(selection, host_has_backend):
                if host_has_backend:
                    arguments["backend"] = ORIGINAL
                return _on_backend(original, args, arguments, selection, warmup)
            if warmup is not None:
                raise BackendError(
                    f"--warmup {warmup}: a backend of openjev-fast-plugin is what warms up: add --backend fast, or "
                    "leave it out"
                )
            if selection is not None and host_has_backend:
                arguments["backend"] = selection.name
            with backend_flag.decided(None):
                predictor = original(*args, **arguments)
            if selection is not None and not host_has_backend:
                _report_original(predictor, selection)
            return predictor
        except BackendError as error:
            backend_flag.stop(error, sys._getframe(1))
        except KeyboardInterrupt:
            # While a model was loaded for us or warmed up, which takes long.
            if selection is not None and backend_flag.is_program(sys._getframe(1).f_globals):
                raise SystemExit(130) from None
            raise

    load_predictor.openjev_fast = True  # type: ignore[attr-defined]
    return load_predictor


def _is_ours(selection: Selection, host_has_backend: bool) -> bool:
    if selection.name == ORIGINAL:
        return False
    # Not before somebody asks for a backend.
    from .. import plugin

    if selection.name == AUTO or selection.name in plugin.backends():
        return True
    hosts = backend_flag.host_choices
    if host_has_backend and (not hosts or selection.name in hosts):
        return False
    # Raises: nobody knows this name.
    return plugin.find(selection.name, hosts) is not None


def _on_backend(
    original: Callable, args: tuple, arguments: dict[str, Any], selection: Selection, warmup: str | None
) -> Any:
    from .. import takeover

    settings = Settings.read()
    warm_up = _warm_up(settings, warmup)
    access_log = _access_log(settings)
    jev_server.verify()
    # Inside, DecisionModel.load hands the model over, so that provenance describes what is really there.
    with backend_flag.decided(selection):
        predictor = original(*args, **arguments)
    _verify_predictor(predictor)
    model = predictor.scorer.model
    if getattr(model, "openjev_fast", None) is None:
        # A base model is constructed, not loaded.
        takeover.accelerate(model, selection.name, settings, selection.decided_by)
    if model.openjev_fast.engine is not None:
        # The backend shares one forward between all candidates of a request, however many.
        predictor.batch_size = predictor.max_candidates
    if model.openjev_fast.concurrent:
        _count_tokens_by_call(predictor.scorer)
    if warm_up is not None:
        warm_up.run(predictor.predict, model.openjev_fast)
    _report(predictor, model.openjev_fast)
    if model.openjev_fast.exchanged is not None:
        predictor.openjev_fast.observers.append(model.openjev_fast.exchanged)
    if access_log is not None:
        _keep(access_log, predictor.openjev_fast)
    jev_server.install()
    log.info("openjev-fast: %s", predictor.openjev_fast.describe())
    return predictor


def _warm_up(settings: Settings, typed: str | None) -> WarmUp | None:
    """What to be ready for, read before the model is: the flag's, else the environment's."""
    text = settings.warmup if typed is None else typed
    if text is None:
        return None
    from .. import warm_start

    return warm_start.read(text, f"--warmup {text}" if typed is not None else f"{WARMUP_VARIABLE}={text}")


def _access_log(settings: Settings) -> AccessLog | None:
    if settings.access_log is None:
        return None
    from ..access_log import AccessLog

    try:
        return AccessLog(settings.access_log)
    except OSError as error:
        raise BackendError(f"{ACCESS_LOG_VARIABLE}: {error}") from None


def _keep(access_log: AccessLog, taken: Takeover) -> None:
    if taken.engine is not None:
        taken.observers.append(access_log)
    else:
        log.warning("openjev-fast: %s: the original answers, and keeps no access log", ACCESS_LOG_VARIABLE)
        access_log.close()


def _verify_predictor(predictor: Any) -> None:
    missing = [
        name for name in ("scorer", "predict", "batch_size", "max_candidates") if not hasattr(predictor, name)
    ]
    if not missing and not hasattr(predictor.scorer, "model"):
        missing = ["scorer.model"]
    if missing:
        raise UnknownUpstream(
            "jev.serving.Predictor",
            "attributes scorer.model, predict, batch_size, max_candidates",
            f"{type(predictor).__name__} with {type(getattr(predictor, 'scorer', None)).__name__}, "
            f"without {', '.join(missing)}",
        )


def _count_tokens_by_call(scorer: Any) -> None:
    """Take a request's token count from its own call: `last_input_tokens`, which the host's `score` reads after
    the call, is that of whichever thread came last."""
    model = scorer.model

    def score(records: list[dict]) -> tuple[list[list[float]], int]:
        logits, stats = model.score_cached(records)
        return [row.tolist() for row in logits], stats["logical_input_tokens"]

    scorer.score = score


def _report_original(predictor: Any, selection: Selection) -> None:
    """`torch` was asked for through us: say so where a backend would, if this Open-Jev lets us."""
    from ..takeover import Takeover

    try:
        jev_server.verify()
    except UnknownUpstream as error:
        log.info("openjev-fast: %s", error)
        return
    _report(predictor, Takeover(selection.name, selection.decided_by))
    jev_server.install()


def _report(predictor: Any, taken: Takeover) -> None:
    """Make every answer's metadata, and `/health`, say who computed it and who decided that."""
    from .. import takeover

    answer = predictor.predict

    @functools.wraps(answer)
    def predict(*args: Any, **arguments: Any) -> Any:
        with taken.counted(), takeover.collect_stats() as calls:
            result = answer(*args, **arguments)
        result["metadata"] = {
            **result.get("metadata", {}),
            "backend": {**taken.describe(), **takeover.total(calls)},
        }
        return result

    predictor.predict = predict
    predictor.openjev_fast = taken
