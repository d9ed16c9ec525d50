"""The CUDA kernels against the ops' references: every model's shapes, odd sizes, strides, graphs, refusals.

Bounds. At least 98 % of the elements of a bfloat16 output equal the reference's bit for bit: a kernel rounds
where its reference does, and only the order of float32 sums and the last places of an exponential may differ,
which moves a rounding rarely. For the rest the difference is at most one unit in the last place (ulp) of the
value where one rounding separates it from exact arithmetic, and two where roundings chain; for rotated dims two
of the pair's norm, as they may cancel.
"""

import pytest
import torch

# The parent folder is on the path through its conftest.py.
from comparison import bfloat16_ulp
from op_inputs import CASES, PROFILES

from openjev_fast_plugin import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = [1, 7, 280]
EQUAL_SHARE = 0.98


def as_tuple(result) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def run(name: str, arguments: tuple) -> tuple[torch.Tensor, ...]:
    """The op's outputs, computed into memory that held NaN."""
    op = getattr(ops, name)
    for output in as_tuple(op(*arguments)):
        output.fill_(torch.nan)
    # The allocator hands the freed, NaN-filled blocks to the second call.
    outputs = as_tuple(op(*arguments))
    torch.cuda.synchronize()
    return outputs


def reference(name: str, arguments: tuple) -> tuple[torch.Tensor, ...]:
    return as_tuple(getattr(ops, f"{name}_ref")(*arguments))


def assert_rounded_alike(found, expected, *, ulps: int, largest=None, what: str = "") -> None:
    """largest: magnitude whose ulp counts, the value's own where not given."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.bfloat16
    assert torch.isfinite(found).all(), f"{what}: not finite"
    if found.numel() == 0:
        return
    magnitude = torch.maximum(found.abs(), expected.abs()) if largest is None else largest
    distance = (found.float() - expected.float()).abs() / bfloat16_ulp(magnitude)
    assert distance.max().item() <= ulps, f"{what}: {distance.max().item()} ulps"
    equal = (found == expected).float().mean().item()
    # One element in a hundred of a small output is less than one element.
    assert equal >= EQUAL_SHARE or (found != expected).sum().item() <= 1, f"{what}: {equal:.4f} equal"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.mark.parametrize("partials", [None, -1, 1, 2, 4], ids=["none", "model", "s1", "s2", "s4"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_add_rms_norm(profile, rows, partials):
    arguments = CASES["add_rms_norm"](PROFILES[profile], rows, partials)
    hidden, normed = run("add_rms_norm", arguments)
    expected_hidden, expected_normed = reference("add_rms_norm", arguments)
    assert torch.equal(hidden, expected_hidden)
    assert_rounded_alike(normed, expected_normed, ulps=1, what="normed")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_silu_mul(profile, rows):
    arguments = CASES["silu_mul"](PROFILES[profile], rows)
    assert_rounded_alike(*run("silu_mul", arguments), *reference("silu_mul", arguments), ulps=2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_gate_mul(profile, rows):
    arguments = CASES["gate_mul"](PROFILES[profile], rows)
    assert_rounded_alike(*run("gate_mul", arguments), *reference("gate_mul", arguments), ulps=2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_gated_rms_norm(profile, rows):
    arguments = CASES["gated_rms_norm"](PROFILES[profile], rows)
    assert_rounded_alike(*run("gated_rms_norm", arguments), *reference("gated_rms_norm", arguments), ulps=1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_delta_prepare(profile, rows):
    arguments = CASES["delta_prepare"](PROFILES[profile], rows)
    q, k, v, g, beta = run("delta_prepare", arguments)
    expected = reference("delta_prepare", arguments)
    # The L2 norm rounds what was rounded after SiLU.
    assert_rounded_alike(q, expected[0], ulps=2, what="q")
    assert_rounded_alike(k, expected[1], ulps=2, what="k")
    assert_rounded_alike(v, expected[2], ulps=1, what="v")
    torch.testing.assert_close(g, expected[3], rtol=1e-6, atol=0)
    assert_rounded_alike(beta.bfloat16(), expected[4].bfloat16(), ulps=1, what="beta")
    assert torch.equal(beta, beta.bfloat16().float())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_attention_prepare(profile, rows):
    pairs = PROFILES[profile].pairs
    arguments = CASES["attention_prepare"](PROFILES[profile], rows)
    found, expected = run("attention_prepare", arguments), reference("attention_prepare", arguments)
    for what, ours, theirs in zip("qk", found, expected, strict=True):
        assert_rounded_alike(ours[..., 2 * pairs :], theirs[..., 2 * pairs :], ulps=1, what=f"{what} passed")
        low, high = theirs[..., :pairs].float(), theirs[..., pairs : 2 * pairs].float()
        # A rotation keeps the pair's norm: its operands are no larger.
        largest = torch.hypot(low, high).repeat(1, 1, 2)
        rotated = ours[..., : 2 * pairs], theirs[..., : 2 * pairs]
        assert_rounded_alike(*rotated, ulps=2, largest=largest, what=f"{what} rotated")


@pytest.mark.parametrize("partials", [-1, 1, 2, 4], ids=["model", "s1", "s2", "s4"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
def test_head_score(profile, rows, partials):
    arguments = CASES["head_score"](PROFILES[profile], rows, partials)
    (found,) = run("head_score", arguments)
    (expected,) = reference("head_score", arguments)
    assert found.dtype == torch.float32
    # Sums of H terms near 0.02 in another order, and a norm that flips now and then by an ulp of 2^-8.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-3)
    assert (found - expected).abs().median() < 1e-4


def test_attention_prepare_takes_fewer_queries_than_keys():
    q, k, *weights, cos, sin, _, _, eps = CASES["attention_prepare"](PROFILES["27b"], 9)
    arguments = (q[4:6], k, *weights, cos[4:6], sin[4:6], cos, sin, eps)
    whole = run("attention_prepare", (q, k, *weights, cos, sin, cos, sin, eps))
    found = run("attention_prepare", arguments)
    assert torch.equal(found[0], whole[0][4:6]) and torch.equal(found[1], whole[1])


@pytest.mark.parametrize("profile", ["27b", "odd"])
@pytest.mark.parametrize("name", CASES)
def test_no_rows_give_empty_outputs(name, profile):
    arguments = CASES[name](PROFILES[profile], 0)
    found, expected = as_tuple(getattr(ops, name)(*arguments)), reference(name, arguments)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def every_bfloat16() -> torch.Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).cuda()


def test_silu_is_the_references_on_every_bfloat16_value():
    gate = every_bfloat16()[None]
    arguments = (torch.cat([gate, torch.ones_like(gate)], dim=1),)
    (found,), (expected,) = run("silu_mul", arguments), reference("silu_mul", arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_sigmoid_is_the_references_on_every_bfloat16_value():
    gate = every_bfloat16().view(1, 256, 256)
    arguments = (torch.ones_like(gate), gate)
    (found,), (expected,) = run("gate_mul", arguments), reference("gate_mul", arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_graph_replay_equals_eager_with_changed_inputs(name):
    static, fresh = (CASES[name](PROFILES["9b"], 33) for _ in range(2))
    op = getattr(ops, name)
    op(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(op(*static))
    for arguments in (static, fresh, CASES[name](PROFILES["9b"], 33)):
        for target, source in zip(static, arguments, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        for output in captured:
            output.fill_(torch.nan)
        graph.replay()
        for replayed, eager in zip(captured, as_tuple(op(*static)), strict=True):
            assert torch.equal(replayed, eager)


@pytest.mark.parametrize("name", CASES)
def test_float32_runs_the_portable_implementation(name):
    def as_float(value):
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    arguments = tuple(map(as_float, CASES[name](PROFILES["narrow"], 5)))
    for found, expected in zip(run(name, arguments), reference(name, arguments), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def replaced(arguments: tuple, index: int, value) -> tuple:
    return (*arguments[:index], value, *arguments[index + 1 :])


@pytest.mark.parametrize(
    "name, index, change, message",
    [
        (
            "add_rms_norm",
            1,
            lambda x: x[:, :-8],
            r"add_rms_norm: update must have shape \[5, 64\], it has \[5, 56\]",
        ),
        ("add_rms_norm", 1, lambda x: x.float().expand(3, -1, -1), "1, 2 or 4 partial sums"),
        (
            "add_rms_norm",
            1,
            lambda x: x.expand(2, -1, -1).contiguous(),
            "update must be Float, it is BFloat16",
        ),
        (
            "add_rms_norm",
            2,
            lambda x: x.cpu(),
            "weight must be on cuda:0 like the first tensor, it is on cpu",
        ),
        ("add_rms_norm", 0, lambda x: x.half(), "residual must be BFloat16, it is Half"),
        ("silu_mul", 0, lambda x: x[:, :-1], "gate_up must have an even number of columns"),
        ("silu_mul", 0, lambda x: x[:, ::2], "gate_up must have a contiguous last dimension"),
        ("head_score", 2, lambda x: x.long(), "rows must be Int, it is Long"),
        ("gate_mul", 1, lambda x: x[0], "gate must have shape"),
        ("gated_rms_norm", 2, lambda x: x[:-1], "weight must have shape"),
        ("delta_prepare", 3, lambda x: x[:, :2].contiguous(), r"predecessor must have shape \[5, 3\]"),
        ("delta_prepare", 8, lambda x: 1000, "columns of qkv must be"),
        ("attention_prepare", 5, lambda x: x[:, :-1].contiguous(), r"q_sin must have shape \[5, 8\]"),
    ],
)
def test_refusals_name_the_op_the_tensor_and_the_value(name, index, change, message):
    arguments = CASES[name](PROFILES["narrow"], 5)
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(*replaced(arguments, index, change(arguments[index])))


def test_heads_longer_than_the_kernels_take_are_refused():
    x = torch.zeros(2, 3, 264, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the last dimension of x must be at most 256, found 264"):
        ops.gated_rms_norm(x, x, x[0, 0], 1e-6)
