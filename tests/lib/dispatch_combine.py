"""Cases of dispatch and combine: sizes, inputs, the definition's results, and comparisons with them."""

import dataclasses
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher import reference
from ep_dispatcher.tools.testing import (
    ROUTINGS,
    device_of,
    different_bits,
    make_routing,
    with_negative_zeros,
)

NUM_TOKENS = {
    "even": (19, 19, 19, 19),
    "uneven": (23, 0, 1, 14),
    "few chunks": (300, 270, 300, 270),  # more than one of a combine, and of a window between nodes
    "some": (900, 700, 0, 600),  # more than a chunk of a combine, and few enough for direct plans of two ranks
    "many": (2500, 2100, 0, 1025),
}

E8M0 = torch.float8_e8m0fnu

QUANTIZE = {"quantize": "e4m3_1x128", "quantize_pow2": "e4m3_1x128_pow2", "quantize_mx": "mxfp8"}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    num_ranks: int
    ranks_per_node: int
    dtype: torch.dtype = torch.float32
    payload: str = "rows"  # or "pair", "pair_mx": float8 rows and scales, or a key of QUANTIZE: made a pair on the way
    num_topk: int = 2
    hidden: int = 64
    experts_per_rank: int = 2
    layout: str = "expert"
    alignment: int = 1
    recv: str = "counted"  # "counted", or with max_recv_rows: "exact" or "spare"
    routing: str = "uniform"
    index_dtype: torch.dtype = torch.int64
    weighted: bool = True
    tokens: str = "even"  # a key of NUM_TOKENS
    threads: int = 1  # of PyTorch, per rank

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.experts_per_rank

    @property
    def node_of(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.num_ranks)]

    @property
    def quantize(self) -> str | None:
        return QUANTIZE.get(self.payload)

    def possible(self) -> bool:
        return self.num_topk <= self.num_experts and (
            self.payload == "rows" or (self.hidden % 16 == 0 and self.dtype == torch.bfloat16)
        )

    def __str__(self) -> str:
        parts = dataclasses.asdict(self).values()
        return "-".join(str(part).removeprefix("torch.") for part in parts)


def pairwise(options: dict[str, list], seed: int = 0) -> list[Case]:
    """Few cases that together hold every possible pair of options of two different fields."""
    rng, names = random.Random(seed), list(options)

    def pairs_of(values: dict) -> set:
        return set(itertools.combinations([(name, values[name]) for name in names if name in values], 2))

    missing = dict.fromkeys(  # a dict keeps the order, so that the cases are the same in every process
        ((a, va), (b, vb)) for a, b in itertools.combinations(names, 2) for va in options[a] for vb in options[b]
    )
    cases = []
    while missing:
        first, candidates = next(iter(missing)), []
        for _ in range(60):
            values = {name: rng.choice(options[name]) for name in names} | dict(first)
            case = Case(*values["ranks"], **{name: values[name] for name in names if name != "ranks"})
            gained = missing.keys() & pairs_of(values) if case.possible() else set()
            candidates.append((gained, case))
        gained, case = max(candidates, key=lambda candidate: len(candidate[0]))
        cases += [case] if gained else []  # without gain: no possible case has the first pair
        for pair in {first, *gained}:
            del missing[pair]
    return cases


AXES = {
    "ranks": [(n, m) for n in (1, 2, 3, 4, 6, 8) for m in range(1, n + 1) if n % m == 0],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "payload": ["rows", "pair", "quantize", "quantize_mx"],
    "num_topk": [1, 2, 8],
    "hidden": [64, 512, 1000, 2880],
    "experts_per_rank": [1, 3, 8],
    "layout": ["expert", "rank"],
    "alignment": [1, 8, 128],
    "recv": ["counted", "exact", "spare"],
    "routing": list(ROUTINGS),
    "index_dtype": [torch.int64, torch.int32],
    "weighted": [True, False],
    "tokens": ["even", "uneven"],
    "threads": [1, 3],
}

GRID = pairwise(AXES)


@dataclass(frozen=True)
class Inputs:
    """What the ranks give to dispatch, one entry per rank."""

    x: list[Tensor] | list[tuple[Tensor, Tensor]]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor] | None

    @property
    def most_tokens(self) -> int:
        """Of any rank, and at least 1: of a buffer."""
        return max(1, *(idx.shape[0] for idx in self.topk_idx))

    def on(self, rank: int, device: str) -> tuple:
        """(x, topk_idx, topk_weights) of a rank."""
        each = (self.x, self.topk_idx, self.topk_weights)
        return tuple(None if values is None else to(device, values[rank]) for values in each)


def quantized(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Up to 128 values are divided by their scale: their largest magnitude / 448, or the next power of two.

    Those of MXFP8 are up to 32, and an exponent e, of four or none, stands for 2^(e - 127).
    """
    if kind == "mxfp8":
        blocks = x.double().split(32, 1)
        parts = [torch.frexp((block.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-127)) for block in blocks]
        exponents = torch.cat([exponent - (mantissa == 0.5).int() for mantissa, exponent in parts], 1)
        rows = x.double() / 2.0 ** exponents.double().repeat_interleave(32, 1)[:, : x.shape[1]]
        exponents = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, -exponents.shape[1] % 4))
        return rows.float().to(torch.float8_e4m3fn), exponents.view(E8M0)
    blocks = x.float().split(128, 1)
    scales = [(block.abs().amax(1, keepdim=True) / 448).clamp(min=2**-126) for block in blocks]
    if kind == "e4m3_1x128_pow2":
        parts = [torch.frexp(scale) for scale in scales]
        scales = [2.0 ** torch.where(mantissa == 0.5, exponent - 1, exponent) for mantissa, exponent in parts]
    rows = torch.cat([block / scale for block, scale in zip(blocks, scales)], 1)
    return rows.to(torch.float8_e4m3fn), torch.cat(scales, 1)


def random_rows(case: Case, num_tokens: int, seed: int):
    rows = torch.randn(num_tokens, case.hidden, generator=torch.Generator().manual_seed(seed)).to(case.dtype)
    rows = with_negative_zeros(rows, seed=seed)
    if case.payload == "pair":
        scales = torch.rand(num_tokens, -(-case.hidden // 128), generator=torch.Generator().manual_seed(seed))
        return rows.to(torch.float8_e4m3fn), scales
    if case.payload == "pair_mx":
        shape, generator = (num_tokens, 4 * -(-case.hidden // 128)), torch.Generator().manual_seed(seed)
        scales = torch.randint(255, shape, generator=generator, dtype=torch.uint8)  # not NaN
        return rows.to(torch.float8_e4m3fn), scales.view(E8M0)
    if case.quantize:  # rows of all magnitudes, a block without any, a zero with a sign
        rows *= 2.0 ** torch.randint(-125, 110, (num_tokens, 1), generator=torch.Generator().manual_seed(seed))
        rows[::3, :128], rows[::4, -16:], rows[:, 200:201] = 0, 0, -0.0
    return rows


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    x, topk_idx, topk_weights = [], [], []
    for rank in range(case.num_ranks):
        num_tokens = NUM_TOKENS[case.tokens][(rank + seed) % 4]
        rank_seed = 100 * seed + rank
        idx, weights = make_routing(case.routing, num_tokens, case.num_experts, case.num_topk, seed=rank_seed)
        rows = random_rows(case, num_tokens, rank_seed)
        if case.payload == "rows":
            rows[(idx < 0).all(1)] = float("nan")  # nobody may look at a token without experts
        x.append(rows)
        topk_idx.append(idx.to(case.index_dtype))
        topk_weights.append(weights)
    return Inputs(x, topk_idx, topk_weights if case.weighted else None)


def expert_rows(case: Case, out, rank: int) -> tuple[Tensor, Tensor | None]:
    """Make random outputs of the experts and weights for what dispatch returned; NaN where there is no token."""
    num_rows = (out.x[0] if isinstance(out.x, tuple) else out.x).shape[0]
    y = torch.randn(num_rows, case.hidden, generator=torch.Generator().manual_seed(1000 + rank)).to(case.dtype)
    y, weights = with_negative_zeros(y, seed=rank), None
    if out.topk_weights is not None:
        weights = torch.rand(out.topk_weights.shape, generator=torch.Generator().manual_seed(2000 + rank))
    used = torch.zeros(num_rows, dtype=torch.bool)
    if case.layout == "rank":
        used |= (out.topk_idx.cpu() >= 0).any(1)
    else:
        begin = 0
        for count, padded in zip(out.tokens_per_expert.tolist(), out.rows_per_expert.tolist()):
            used[begin : begin + count] = True
            begin += padded
    y[~used] = float("nan")
    return y, weights


def to(device: str, value):
    if isinstance(value, tuple):
        return tuple(to(device, v) for v in value)
    return None if value is None else value.detach().to(device)


@dataclass(frozen=True)
class Received:
    """The fields of dispatch's result, without the handle, so that it can travel."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_weights: Tensor | None
    topk_idx: Tensor | None
    tokens_per_expert: Tensor
    rows_per_expert: Tensor

    @staticmethod
    def of(out) -> "Received":
        x, *rest = (getattr(out, field.name) for field in dataclasses.fields(Received))
        return Received(tuple(x) if isinstance(x, tuple) else x, *rest)


def make_buffer(case: Case, engine: str, max_tokens_per_rank: int, group=None, **changes) -> ep.Buffer:
    names = ("hidden", "num_experts", "num_topk", "dtype", "ranks_per_node")
    sizes = {name: getattr(case, name) for name in names} | dict(max_tokens_per_rank=max_tokens_per_rank, timeout_s=60)
    return ep.Buffer(group, engine=engine, **(sizes | changes))


def run_case(rank: int, engine: str, case: Case, inputs: Inputs, again: Inputs, max_recv_rows: int | None, group=None):
    """Dispatch, combine, and the same with other rows on the cached handle."""
    device = device_of(engine, rank)
    torch.set_num_threads(case.threads)
    handle, results = None, []
    placed = dict(layout=case.layout, expert_alignment=case.alignment, max_recv_rows=max_recv_rows)
    with make_buffer(case, engine, inputs.most_tokens, group) as buffer:
        for given, options in ((inputs, placed), (again, {})):
            x, topk_idx, topk_weights = given.on(rank, device)
            topk_idx = topk_idx if handle is None else None
            out = buffer.dispatch(x, topk_idx, topk_weights, quantize=case.quantize, handle=handle, **options)
            handle = out.handle
            y, weights = to(device, expert_rows(case, out, rank))
            combined = buffer.combine(y, handle, topk_weights=weights)
            results.append((Received.of(out), (combined.x, combined.topk_weights)))
    torch.set_num_threads(1)
    return results


def rows_needed(case: Case, topk_idx: list[Tensor]) -> list[int]:
    """The rows that every rank receives, padding included."""
    x = [torch.zeros(idx.shape[0], 1) for idx in topk_idx]
    options = dict(num_experts=case.num_experts, layout=case.layout, expert_alignment=case.alignment)
    return [out.x.shape[0] for out in reference.dispatch(x, topk_idx, None, **options)]


def expected_of(case: Case, inputs: Inputs, max_recv_rows: int | None):
    x = [quantized(rows, case.quantize) for rows in inputs.x] if case.quantize else inputs.x
    has_e8m0 = case.payload in ("pair_mx", "quantize_mx")
    if has_e8m0:  # indexing takes none
        x = [(rows, scales.view(torch.uint8)) for rows, scales in x]
    options = dict(num_experts=case.num_experts, layout=case.layout)
    placed = dict(expert_alignment=case.alignment, max_recv_rows=max_recv_rows)
    received = reference.dispatch(x, inputs.topk_idx, inputs.topk_weights, **options, **placed)
    if has_e8m0:
        received = [dataclasses.replace(out, x=(out.x[0], out.x[1].view(E8M0))) for out in received]
    y, weights = zip(*(expert_rows(case, out, rank) for rank, out in enumerate(received)))
    weights = list(weights) if inputs.topk_weights else None
    combined = reference.combine(list(y), received, inputs.topk_idx, weights, node_of=case.node_of, **options)
    return list(zip(received, combined))


def assert_same(seen, expected, what: str) -> None:
    """Check that dtype, shape and all bits are the same, and that no element is NaN."""
    if isinstance(expected, tuple):
        assert isinstance(seen, tuple) and len(seen) == len(expected), f"{what}: a tuple of {len(expected)} expected"
        for i, pair in enumerate(zip(seen, expected)):
            assert_same(*pair, f"{what}[{i}]")
        return
    if expected is None or seen is None:
        assert seen is None and expected is None, f"{what}: seen {seen}, expected {expected}"
        return
    assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape), what
    assert not (expected.is_floating_point() and expected.float().isnan().any()), f"{what}: NaN is expected"
    wrong = different_bits(seen, expected).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        pytest.fail(
            f"{what}: {len(wrong)} of {seen.numel()} differ, first at {first}: "
            f"seen {seen[first].item()}, expected {expected[first].item()}"
        )


def assert_step(seen, expected, where: str) -> None:
    """Compare (what a dispatch returned, (x, topk_weights) of a combine) with the definition's."""
    (out, combined), (right, right_combined) = seen, expected
    for field in dataclasses.fields(Received):
        assert_same(to("cpu", getattr(out, field.name)), getattr(right, field.name), f"{where}: out.{field.name}")
    assert_same(to("cpu", combined), right_combined, f"{where}: combined")


def other_rows(case: Case, inputs: Inputs) -> Inputs:
    """The same routing with other rows and weights."""
    x = [random_rows(case, idx.shape[0], 500 + rank) for rank, idx in enumerate(inputs.topk_idx)]
    return Inputs(x, inputs.topk_idx, [1 - w for w in inputs.topk_weights] if inputs.topk_weights else None)


def check_results(case: Case, ranks: list, inputs: Inputs, again: Inputs, max_recv_rows: int | None = None) -> None:
    """Compare everything that ``run_case`` returned with the definition."""
    for turn, given in enumerate((inputs, again)):
        for rank, expected in enumerate(expected_of(case, given, max_recv_rows)):
            assert_step(ranks[rank][turn], expected, f"rank {rank}, {'cached handle' if turn else 'first use'}")


def check_case(pools, engine: str, case: Case, inputs: Inputs | None = None, run=run_case) -> None:
    inputs = make_inputs(case) if inputs is None else inputs
    again = other_rows(case, inputs)
    max_recv_rows = None
    if case.recv != "counted":
        max_recv_rows = max(1, *rows_needed(case, inputs.topk_idx)) + (17 if case.recv == "spare" else 0)
    ranks = pools(case.num_ranks).run(run, engine, case, inputs, again, max_recv_rows)
    check_results(case, ranks, inputs, again, max_recv_rows)
