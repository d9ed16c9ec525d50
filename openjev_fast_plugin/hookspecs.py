"""What a plugin of the entry point group `openjev_fast` can offer: signatures only.

A plugin is one module with functions marked `@hookimpl`, named by an entry point of that group. Modules of
the group are imported when a backend is chosen, whichever it is: keep torch and kernels out of their top
level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import torch

    from .settings import Settings

GROUP = "openjev_fast"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Scores(Protocol):
    """What one call of an engine returns."""

    @property
    def logits(self) -> list[torch.Tensor]:
        """A tensor per record, on any device, as from `DecisionModel.forward`: a logit per option; `[0, logit]` for
        noul."""

    @property
    def input_tokens(self) -> int:
        """The sum of the prompts' lengths, as Open-Jev counts them."""

    @property
    def stats(self) -> dict[str, Any]:
        """rows_asked, rows_computed, forwards, and what else the engine wants in an answer's metadata."""


class Engine(Protocol):
    """A model taken over by a backend.

    An engine may have more, which is used where it is there: `concurrent` (true: several threads may call `score` at
    once, and a server answers requests side by side), `metrics` (as `openjev_fast_plugin.metrics.Metrics`), `broken`
    (why it answers nothing any more, else None), `on_broken(callback)` (calls it with that reason, once) and
    `warm_up(ask, lengths)` (as `engine.FastEngine.warm_up`; without it a warm-up answers example requests once).
    """

    def score(self, records: list[dict]) -> Scores:
        """Logits of `compile_request` records, computed without autograd.

        Where the device is lost, call `connections.fail` and raise: the server answers 500 and its program exits.
        """

    def describe(self) -> dict[str, Any]:
        """Facts that do not change between calls (kernels, dtype, device), for `/health` and `metadata`."""


class Backend(Protocol):
    # The name for `--backend`, and one line for a list of backends.
    name: str
    summary: str

    def refusal(self, model: Any) -> str | None:
        """Why this `DecisionModel` cannot be taken, naming the offending value; None when it can."""

    def build(self, model: Any, settings: Settings) -> Engine:
        """Take the model's weights over: afterwards no weight exists twice, and `model.backbone` is a module
        that still answers `config` and `parameters()`."""


@hookspec
def openjev_fast_backends() -> list[Backend]:  # type: ignore[empty-body]
    """The backends this plugin adds."""
