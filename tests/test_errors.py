"""Every mistake of a caller is a ValueError that says what was given and what is allowed, and breaks nothing."""

import gc
import re
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from conftest import NO_CUDA
from round_trip import (
    CONFIG,
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    NUM_TOPK,
    assert_received,
    device,
    expected,
    inputs,
    make_buffer,
    outputs,
    round_trip,
)
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.errors import DisagreementError, TooFewRowsError, UnknownExpertError
from ep_dispatcher.tools.testing import make_routing

TOO_LARGE = 2**31


def error_of(call, *args, **kwargs) -> str:
    """The text of the ValueError that the call raises."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        assert type(error) in (ValueError, DisagreementError, TooFewRowsError, UnknownExpertError)
        return str(error)
    raise AssertionError("no error")


def assert_words(message: str, words) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# ---- the buffer -----------------------------------------------------------------------------------------------------


def construct(rank: int, changes_of_rank: list[dict]) -> str:
    """The error of every rank; a correct buffer can be made afterwards."""
    message = error_of(make_buffer, **changes_of_rank[rank])
    with make_buffer() as buffer:
        round_trip(buffer)
    return message


INTEGER = "an integer from 1 to 2147483647"
CONFIG_MISTAKES = [
    ("hidden", 0, INTEGER),
    ("hidden", -8, INTEGER),
    ("hidden", 64.0, INTEGER),
    ("hidden", True, INTEGER),
    ("hidden", "64", INTEGER),
    ("hidden", TOO_LARGE, INTEGER),
    ("hidden", 4, "a row of a multiple of 16 bytes, so a multiple of 8"),
    ("num_experts", 13, "a multiple of the number of ranks (2)"),
    ("num_experts", 0, INTEGER),
    ("num_experts", TOO_LARGE, INTEGER),
    ("num_topk", 0, "an integer from 1 to 12"),
    ("num_topk", 13, "an integer from 1 to 12"),
    ("num_topk", 2.0, "an integer from 1 to 12"),
    ("max_tokens_per_rank", 0, INTEGER),
    ("max_tokens_per_rank", -1, INTEGER),
    ("max_tokens_per_rank", TOO_LARGE, INTEGER),
    ("dtype", torch.float64, "torch.float32, torch.bfloat16, torch.float16"),
    ("dtype", torch.float8_e4m3fn, "torch.float32, torch.bfloat16, torch.float16"),
    ("dtype", "bfloat16", "torch.float32, torch.bfloat16, torch.float16"),
    ("dtype", None, "torch.float32, torch.bfloat16, torch.float16"),
    ("engine", "gpu", "'auto', 'cpu'"),
    ("engine", None, "'auto', 'cpu'"),
    ("ranks_per_node", 0, INTEGER),
    ("ranks_per_node", 1.0, INTEGER),
    ("ranks_per_node", "1", INTEGER),
    ("ranks_per_node", True, INTEGER),
    ("ranks_per_node", 3, "a divisor of the number of ranks (2)"),
    ("timeout_s", 0, "a number of seconds above 0"),
    ("timeout_s", -1.0, "a number of seconds above 0"),
    ("timeout_s", float("inf"), "a number of seconds above 0"),
    ("timeout_s", float("nan"), "a number of seconds above 0"),
    ("timeout_s", "3", "a number of seconds above 0"),
    ("timeout_s", True, "a number of seconds above 0"),
    ("num_sms", 0, INTEGER),
]


@pytest.mark.parametrize("name,value,allowed", CONFIG_MISTAKES, ids=lambda value: str(value)[:12])
def test_wrong_configuration(pools, name, value, allowed):
    everywhere = pools(2).run(construct, [{name: value}] * 2)
    assert everywhere[0] == everywhere[1]
    given = "4 (8 bytes a row in torch.bfloat16)" if (name, value) == ("hidden", 4) else value
    assert_words(everywhere[0], [f"{name}: given {given!r}" if given is value else f"{name}: given {given}", allowed])


def test_more_than_32_experts_of_a_token(pools):
    messages = pools(2).run(construct, [dict(num_topk=33, num_experts=64)] * 2)
    assert set(messages) == {"num_topk: given 33, allowed: an integer from 1 to 32"}


@pytest.mark.parametrize(
    "name,value,allowed", [case for case in CONFIG_MISTAKES if case[1] == 0] + CONFIG_MISTAKES[6:8]
)
def test_wrong_configuration_on_one_rank_is_an_error_on_all(pools, name, value, allowed):
    """The others cannot know by themselves."""
    messages = set(pools(3).run(construct, [{}, {name: value}, {}]))
    (message,) = messages
    assert_words(message, [f"{name}: given {value}", "(on rank 1)", allowed.replace("(2)", "(3)")])


def test_different_mistakes_are_one_error(pools):
    (message,) = set(pools(3).run(construct, [{}, dict(hidden=0), dict(num_topk=0)]))
    assert_words(message, ["hidden: given 0", "(on rank 1)"])


@pytest.mark.parametrize(
    "name,value",
    [
        ("hidden", 128),
        ("num_experts", 24),
        ("num_topk", 2),
        ("max_tokens_per_rank", 33),
        ("dtype", torch.float16),
        ("ranks_per_node", 1),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_configurations_that_differ(pools, engine, name, value, odd):
    changes = [{"engine": engine} | ({name: value} if rank == odd else {}) for rank in range(3)]
    (message,) = set(pools(3).run(construct, changes))
    usual = (CONFIG | dict(dtype=torch.bfloat16, ranks_per_node=None))[name]
    gave = f"rank 0 gave {value}, rank 1 gave {usual}" if odd == 0 else f"rank 0 gave {usual}, rank 2 gave {value}"
    assert message == f"{name}: {gave}; all ranks must give the same"


def construct_with_limits(rank: int, engine: str) -> float:
    with make_buffer(timeout_s=10 + rank, engine=engine) as buffer:
        round_trip(buffer)


def test_the_limit_of_time_may_differ(pools, engine):
    pools(2).run(construct_with_limits, engine)


def construct_with_switch(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("EP_DISPATCHER_TIMEOUT_S", "soon")
        message = error_of(make_buffer, timeout_s=None)
    with make_buffer() as buffer:
        round_trip(buffer)
    return message


def test_a_wrong_switch_on_one_rank(pools):
    (message,) = set(pools(2).run(construct_with_switch))
    assert_words(message, ["EP_DISPATCHER_TIMEOUT_S: given 'soon'", "seconds above 0", "(on rank 1)"])


def test_without_torch_distributed():
    assert not dist.is_initialized()
    words = ["group: given None while torch.distributed is not initialised, allowed: ", "init_process_group"]
    assert_words(error_of(make_buffer), words)


def construct_on_no_group(rank: int) -> str:
    return error_of(make_buffer, "world")


def test_not_a_group(pools):
    (message,) = set(pools(2).run(construct_on_no_group))
    assert message == "group: given str, allowed: a torch.distributed.ProcessGroup, or None for the default one"


def construct_beside_a_group(rank: int, engine: str):
    group = dist.new_group([0])  # collective of all ranks
    if rank == 1:
        return error_of(make_buffer, group, engine=engine)
    with make_buffer(group, engine=engine) as buffer:
        round_trip(buffer)


def test_not_a_member_of_the_group(pools, engine):
    message = pools(2).run(construct_beside_a_group, engine)[1]
    assert message == "group: given one that this process is not a member of, allowed: a group on its members alone"


def construct_on_meshes(rank: int, engine: str) -> list[str]:
    """A buffer on one dimension of a mesh, and the errors of a mesh of two and of one without rank 1."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    with make_buffer(mesh["ep"], engine=engine) as buffer:
        assert buffer.topology.num_ranks == 2 and buffer.config.group is mesh["ep"].get_group()
        round_trip(buffer)
    beside = dist.DeviceMesh("cpu", [0])  # collective of all ranks
    return [error_of(make_buffer, one, engine=engine) for one in (mesh, *[beside] * rank)]


def test_a_mesh_is_a_group_if_it_has_one_dimension(pools, engine):
    of_two, of_others = pools(2).run(construct_on_meshes, engine)[1]
    assert of_two == (
        "group: given a DeviceMesh of 2 dimensions ('dp', 'ep'), allowed: one of one dimension, such as mesh[\"ep\"]"
    )
    assert of_others.startswith("group: given one that this process is not a member of")


# ---- the arguments of dispatch and combine --------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What a rank has before it makes its mistake."""

    buffer: ep.Buffer
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    out: ep.DispatchOutput  # of a dispatch without mistakes
    y: Tensor
    other: ep.Handle  # of another buffer

    def dispatch(self, *args, **options):
        x, topk_idx, topk_weights = [*args, *(self.x, self.topk_idx, self.topk_weights)[len(args) :]]
        return self.buffer.dispatch(x, topk_idx, topk_weights, **options)

    def with_entry(self, token: int, k: int, expert: int) -> Tensor:
        topk_idx = self.topk_idx.clone()
        topk_idx[token] = torch.tensor([0, 1, -1], device=topk_idx.device)
        topk_idx[token, k] = expert
        return topk_idx

    def more_tokens(self):
        idx, weights = make_routing("uniform", MAX_TOKENS + 1, NUM_EXPERTS, NUM_TOPK, seed=0)
        x = torch.zeros(MAX_TOKENS + 1, HIDDEN, dtype=torch.bfloat16)
        return self.dispatch(*(t.to(self.x.device) for t in (x, idx, weights)))

    def reuse(self, x=None, topk_idx=None, **options):
        return self.buffer.dispatch(self.x if x is None else x, topk_idx, handle=self.out.handle, **options)

    def combine(self, y, topk_weights=None, handle=None):
        return self.buffer.combine(y, self.out.handle if handle is None else handle, topk_weights=topk_weights)


N, R, ON = "29", "{rows}", "{device}"  # the tokens of rank 1, the rows that it receives, and where they are
X_ALLOWED = f"allowed: a tensor [num_tokens, 64] of torch.bfloat16 on {ON}"
IDX_ALLOWED = f"allowed: a tensor [{N}, 3] of torch.int32 or torch.int64 on {ON}"
WEIGHTS_ALLOWED = f"allowed: a tensor [{N}, 3] of torch.float32 on {ON}"
Y_ALLOWED = f"allowed: a tensor [{R}, 64] of torch.bfloat16 on {ON}"
MISTAKES = {
    # x
    "x of float32": (lambda g: g.dispatch(g.x.float()), f"x: given [{N}, 64] of torch.float32 on {ON}", X_ALLOWED),
    "x of float16": (lambda g: g.dispatch(g.x.half()), f"x: given [{N}, 64] of torch.float16 on {ON}", X_ALLOWED),
    "x too narrow": (lambda g: g.dispatch(g.x[:, :32]), f"x: given [{N}, 32] of", X_ALLOWED),
    "x of one dimension": (lambda g: g.dispatch(g.x[0]), "x: given [64] of", X_ALLOWED),
    "x of three dimensions": (lambda g: g.dispatch(g.x[None]), f"x: given [1, {N}, 64] of", X_ALLOWED),
    "x on meta": (lambda g: g.dispatch(g.x.to("meta")), "torch.bfloat16 on meta", X_ALLOWED),
    "x sparse": (lambda g: g.dispatch(g.x.to_sparse()), f"on {ON} (torch.sparse_coo)", X_ALLOWED),
    "x a list": (lambda g: g.dispatch(g.x.tolist()), f"x: given a list of {N}", "a tensor, or a pair (rows, scales)"),
    "x None": (lambda g: g.dispatch(None), "x: given NoneType", X_ALLOWED),
    "x too long": (lambda g: g.more_tokens(), "x: given 33 rows", "at most max_tokens_per_rank = 32"),
    "x a pair": (lambda g: g.dispatch((g.x, g.x)), "x: given a pair", "hidden a multiple of 128; it is 64"),
    "quantize of 64": (
        lambda g: g.dispatch(quantize="e4m3_1x128"),
        "quantize: given 'e4m3_1x128'",
        "rows are bfloat16 and hidden is a multiple of 128",
    ),
    "quantize unknown": (lambda g: g.dispatch(quantize="int8"), "quantize: given 'int8'", "None, 'e4m3_1x128'"),
    # topk_idx
    "idx of float32": (lambda g: g.dispatch(g.x, g.topk_idx.float()), "topk_idx: given", "torch.float32", IDX_ALLOWED),
    "idx of int16": (lambda g: g.dispatch(g.x, g.topk_idx.short()), "topk_idx: given", "torch.int16", IDX_ALLOWED),
    "idx too narrow": (lambda g: g.dispatch(g.x, g.topk_idx[:, :2]), f"topk_idx: given [{N}, 2]", IDX_ALLOWED),
    "idx too short": (lambda g: g.dispatch(g.x, g.topk_idx[1:]), "topk_idx: given [28, 3]", IDX_ALLOWED),
    "idx on meta": (lambda g: g.dispatch(g.x, g.topk_idx.to("meta")), "topk_idx", "on meta", IDX_ALLOWED),
    "idx sparse": (lambda g: g.dispatch(g.x, g.topk_idx.to_sparse()), "topk_idx", "(torch.sparse_coo)", IDX_ALLOWED),
    "idx None": (lambda g: g.dispatch(g.x, None), "topk_idx: given NoneType", IDX_ALLOWED),
    "expert too large": (
        lambda g: g.dispatch(g.x, g.with_entry(7, 2, NUM_EXPERTS)),
        "topk_idx[7, 2]: given 12",
        "-1 (no expert), or an expert from 0 to 11",
    ),
    "expert far too large": (lambda g: g.dispatch(g.x, g.with_entry(7, 2, 2**32)), "topk_idx[7, 2]: given 4294967296"),
    "expert too small": (lambda g: g.dispatch(g.x, g.with_entry(0, 0, -2)), "topk_idx[0, 0]: given -2", "0 to 11"),
    "expert too large, int32": (
        lambda g: g.dispatch(g.x, g.with_entry(28, 1, 99).int()),
        "topk_idx[28, 1]: given 99",
        "0 to 11",
    ),
    "expert twice": (
        lambda g: g.dispatch(g.x, g.with_entry(3, 2, 0)),
        "topk_idx[3, 2]: given expert 0 again",
        "every expert at most once in a row",
    ),
    # topk_weights
    "weights of bfloat16": (lambda g: g.dispatch(g.x, g.topk_idx, g.topk_weights.bfloat16()), WEIGHTS_ALLOWED),
    "weights too narrow": (
        lambda g: g.dispatch(g.x, g.topk_idx, g.topk_weights[:, :2]),
        f"topk_weights: given [{N}, 2]",
        WEIGHTS_ALLOWED,
    ),
    "weights too short": (lambda g: g.dispatch(g.x, g.topk_idx, g.topk_weights[:-1]), "[28, 3]", WEIGHTS_ALLOWED),
    "weights on meta": (lambda g: g.dispatch(g.x, g.topk_idx, g.topk_weights.to("meta")), "on meta", WEIGHTS_ALLOWED),
    "weights a list": (lambda g: g.dispatch(g.x, g.topk_idx, [1.0]), "topk_weights: given list", WEIGHTS_ALLOWED),
    # the other arguments of dispatch
    "layout unknown": (lambda g: g.dispatch(layout="experts"), "layout: given 'experts', allowed: 'expert', 'rank'"),
    "layout None": (lambda g: g.dispatch(layout=None), "layout: given None", "'expert', 'rank'"),
    "alignment 0": (lambda g: g.dispatch(expert_alignment=0), "expert_alignment: given 0", INTEGER),
    "alignment 1.5": (lambda g: g.dispatch(expert_alignment=1.5), "expert_alignment: given 1.5", INTEGER),
    "alignment True": (lambda g: g.dispatch(expert_alignment=True), "expert_alignment: given True", INTEGER),
    "alignment 2^31": (lambda g: g.dispatch(expert_alignment=TOO_LARGE), "expert_alignment: given 2147483648", INTEGER),
    "rows -1": (lambda g: g.dispatch(max_recv_rows=-1), "max_recv_rows: given -1", "from 0 to 2147483647"),
    "rows 9.0": (lambda g: g.dispatch(max_recv_rows=9.0), "max_recv_rows: given 9.0", "from 0 to 2147483647"),
    "rows 2^31": (lambda g: g.dispatch(max_recv_rows=TOO_LARGE), "max_recv_rows: given 2147483648", "to 2147483647"),
    # a handle in dispatch
    "handle a string": (lambda g: g.dispatch(g.x, None, handle="h"), "handle: given str", "the Handle of a dispatch"),
    "handle of another buffer": (
        lambda g: g.dispatch(g.x, None, handle=g.other),
        "handle: given one of",
        "this buffer",
    ),
    "handle and idx": (lambda g: g.reuse(g.x, g.topk_idx), "topk_idx: given a tensor beside handle", "None"),
    "handle, too few tokens": (lambda g: g.reuse(g.x[:28]), "x: given 28 rows", f"the {N} rows that the handle"),
    "handle, other layout": (lambda g: g.reuse(layout="rank"), "layout: given 'rank'", "the handle's 'expert'"),
    "handle, other alignment": (lambda g: g.reuse(expert_alignment=8), "expert_alignment: given 8", "the handle's 1"),
    "handle, other rows": (lambda g: g.reuse(max_recv_rows=1), "max_recv_rows: given 1", f"None, or the handle's {R}"),
    # combine
    "y of float32": (lambda g: g.combine(g.y.float()), f"y: given [{R}, 64] of torch.float32 on {ON}", Y_ALLOWED),
    "y too short": (lambda g: g.combine(g.y[1:]), "y: given [", Y_ALLOWED),
    "y too long": (lambda g: g.combine(g.y.repeat(2, 1)), "y: given [", Y_ALLOWED),
    "y too narrow": (lambda g: g.combine(g.y[:, :8]), f"y: given [{R}, 8]", Y_ALLOWED),
    "y on meta": (lambda g: g.combine(g.y.to("meta")), "bfloat16 on meta", Y_ALLOWED),
    "y sparse": (lambda g: g.combine(g.y.to_sparse()), "y: given", "(torch.sparse_coo)", Y_ALLOWED),
    "y None": (lambda g: g.combine(None), "y: given NoneType", Y_ALLOWED),
    "y a pair": (lambda g: g.combine((g.y, g.y)), "y: given tuple", Y_ALLOWED),
    "combined weights of float64": (
        lambda g: g.combine(g.y, g.out.topk_weights.double()),
        f"topk_weights: given [{R}] of torch.float64 on {ON}",
        f"a tensor [{R}] of torch.float32 on {ON}",
    ),
    "combined weights of the other layout": (
        lambda g: g.combine(g.y, g.x.new_zeros(len(g.y), NUM_TOPK, dtype=torch.float32)),
        f"topk_weights: given [{R}, 3]",
        f"a tensor [{R}] of torch.float32",
    ),
    "combined weights on meta": (lambda g: g.combine(g.y, g.out.topk_weights.to("meta")), "topk_weights", "on meta"),
    "combine a plan": (lambda g: g.combine(g.y, handle=g.out.handle.plan), "handle: given Tensor", "the Handle of a"),
    "combine on another buffer": (lambda g: g.combine(g.y, handle=g.other), "handle: given one of buffer"),
    # the same through the functions with gradients
    "ep.dispatch, x": (lambda g: ep.dispatch(g.buffer, g.x.float(), g.topk_idx), "torch.float32", X_ALLOWED),
    "ep.dispatch, expert": (
        lambda g: ep.dispatch(g.buffer, g.x.requires_grad_(), g.with_entry(0, 0, 12)),
        "topk_idx[0, 0]: given 12",
    ),
    "ep.dispatch, buffer": (lambda g: ep.dispatch(g.x, g.topk_idx), "buffer: given Tensor", "an ep_dispatcher.Buffer"),
    "ep.combine, buffer": (
        lambda g: ep.combine(None, g.y, g.out.handle),
        "buffer: given NoneType",
        "an ep_dispatcher.Buffer",
    ),
    "ep.combine, y": (lambda g: ep.combine(g.buffer, g.y.float(), g.out.handle), "torch.float32", Y_ALLOWED),
    "ep.combine, handle": (lambda g: ep.combine(g.buffer, g.y, None), "handle: given NoneType", "the Handle of a"),
}


# Entries that a GPU's kernels read, in an operation that all ranks are in.
FOUND_BY_KERNELS = [name for name in MISTAKES if name.startswith("expert ") or name == "ep.dispatch, expert"]


def make_mistake(rank: int, engine: str, names: list[str], ranks_per_node: int | None, together: bool):
    """Rank 1 makes each mistake, alone or while the others do it right; then all ranks do it right. Returns the texts
    and the rows of each rank."""
    messages, options = {}, dict(engine=engine, timeout_s=20)
    with (
        make_buffer(ranks_per_node=ranks_per_node, **options) as buffer,
        make_buffer(ranks_per_node=1, **options) as other_buffer,
    ):
        x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
        other = other_buffer.dispatch(x, topk_idx, topk_weights).handle
        out = buffer.dispatch(x, topk_idx, topk_weights)
        y = outputs(rank, len(out.x), device=device(buffer))
        given = Given(buffer, x, topk_idx, topk_weights, out, y, other)
        for seed, name in enumerate(names):
            if rank == 1:
                moved = buffer.counters()
                messages[name] = error_of(MISTAKES[name][0], given)
                assert together or buffer.counters() == moved, "something was sent before the error"
            elif together:
                buffer.dispatch(x, topk_idx, topk_weights if name != "ep.dispatch, expert" else None)
            round_trip(buffer, seed=seed % 5)
    return messages, len(out.x)


def assert_told(told: tuple[dict[str, str], int], engine: str, names: list[str]) -> None:
    messages, num_rows = told
    for name in names:
        words = [word.replace(R, str(num_rows)).replace(ON, engine) for word in MISTAKES[name][1:]]
        assert_words(messages[name], words)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_wrong_arguments_on_one_rank(pools, engine, ranks_per_node):
    names = [name for name in MISTAKES if engine == "cpu" or name not in FOUND_BY_KERNELS]
    _, told = pools(2).run(make_mistake, engine, names, ranks_per_node, False)
    assert_told(told, engine, names)


@pytest.mark.skipif(NO_CUDA is not None, reason=f"no GPU: {NO_CUDA}")
def test_wrong_entries_that_a_kernel_finds(pools):
    """The rank that gave it gets the error; the others have the rows of all right entries, and all can go on."""
    _, told = pools(2).run(make_mistake, "cuda", FOUND_BY_KERNELS, None, True)
    assert_told(told, "cuda", FOUND_BY_KERNELS)


def mistakes_with_pairs(rank: int, engine: str) -> list[str]:
    buffer = make_buffer(hidden=256, engine=engine)
    num_tokens = 5
    topk_idx, _ = make_routing("uniform", num_tokens, NUM_EXPERTS, NUM_TOPK, seed=0)
    rows, scales = torch.zeros(num_tokens, 256).to(torch.float8_e4m3fn), torch.ones(num_tokens, 2)
    rows, scales, topk_idx = (t.to(device(buffer)) for t in (rows, scales, topk_idx))
    messages = []
    for x, quantize in [
        ((rows.bfloat16(), scales), None),
        ((rows, scales.bfloat16()), None),
        ((rows, scales[:, :1]), None),
        ((rows, scales[1:]), None),
        ((rows[:, :128], scales), None),
        ((rows,), None),
        ((rows, scales, scales), None),
        (rows, None),
        ((rows, scales), "e4m3_1x128"),
    ]:
        if rank == 1:
            messages.append(error_of(buffer.dispatch, x, topk_idx, quantize=quantize))
        out = buffer.dispatch((rows, scales), topk_idx)
        assert out.x[0].dtype == torch.float8_e4m3fn and (out.x[1] == 1).all()
    buffer.destroy()
    return messages


def test_wrong_pairs(pools, engine):
    expected_starts = [
        "x[0]: given [5, 256] of torch.bfloat16 on cpu, allowed: a tensor [num_tokens, 256] of torch.float8_e4m3fn on",
        "x[1]: given [5, 2] of torch.bfloat16 on cpu, allowed: a tensor [5, 2] of torch.float32 on cpu",
        "x[1]: given [5, 1] of torch.float32 on cpu, allowed: a tensor [5, 2] of torch.float32 on cpu",
        "x[1]: given [4, 2] of torch.float32 on cpu, allowed: a tensor [5, 2] of torch.float32 on cpu",
        "x[0]: given [5, 128] of torch.float8_e4m3fn on cpu, allowed: a tensor [num_tokens, 256] of torch.float8",
        "x: given a tuple of 1, allowed: a tensor, or a pair (rows, scales)",
        "x: given a tuple of 3, allowed: a tensor, or a pair (rows, scales)",
        "x: given [5, 256] of torch.float8_e4m3fn on cpu, allowed: a tensor [num_tokens, 256] of torch.bfloat16 on",
        "quantize: given 'e4m3_1x128', allowed: None when x is a pair, whose rows are quantised already",
    ]
    for message, start in zip(pools(2).run(mistakes_with_pairs, engine)[1], expected_starts, strict=True):
        assert message.startswith(start.replace(" on cpu", f" on {engine}"))


def weights_of_the_wrong_layout(rank: int, engine: str):
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
        out = buffer.dispatch(x, topk_idx, topk_weights, layout="rank")
        message = error_of(buffer.combine, out.x, out.handle, topk_weights=out.topk_weights[:, 0])
        back = buffer.combine(out.x, out.handle, topk_weights=out.topk_weights).topk_weights
        assert torch.equal(back, topk_weights.masked_fill(topk_idx < 0, 0))
        return message, len(out.x)


def test_combined_weights_in_rank_layout(pools, engine):
    for message, num_rows in pools(2).run(weights_of_the_wrong_layout, engine):
        assert_words(message, [f"topk_weights: given [{num_rows}] of", f"a tensor [{num_rows}, 3] of torch.float32"])


# ---- accepted, and right --------------------------------------------------------------------------------------------


def strided(t: Tensor) -> Tensor:
    """The same values in memory with gaps, columns first."""
    wide = torch.full((t.shape[-1] * 2, *t.shape[:-1]), 77, dtype=t.dtype, device=t.device)
    wide[::2] = t.movedim(-1, 0)
    result = wide[::2].movedim(0, -1)
    assert torch.equal(result, t) and (t.numel() < 2 or not result.is_contiguous())
    return result


def negated(t: Tensor) -> Tensor:
    """The same values, which only a bit says are not those in memory: as the imaginary part of a conjugate."""
    result = torch._neg_view(-t)
    assert result.is_neg() and result.is_contiguous()
    return result


def without_plain_memory(rank: int, engine: str, changed, layout: str, ranks_per_node: int) -> None:
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        where = dict(device=device(buffer))
        x, topk_idx, topk_weights = inputs(rank, **where)
        results = []
        for change in (lambda t: t, changed):
            out = buffer.dispatch(change(x), change(topk_idx), change(topk_weights), layout=layout)
            again = buffer.dispatch(change(x), None, change(topk_weights), handle=out.handle)
            y = change(outputs(rank, len(out.x), **where))
            res = buffer.combine(y, out.handle, topk_weights=change(out.topk_weights))
            differentiable = ep.combine(buffer, y, out.handle)
            results.append([out.x, out.topk_weights, again.x, again.topk_weights, *(res.x, res.topk_weights)])
            results[-1].append(differentiable)
        for plain, other in zip(*results):
            assert torch.equal(plain, other)
        if layout == "expert":
            assert_received(out, expected(buffer)[0])


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("change", [strided, negated])
def test_tensors_that_are_not_plain_memory(pools, engine, change, layout, ranks_per_node):
    pools(2).run(without_plain_memory, engine, change, layout, ranks_per_node)


# ---- ranks that do not agree ----------------------------------------------------------------------------------------


def make_disagreement(rank: int, engine: str, kind: str, odd: int, ranks_per_node: int, timeout_s: float) -> str:
    """Rank ``odd`` does something else than the others. Returns the error; the buffer works afterwards."""
    buffer = make_buffer(hidden=128, engine=engine, ranks_per_node=ranks_per_node, timeout_s=timeout_s)
    odd_one = rank == odd
    _, topk_idx, topk_weights = inputs(rank, device=device(buffer))
    x = torch.randn(len(topk_idx), 128, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device(buffer))
    first, second = (buffer.dispatch(x, topk_idx, topk_weights) for _ in range(2))
    out = second if odd_one else first

    def right() -> None:
        again = buffer.dispatch(x, topk_idx, topk_weights)
        assert torch.equal(again.x, first.x) and torch.equal(again.topk_weights, first.topk_weights)
        assert torch.equal(buffer.combine(again.x, again.handle).x, buffer.combine(first.x, first.handle).x)

    calls = {
        "layout": lambda: buffer.dispatch(x, topk_idx, layout="rank" if odd_one else "expert"),
        "expert_alignment": lambda: buffer.dispatch(x, topk_idx, expert_alignment=8 if odd_one else 1),
        "topk_weights": lambda: buffer.dispatch(x, topk_idx, None if odd_one else topk_weights),
        "x": lambda: buffer.dispatch(x, topk_idx, quantize="e4m3_1x128" if odd_one else None),
        "cached handle": lambda: buffer.dispatch(x, handle=out.handle),
        "cached topk_weights": lambda: buffer.dispatch(x, None, topk_weights if odd_one else None, handle=first.handle),
        "cached x": lambda: buffer.dispatch(x, handle=first.handle, quantize="e4m3_1x128" if odd_one else None),
        "combined handle": lambda: buffer.combine(out.x, out.handle),
        "combined topk_weights": lambda: buffer.combine(
            first.x, first.handle, topk_weights=None if odd_one else first.topk_weights
        ),
    }
    try:
        right()
        # On a GPU it is found once the operation is complete.
        message = error_of(lambda: (calls[kind](), buffer.check()))
        right()
        return message
    finally:
        buffer.destroy()


DISAGREEMENTS = ["layout", "expert_alignment", "topk_weights", "x", "cached handle", "cached topk_weights", "cached x"]
DISAGREEMENTS += ["combined handle", "combined topk_weights"]


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_disagreement_is_an_error_on_all_ranks(pools, engine, kind, ranks_per_node, odd):
    argument = kind.split()[-1]
    words = {
        "layout": ["'rank'", "'expert'"],
        "expert_alignment": ["gave 8", "gave 1"],
        "topk_weights": ["them", "None"],
        "x": ["128", "256"],
        "handle": ["of epoch 1", "of epoch 2"],
    }[argument]
    for message in pools(4).run(make_disagreement, engine, kind, odd, ranks_per_node, 30):
        assert message.startswith(argument)
        assert_words(message, [*words, f"rank {odd} ", "all ranks must"])


def operations_of(buffer: ep.Buffer, rank: int):
    """Operations that ranks may take for one another, by name, each complete when it returns."""
    given = inputs(rank, device=device(buffer))
    out = buffer.dispatch(*given)
    calls = {
        "dispatch": lambda: buffer.dispatch(*given),
        "dispatch of fixed rows": lambda: buffer.dispatch(*given, max_recv_rows=1000),
        "cached dispatch": lambda: buffer.dispatch(given[0], None, given[2], handle=out.handle),
        "combine": lambda: buffer.combine(out.x, out.handle),
    }
    decoded = buffer.dispatch(*given[:2], layout="decode")
    calls["decode combine"] = lambda: buffer.combine(decoded.x, decoded.handle, weights=given[2])
    return {name: lambda call=call: call().event.synchronize() for name, call in calls.items()}


MIXED = [("dispatch", "cached dispatch"), ("combine", "dispatch"), ("cached dispatch", "combine")]


def mix_operations_on_one_node(rank: int, engine: str, operation: str, other: str, odd: int) -> list[str]:
    """One rank calls another operation than the others, twice, and all go on."""
    with make_buffer(engine=engine, timeout_s=60) as buffer:
        calls, messages = operations_of(buffer, rank), []
        begin = time.monotonic()
        for _ in range(2):
            messages.append(error_of(calls[other if rank == odd else operation]))
            round_trip(buffer)
        assert time.monotonic() - begin < 30
        return messages


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("operation,other", [*MIXED, ("dispatch of fixed rows", "cached dispatch")])
def test_different_operations_on_one_node_are_an_error_on_all_ranks(pools, engine, operation, other, odd):
    field = "operation" if "combine" in (operation, other) else "handle"
    ranks = pools(4).run(mix_operations_on_one_node, engine, operation, other, odd)
    assert len({message for messages in ranks for message in messages}) == 1
    message = ranks[0][0]
    assert message.startswith(f"{field}: rank {odd or 1} ") and "rank 0 " in message and "all ranks must" in message
    words = ["None", "the plan of epoch 1"] if field == "handle" else ["is in a dispatch", "is in a combine"]
    assert_words(message, words)


def mix_operations(rank: int, operation: str, other: str, ranks_per_node: int) -> list[tuple[str, str]]:
    """Rank 1 calls another operation than the others. Returns the errors of it and of a right one after it."""
    buffer = make_buffer(engine="cpu", ranks_per_node=ranks_per_node, timeout_s=1.5)
    calls = operations_of(buffer, rank)
    errors = []
    for call in (calls[other if rank == 1 else operation], calls["dispatch"]):
        with pytest.raises((ValueError, ep.PeerTimeoutError)) as caught:
            call()
        errors.append((type(caught.value).__name__, str(caught.value)))
    buffer.destroy()
    return errors


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@pytest.mark.parametrize("operation,other", MIXED)
def test_different_operations_on_several_nodes_go_through_on_no_rank(pools, operation, other, ranks_per_node):
    assert_on_no_rank(pools(4).run(mix_operations, operation, other, ranks_per_node), ranks_per_node)


def assert_on_no_rank(ranks: list, ranks_per_node: int) -> None:
    """No process dies, and no rank takes rows of another operation for its own. The buffer has ended."""
    for rank, ((first, text), (second, again)) in enumerate(ranks):
        assert first in ("DisagreementError", "PeerTimeoutError") and "destroy() this buffer" in text
        assert (second, again) == (first, text)
        if ranks_per_node == 2 and first == "DisagreementError":
            assert rank < 2 and "rank 1 " in text and "all ranks must" in text


# ---- what an error keeps --------------------------------------------------------------------------------------------


def alive_after_an_error(rank: int) -> list[bool]:
    """A caught error must not keep the buffer and the tensors until the next garbage collection."""
    gc.disable()
    try:
        x, topk_idx, topk_weights = inputs(rank)
        topk_idx[0, 0] = -7
        buffer = make_buffer(engine="cpu")
        error_of(buffer.dispatch, x, topk_idx, topk_weights)
        buffer.destroy()
        references = [weakref.ref(buffer), weakref.ref(x)]
        del buffer, x
        return [reference() is not None for reference in references]
    finally:
        gc.enable()


def test_a_caught_error_keeps_nothing_alive(pools):
    assert pools(1).run(alive_after_an_error) == [[False, False]]


# ---- too few rows ---------------------------------------------------------------------------------------------------


def dispatch_and_wait(buffer: ep.Buffer, *args, **options) -> ep.DispatchOutput:
    """What an engine whose host does not wait finds late, it says here."""
    out = buffer.dispatch(*args, **options)
    out.event.synchronize()
    return out


def with_too_few_rows(rank: int, engine: str, ranks_per_node: int, layout: str, given: list[int]):
    """Every rank's rows needed, its error, and whether the rows that the error names are enough."""
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        arguments = inputs(rank, device=device(buffer))
        plain = buffer.dispatch(*arguments, layout=layout)
        message = error_of(dispatch_and_wait, buffer, *arguments, layout=layout, max_recv_rows=given[rank])
        round_trip(buffer)
        named = {int(r): int(rows) for r, rows in re.findall(r"rank (\d+) needs (\d+) rows", message)}
        out = buffer.dispatch(*arguments, layout=layout, max_recv_rows=named.get(rank, given[rank]))
        assert torch.equal(out.x[: len(plain.x)], plain.x) and not out.x[len(plain.x) :].any()
        assert torch.equal(buffer.combine(out.x, out.handle).x, buffer.combine(plain.x, plain.handle).x)
        return len(plain.x), message, named


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
def test_too_few_receive_rows(pools, engine, ranks_per_node, layout):
    """The error on every rank says which ranks need how many, and with these it works."""
    given = [3, 0, 1000, 5]
    ranks = pools(4).run(with_too_few_rows, engine, ranks_per_node, layout, given)
    needed = [rows for rows, _, _ in ranks]
    assert all(rows > 5 for rows in needed)
    for _, message, named in ranks:
        assert message == ranks[0][1] and named == {rank: needed[rank] for rank in (0, 1, 3)}
        assert_words(
            message,
            ["max_recv_rows", *(f"rank {rank} needs {needed[rank]} rows, given {given[rank]}" for rank in named)],
        )


def one_row_less(rank: int, engine: str, less: int):
    with make_buffer(engine=engine) as buffer:
        right, _ = expected(buffer)
        given, num_rows = inputs(rank, device=device(buffer)), len(right.x) - (less == rank)
        try:
            assert_received(dispatch_and_wait(buffer, *given, max_recv_rows=num_rows), right)
            message = None
        except ValueError as error:
            message = str(error)
        round_trip(buffer, seed=1, max_recv_rows=200)
        return message, len(right.x)


def test_exactly_enough_rows_are_enough_and_one_less_is_not(pools, engine):
    assert [message for message, _ in pools(2).run(one_row_less, engine, -1)] == [None, None]
    ranks = pools(2).run(one_row_less, engine, 1)
    rows = ranks[1][1]
    assert {message for message, _ in ranks} == {
        f"max_recv_rows: too small: rank 1 needs {rows} rows, given {rows - 1}"
    }


def more_rows_than_can_be_counted(rank: int, engine: str, max_recv_rows: int | None) -> str:
    with make_buffer(engine=engine) as buffer:
        given = inputs(rank, device=device(buffer))

        def dispatch() -> None:
            options = dict(expert_alignment=TOO_LARGE - 1, max_recv_rows=max_recv_rows)
            buffer.dispatch(*given, **options).event.synchronize()

        message = error_of(dispatch)
        round_trip(buffer)
        return message


@pytest.mark.parametrize("max_recv_rows", [None, 200])
def test_more_rows_than_can_be_counted(pools, engine, max_recv_rows):
    (message,) = set(pools(2).run(more_rows_than_can_be_counted, engine, max_recv_rows))
    assert_words(message, ["expert_alignment: given 2147483647", "rank 0 receives", "allowed: up to 2147483647 rows"])


# ---- after the end --------------------------------------------------------------------------------------------------


def use_after_destroy(rank: int, engine: str) -> dict[str, str]:
    buffer, living = make_buffer(engine=engine), make_buffer(engine=engine)
    x, topk_idx, topk_weights = inputs(rank, device=device(buffer))
    leaf = x.clone().requires_grad_()
    out = ep.dispatch(buffer, leaf, topk_idx, topk_weights)
    buffer.destroy()
    buffer.destroy()
    rows = out.x.detach()
    messages = {
        "dispatch": error_of(buffer.dispatch, x, topk_idx, topk_weights),
        "combine": error_of(buffer.combine, rows, out.handle),
        "counters": error_of(buffer.counters),
        "check": error_of(buffer.check),
        "ep.dispatch": error_of(ep.dispatch, buffer, x, topk_idx),
        "ep.combine": error_of(ep.combine, buffer, rows, out.handle),
        "backward": error_of(out.x.sum().backward),
        "handle in dispatch": error_of(living.dispatch, x, handle=out.handle),
        "handle in combine": error_of(living.combine, rows, out.handle),
    }
    with buffer, living:  # leaving is a destroy, which may come after another one
        round_trip(living)
        living.destroy()
    with make_buffer(engine=engine) as buffer:
        round_trip(buffer)
    return messages


def test_use_after_destroy(pools, engine):
    for messages in pools(2).run(use_after_destroy, engine):
        for what in ("dispatch", "combine", "counters", "check", "ep.dispatch", "ep.combine"):
            assert messages[what] == "buffer: given one that was destroyed, allowed: a living buffer"
        assert_words(messages["backward"], ["buffer: given one that is gone"])
        for what in ("handle in dispatch", "handle in combine"):
            assert_words(messages[what], ["handle: given one of buffer", "allowed: one of this buffer"])
