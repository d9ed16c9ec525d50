"""Where the time of one forward goes, by kernel family, as PyTorch's profiler saw it.

On a GPU every kernel belongs to a family by its name, and what an eager forward launches also by the part of the model
that launched it, since PyTorch's own delta rule is made of kernels that others use too. On a CPU operators take the
place of kernels. Time in which nothing runs is `idle`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

FAMILIES = ("matmul", "delta rule", "attention", "norms and elementwise", "other")

_MATMUL, _DELTA, _ATTENTION, _ELEMENTWISE, _OTHER = FAMILIES
_MARK = "openjev_fast.family:"
# The first pattern that a kernel's name contains decides.
_KERNELS = (
    (_OTHER, r"memcpy|memset|copy_kernel|cat_?array|index_?select|indexselect|gather|scatter|embedding"),
    (
        _ELEMENTWISE,
        r"delta_prepare|attention_prepare|add_rms_norm|gated_rms_norm|head_score|silu_mul|gate_mul",
    ),
    (_ELEMENTWISE, r"l2norm|layer_?norm|rms_?norm|causal_conv1d"),
    (
        _DELTA,
        r"delta_(chunk|state)_kernel|delta_rule|chunk_(fwd|gated|local|scaled)|recompute_w_u|solve_tril|merge_16x16",
    ),
    (_ATTENTION, r"tree_attention|flash|fmha|attention|sdpa|softmax"),
    (_MATMUL, r"linear_sm\d+_kernel|gemm|gemv|cutlass|nvjet|cublas|splitk|xmma"),
    (_ELEMENTWISE, r"elementwise|reduce|vectorized|sigmoid|silu|softplus|conv|triu|tril|cumsum|scan"),
)
_PATTERNS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _KERNELS]
# Operators whose time, and that of all they call, is one family's.
_WHOLE = {
    "openjev_fast::delta_rule": _DELTA,
    "openjev_fast::tree_attention": _ATTENTION,
    "aten::scaled_dot_product_attention": _ATTENTION,
}
_MATMULS = {
    *(f"aten::{name}" for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mkldnn_linear")),
    *(f"openjev_fast::{name}" for name in ("linear", "linear_update")),
}
# Operators that move data or hand out memory.
_MOVES = re.compile(
    r"aten::(to|_to_copy|copy_|clone|contiguous|empty|zeros|ones|full|fill_|zero_|cat|stack|pad|constant_pad_nd|index"
    r"|index_select|index_put_|embedding|gather|scatter|arange|resize_|item|_local_scalar_dense|nonzero|eq|ne|any|all"
    r"|lift_fresh|detach_?|resolve_conj|resolve_neg|set_|result_type)(_.*|\..*)?$"
)


@dataclass(frozen=True)
class Budget:
    """One forward. kernels: how many ran on a device, None on a CPU. families: milliseconds each, in FAMILIES' order.
    by_name: milliseconds of every kernel or operator. wall_ms: of the call, the profiler's own cost included.
    """

    kernels: int | None
    families: dict[str, float]
    by_name: dict[str, float]
    wall_ms: float

    @property
    def busy_ms(self) -> float:
        """Milliseconds in which something ran; kernels that overlap count once."""
        return sum(self.families.values())


def family_of_kernel(name: str) -> str:
    """The family of a device kernel by its name."""
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), _OTHER)


def family_of_operator(name: str, inherited: str | None) -> str | None:
    """The family of an operator or of a marked range. inherited: of what called it; None for nobody's yet."""
    if name.startswith(_MARK):
        return name.removeprefix(_MARK)
    if inherited is not None and inherited != _MATMUL:
        return inherited
    if name in _WHOLE:
        return _WHOLE[name]
    if name in _MATMULS:
        return _MATMUL
    if inherited is None and name.startswith("openjev_fast::"):
        # Norms, gates and preparation; products inside are told apart by the operators they call.
        return None
    return inherited


def spend(run: Callable[[], Any], device: torch.device, text: Any | None = None) -> Budget:
    """The budget of one call, which has been made before. text: the text model that it runs eagerly, if it does."""
    # Else the profiler writes two lines into whatever is on standard error at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities, cuda = [ProfilerActivity.CPU], device.type == "cuda"
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    # On a CPU the fast backend computes on a thread of its own.
    threads = _ExperimentalConfig(profile_all_threads=True)
    with ExitStack() as stack:
        if text is not None:
            stack.enter_context(marked(text))
        trace = stack.enter_context(profile(activities=activities, experimental_config=threads))
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        wall = 1e3 * (time.perf_counter() - start)
    events = trace.events()
    if not cuda:
        return _of_operators(events, wall)
    return _of_launches(events, wall) if text is not None else _of_kernels(events, wall)


def _of_kernels(events: Iterable[Any], wall: float) -> Budget:
    """By the kernels' names: all there is of a replayed graph. One that starts before the last has ended counts from
    there on."""
    families, by_name, end = dict.fromkeys(FAMILIES, 0.0), dict[str, float](), float("-inf")
    kernels = sorted(_on_device(events), key=lambda event: event.time_range.start)
    for event in kernels:
        first = max(event.time_range.start, end)
        end = max(end, event.time_range.end)
        alone = max(event.time_range.end - first, 0.0) / 1e3
        families[family_of_kernel(event.name)] += alone
        by_name[event.name] = by_name.get(event.name, 0.0) + alone
    return Budget(len(kernels), families, by_name, wall)


def _of_launches(events: Iterable[Any], wall: float) -> Budget:
    """By what launched the kernels of an eager forward, where that says more than their names.

    The profiler may list a kernel under more than one operator, so operators say only which families share the time
    that the kernels of one name took.
    """
    events = list(events)
    budget = _of_kernels(events, wall)
    shares: dict[str, dict[str, float]] = {}
    for event, inherited in _walk(events):
        for kernel in event.kernels:
            family = inherited if inherited in (_DELTA, _ATTENTION) else family_of_kernel(kernel.name)
            of_name = shares.setdefault(kernel.name, {})
            of_name[family] = of_name.get(family, 0.0) + kernel.duration
    families = dict.fromkeys(FAMILIES, 0.0)
    for name, spent in budget.by_name.items():
        of_name = shares.get(name, {})
        whole = sum(of_name.values())
        if not whole:
            # What no operator launched.
            families[_OTHER] += spent
            continue
        for family, share in of_name.items():
            families[family] += spent * share / whole
    return Budget(budget.kernels, families, budget.by_name, wall)


def _on_device(events: Iterable[Any]) -> list[Any]:
    return [
        event for event in events if event.device_type == DeviceType.CUDA and not event.name.startswith(_MARK)
    ]


def _of_operators(events: Iterable[Any], wall: float) -> Budget:
    families, by_name = dict.fromkeys(FAMILIES, 0.0), dict[str, float]()
    for event, inherited in _walk(events):
        if event.name.startswith(_MARK):
            # Its own time is Python's, between the operators.
            continue
        own = event.self_cpu_time_total / 1e3
        families[inherited or (_OTHER if _MOVES.match(event.name) else _ELEMENTWISE)] += own
        by_name[event.name] = by_name.get(event.name, 0.0) + own
    return Budget(None, families, by_name, wall)


def _walk(events: Iterable[Any]) -> Iterator[tuple[Any, str | None]]:
    """Every operator of the host with its family, those that call others first."""
    stack: list[tuple[Any, str | None]] = [
        (event, None)
        for event in events
        if event.device_type == DeviceType.CPU and event.cpu_parent is None and not event.is_async
    ]
    while stack:
        event, inherited = stack.pop()
        family = family_of_operator(event.name, inherited)
        yield event, family
        stack += [(child, family) for child in event.cpu_children]


@contextmanager
def marked(text: Any) -> Iterator[None]:
    """Inside, a text model of Transformers says which part of it runs, for the profiler: its delta rule beside the
    linear layers, the norms and the convolution in the same module."""
    with ExitStack() as stack:
        for layer in text.layers:
            mixer = getattr(layer, "linear_attn", None)
            if mixer is None:
                continue
            _mark(stack, mixer, _DELTA)
            for child in mixer.children():
                _mark(stack, child, _MATMUL if isinstance(child, torch.nn.Linear) else _ELEMENTWISE)
        yield


def _mark(stack: ExitStack, module: torch.nn.Module, family: str) -> None:
    ranges: list[record_function] = []

    def enter(*_: Any) -> None:
        ranges.append(record_function(_MARK + family))
        ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    for hook in (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ):
        stack.callback(hook.remove)
