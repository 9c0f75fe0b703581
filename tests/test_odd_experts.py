"""ep.moe_mlp with what is legal and rare: sizes and strides of parameters, numbers of NumPy, anomaly mode."""

import numpy as np
import pytest
import torch
from conftest import on_ranks
from lib.autograd import normal
from lib.dispatch_combine import make_buffer
from lib.errors import error_of
from lib.experts import CLOSE, MAX_RECV_ROWS, MAX_TOKENS, given_to, make_case, swiglu_experts
from torch.utils._python_dispatch import TorchDispatchMode

import ep_dispatcher as ep
from ep_dispatcher.moe.activation import check_activation
from ep_dispatcher.tools.testing import device_of

HIDDEN = 16


def dense(x, idx, weights, w1, w2, b1, b2):
    """The layer of one rank, in float64."""
    x, weights, w1, w2, b1, b2 = (t.double() for t in (x, weights, w1, w2, b1, b2))
    gate, up = (torch.einsum("th,eih->tei", x, w1) + b1).chunk(2, dim=2)
    of_all = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, w2) + b2
    chosen = of_all.gather(1, idx.clamp(min=0)[:, :, None].expand(-1, -1, x.shape[1]))
    return (chosen * (weights * (idx >= 0))[:, :, None]).sum(1)


def assert_dense(buffer, x, idx, weights, parameters, strided_grad=False, **options):
    """Results and gradients are those of the dense layer. parameters: w1, w2, b1 and b2, of any strides."""
    leaves = [t.detach().requires_grad_() for t in (x, weights, *parameters)]
    w1, w2, b1, b2 = leaves[2:]
    y = ep.moe_mlp(buffer, leaves[0], idx, leaves[1], w1, w2, b1=b1, b2=b2, **options)
    expected = [t.detach().double().requires_grad_() for t in leaves]
    right = dense(expected[0], idx, *expected[1:])
    grad = normal((*y.shape[::-1],), 5).to(y.device, y.dtype).t() if strided_grad else y.new_ones(()).expand(y.shape)
    y.backward(grad)
    right.backward(grad.double())
    close = CLOSE[y.dtype]
    torch.testing.assert_close(y, right, check_dtype=False, **close)
    for name, leaf, wanted in zip(("x", "topk_weights", "w1", "w2", "b1", "b2"), leaves, expected, strict=True):
        assert leaf.grad.shape == leaf.shape
        torch.testing.assert_close(
            leaf.grad, wanted.grad, check_dtype=False, **close, msg=lambda t, n=name: f"{n}: {t}"
        )


def parameters_of(intermediate: int, dtype: torch.dtype, device: str, experts: int = 3) -> list[torch.Tensor]:
    shapes = (2 * intermediate, HIDDEN), (HIDDEN, intermediate), (2 * intermediate,), (HIDDEN,)
    return [normal((experts, *shape), 7 + i, dtype).to(device) / 4 for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(1)
def test_any_intermediate(rank, engine, dtype, num_parts):
    """PyTorch's grouped_mm refused rows of no multiple of 16 bytes after the dispatch had been sent."""
    case, inputs = make_case(1, 1, dtype, hidden=HIDDEN)
    x, idx, weights, *_ = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for intermediate in (0, 1, 3, 4, 36, 40):
            given = parameters_of(intermediate, dtype, device_of(engine, rank))
            line = 16 // dtype.itemsize
            if engine == "cuda" and (intermediate == 0 or intermediate % line):
                assert error_of(ep.moe_mlp, buffer, x, idx, weights, *given[:2], num_parts=num_parts).startswith("w2")
                continue
            for options in ({}, dict(max_recv_rows=MAX_RECV_ROWS), dict(keep_activated=False)):
                assert_dense(buffer, x, idx, weights, given, num_parts=num_parts, **options)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="PyTorch before 2.10 keeps no layer whole")
def test_any_intermediate_compiled(pools):
    pools(1).run(run_compiled)


def run_compiled(rank: int) -> None:
    case, inputs = make_case(1, 1, torch.bfloat16, hidden=HIDDEN)
    x, idx, weights, *_ = given_to(rank, "cpu", case, inputs)
    with make_buffer(case, "cpu", MAX_TOKENS) as buffer:
        for intermediate in (0, 36):
            w1, w2, *_ = parameters_of(intermediate, torch.bfloat16, "cpu")

            def forward(w1, w2):
                return ep.moe_mlp(buffer, x, idx, weights, w1, w2, max_recv_rows=MAX_RECV_ROWS)

            torch.compiler.reset()
            compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(w1, w2), forward(w1, w2))


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, or for "expanded" those of the first expert, elsewhere in memory."""
    if how == "every other":
        return torch.stack((t, t), dim=-1)[..., 0]
    if how == "gaps between rows":
        return torch.cat((t, t), dim=-1)[..., : t.shape[-1]]
    if how == "by column":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "expanded":
        return t[:1].expand(t.shape)
    if how == "expanded rows":
        return t[..., :1, :].expand(t.shape) if t.ndim == 3 else t[:, :1].expand(t.shape)
    return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)  # an odd address


@pytest.mark.parametrize(
    "how", ["every other", "gaps between rows", "by column", "expanded", "expanded rows", "an odd address"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_any_strides(rank, engine, dtype, how):
    """A strided w1 was refused by PyTorch after the dispatch had been sent."""
    case, inputs = make_case(1, 1, dtype, hidden=HIDDEN)
    x, idx, weights, *_ = given_to(rank, engine, case, inputs)
    given = [strided(t, how) for t in parameters_of(40, dtype, device_of(engine, rank))]
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for num_parts in (1, 2):
            assert_dense(buffer, x, idx, weights, given, strided_grad=True, num_parts=num_parts)
            assert_dense(buffer, strided(x, how), idx, strided(weights, how), given, num_parts=num_parts)


class Watch(TorchDispatchMode):
    """Something that looks at operators, so that the layer runs PyTorch's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["plain", "keeps less", "watched", "two parts", "in float32", "float8"])
@on_ranks(2)
def test_anomaly_mode_finds_no_nan(rank, engine, way):
    """Rows that no expert has are not computed. Where memory begins as NaN, anomaly mode saw those of a gradient."""
    dtype = torch.float32 if way == "in float32" else torch.bfloat16
    case, inputs = make_case(2, 2, dtype, hidden=HIDDEN)
    x, idx, weights, *_ = given_to(rank, engine, case, inputs)
    leaves = [t.requires_grad_() for t in (x, weights, *parameters_of(32, dtype, device_of(engine, rank)))]
    options = {
        "keeps less": dict(keep_activated=False),
        "two parts": dict(num_parts=2),
        "float8": dict(quantize="e4m3_1x128_pow2"),
    }.get(way, {})

    def gradients() -> list[torch.Tensor]:
        x, weights, w1, w2, b1, b2 = leaves
        given = dict(b1=b1, b2=b2, max_recv_rows=MAX_RECV_ROWS) | options
        if way == "watched":
            with Watch():
                y = ep.moe_mlp(buffer, x, idx, weights, w1, w2, **given)
        else:
            y = ep.moe_mlp(buffer, x, idx, weights, w1, w2, **given)
        return [*torch.autograd.grad(y.float().square().sum(), leaves)]

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with make_buffer(case, engine, MAX_TOKENS) as buffer:
            plain = gradients()
            with torch.autograd.detect_anomaly(check_nan=True):
                seen = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(plain, seen, strict=True):
        assert other.isfinite().all() and torch.equal(one, other)


UNREAD = {
    "alpha": [ep.Activation("gelu", alpha=1.702), ep.Activation("squared_relu", gated=False, alpha=2)],
    "beta": [ep.Activation("squared_relu", beta=9), ep.Activation(beta=1.0)],
    "linear_beta": [ep.Activation("gelu_tanh", linear_beta=9.0)],
    "gated": [ep.Activation("gelu", gated=False, limit=1.0), ep.Activation(gated=False, offset=1)],
}


@pytest.mark.parametrize("field", UNREAD)
def test_a_field_that_the_function_does_not_read_is_refused(field):
    """``ep.Activation("gelu", alpha=1.702)`` was plain GELU."""
    for activation in UNREAD[field]:
        assert error_of(check_activation, activation).startswith(f"activation.{field}"), activation
    for harmless in (ep.Activation("gelu", alpha=1), ep.Activation("squared_relu", beta=4.0, linear_beta=25)):
        assert check_activation(harmless) == harmless


def test_numbers_of_an_activation():
    """They are numbers of Python or NumPy that float32 can compute with."""
    for seven in (7, 7.0, np.float32(7), np.float64(7), np.int64(7)):
        found = check_activation(ep.Activation(limit=seven, alpha=seven, offset=seven))
        assert found == ep.Activation(limit=7.0, alpha=7.0, offset=7.0)
        assert {type(value) for value in (found.limit, found.alpha, found.offset)} == {float}
    assert check_activation(ep.Activation(limit=1e39)).limit is None  # no float32 is larger
    wrong = [True, np.bool_(True), "7", torch.tensor(7.0), 0, -1.0, 1e-50, float("nan"), float("inf"), 10**400]
    for field in ("limit", "alpha", "offset"):
        for value in wrong + [1e39] * (field != "limit"):
            if field == "offset" and value in (0, -1.0, 1e-50):
                continue
            assert error_of(check_activation, ep.Activation(**{field: value})).startswith(f"activation.{field}"), value
    for name in ("an ep.Activation", "relu", None, 3, ["swiglu"], torch.tensor([1, 2]), np.array(["swiglu"] * 2)):
        assert error_of(check_activation, name).startswith("activation"), name


@on_ranks(1)
def test_switches_are_bools_and_numbers_integers(rank, engine):
    """``overlap="no"``, ``keep_activated=0`` and ``num_parts=True`` passed in silence."""
    case, inputs = make_case(1, 1, hidden=HIDDEN)
    x, idx, weights, *_ = given_to(rank, engine, case, inputs)
    w1, w2, *_ = parameters_of(32, torch.float32, device_of(engine, rank))
    wrong = {
        "overlap": ["no", 0, None, np.bool_(True)],
        "keep_activated": [0, "", None],
        "average_gradients": [1, None],
        "num_parts": [True, 1.0, 0, 3, "1", torch.tensor(1)],
        "max_recv_rows": [True, 100.0, -1, torch.tensor(100)],
        "quantize": [True, 1, np.array(["mxfp8", "mxfp8"]), "mxfp8"],
        "activation": ["an ep.Activation"],
    }
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for name, values in wrong.items():
            for value in values:
                text = error_of(ep.moe_mlp, buffer, x, idx, weights, w1, w2, **{name: value})
                assert text.startswith(name), (name, value, text)
        expected = ep.moe_mlp(buffer, x, idx, weights, w1, w2, num_parts=2, max_recv_rows=100)
        numpy = dict(num_parts=np.int64(2), max_recv_rows=np.int32(100))
        assert torch.equal(ep.moe_mlp(buffer, x, idx, weights, w1, w2, **numpy), expected)
        limited = ep.moe_mlp(buffer, x, idx, weights, w1, w2, activation=ep.Activation(limit=1e39), num_parts=2)
        assert torch.equal(limited, expected)
        right = swiglu_experts(x, w1, w2).gather(1, idx.clamp(min=0)[:, :, None].expand(-1, -1, HIDDEN))
        right = (right * (weights * (idx >= 0))[:, :, None]).sum(1)
        torch.testing.assert_close(expected, right, **CLOSE[torch.float32])
