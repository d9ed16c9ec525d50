"""Our own plugin, and the manager that finds everybody's. Imports no torch."""

import functools
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import pluggy

from . import hookspecs
from .hookspecs import GROUP, Backend, Engine, hookimpl
from .settings import AUTO, ORIGINAL, BackendError, Settings

# What `--backend auto` tries, best first, before the original.
AUTO_ORDER = ("fast", "graph")


class Fast:
    """`fast` by name: the forward, and torch with it, is imported when a model is there."""

    name = "fast"
    summary = "one packed forward over the prefix tree of all prompts of a request"

    def refusal(self, model: Any) -> str | None:
        from .engine import refusal

        return refusal(model)

    def build(self, model: Any, settings: Settings) -> Engine:
        from .engine import FastEngine

        return FastEngine(model, settings)


class Graph:
    """`graph` by name, imported like `fast`."""

    name = "graph"
    summary = (
        "the original modules, adapters merged, replayed as one CUDA Graph per batch shape; needs no compiler"
    )

    def refusal(self, model: Any) -> str | None:
        from .graph_engine import refusal

        return refusal(model)

    def build(self, model: Any, settings: Settings) -> Engine:
        from .graph_engine import GraphEngine

        return GraphEngine(model, settings)


@hookimpl
def openjev_fast_backends() -> list[Backend]:
    return [Fast(), Graph()]


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The one manager: our hooks, then every entry point of the group. One that fails to load is kept in
    `manager.load_failures` (name to reason), so that it stops nobody who did not ask for its backend."""
    from . import plugin

    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name="openjev_fast_plugin")
    manager.load_failures = {}  # type: ignore[attr-defined]
    for entry_point in metadata.entry_points(group=GROUP):
        if manager.has_plugin(entry_point.name):
            continue
        try:
            manager.register(entry_point.load(), name=entry_point.name)
            manager.check_pending()
        except (Exception, SystemExit) as error:
            manager.unregister(name=entry_point.name) if manager.has_plugin(entry_point.name) else None
            manager.load_failures[entry_point.name] = f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
    return manager


def load_failures() -> dict[str, str]:
    """Why a plugin offers no backends, by the plugin's name."""
    return plugin_manager().load_failures  # type: ignore[attr-defined]


def backends() -> dict[str, Backend]:
    """Every registered backend by name, ours first."""
    found: dict[str, Backend] = {}
    # One by one, in the order of registration: a hook that fails takes no other plugin's backends away.
    for implementation in plugin_manager().hook.openjev_fast_backends.get_hookimpls():
        function: Any = implementation.function
        try:
            offered = [(backend.name, backend) for backend in function() or ()]
        except (Exception, SystemExit) as error:
            load_failures()[implementation.plugin_name] = f"{type(error).__name__}: {error}"
            continue
        for name, backend in offered:
            if name in (ORIGINAL, AUTO):
                raise BackendError(f"{_where(backend)} registers a backend under the reserved name {name!r}")
            if name in found:
                raise BackendError(
                    f"two plugins register a backend named {name!r}: "
                    f"{_where(found[name])} and {_where(backend)}"
                )
            found[name] = backend
    return found


def names() -> list[str]:
    """What `--backend` accepts, without what the host adds."""
    return [ORIGINAL, *backends(), AUTO]


def find(name: str, host_choices: Iterable[str] = ()) -> Backend:
    """The backend of this name. BackendError, with the choices (the host's own too), when there is none."""
    found = backends()
    if name in found:
        return found[name]
    message = f"unknown backend {name!r}: choose from {', '.join(dict.fromkeys([*host_choices, *names()]))}"
    for plugin_name, reason in load_failures().items():
        message += f"; plugin {plugin_name!r} failed to load: {reason}"
    raise BackendError(message)


def _where(backend: Backend) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"
