"""Wrong arguments of the dispatcher's steps, and ranks that come late."""

import itertools
import pickle
import time
from datetime import timedelta
from functools import partial, partialmethod

import pytest
import torch
import torch.distributed as dist
from conftest import engine_classes, exhaustive
from lib.megatron_layer import (
    EXPERTS,
    HIDDEN,
    Layout,
    all_steps,
    environment,
    error_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    tokens_of,
    use_layout,
)
from lib.megatron_recompute import MOE

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.errors import copy_error
from ep_dispatcher.integrations.megatron.dispatcher import rank_capacity, routing

LIMIT_S, SLACK_S = 3.0, 20.0


@on_ranks()
def test_wrong_arguments_are_value_errors(rank: int):
    layer = make_layer(make_config())
    preprocess = layer.token_dispatcher.dispatch_preprocess
    x = tokens_of(rank)
    probs = torch.rand(24, EXPERTS, device=x.device)
    routing_map = torch.zeros_like(probs, dtype=torch.bool)
    routing_map[:, :2] = True
    wrong = [
        ("routing_map", (routing_map[:23], probs)),
        ("routing_map", (routing_map[:, :7], probs)),
        ("routing_map", (routing_map.long(), probs)),
        ("routing_map", (routing_map.view(12, 2, 8), probs)),
        ("routing_map", (None, probs)),
        ("probs", (routing_map, probs[:, :2])),
        ("probs", (routing_map, probs[0])),
        ("probs", (routing_map, routing_map)),
    ]
    for argument, arguments in wrong:
        text = error_of(partial(preprocess, x, *arguments))
        assert text.startswith(argument), text
    routing_map[5, :3] = True
    if not on_gpu():  # there it is found in dispatch
        text = error_of(partial(preprocess, x, routing_map, probs))
        assert text.startswith("routing_map chooses 3 experts"), text
    # With capacities that are filled up the map may mark more: those without a probability do not count.
    layer.config.moe_pad_expert_input_to_capacity = True
    first_two = torch.arange(EXPERTS, device=x.device) < 2
    preprocess(x, routing_map, torch.where(routing_map & first_two, probs + 0.1, 0))
    if not on_gpu():
        assert "3 experts" in error_of(partial(preprocess, x, routing_map, probs + 0.1))
    layer.config.moe_pad_expert_input_to_capacity = False
    routing_map[5, 2] = False
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        tokens, weights = preprocess(x, routing_map, probs.to(dtype))
        assert tokens.shape == (24, HIDDEN) and weights.shape == (24, 2) and weights.dtype == torch.float32
        topk_idx = layer.token_dispatcher.topk_idx
        assert (topk_idx.sort(dim=1).values == torch.arange(2, device=x.device)).all()
        torch.testing.assert_close(weights, probs.to(dtype).float().gather(1, topk_idx))
    layer(x)  # nothing was sent


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(ep=1, etp=2)], ids=str)
@pytest.mark.parametrize("topk", [2, EXPERTS - 1, EXPERTS])
@on_ranks()
def test_a_token_with_more_than_topk_experts_is_found_without_the_host(rank: int, monkeypatch, layout, topk: int):
    """Where the host does not wait for the router, as on a GPU: later forward passes are checked like the first."""
    layer = make_layer(make_config(moe_router_topk=topk))
    dispatcher, x = layer.token_dispatcher, tokens_of(rank)
    output = layer(x)[0]
    probs = torch.rand(24, EXPERTS, device=x.device) + 0.1
    routing_map = torch.zeros_like(probs, dtype=torch.bool)
    routing_map[:, :topk] = True
    monkeypatch.setattr(routing, "can_host_look", lambda routing_map: False)
    for wrong in ([7], [7, 20]) if topk < EXPERTS else ():
        given = routing_map.clone()
        given[wrong, -2:] = True  # two more than top-k, or the last of all
        text = error_of(partial(dispatcher.token_dispatch, *dispatcher.dispatch_preprocess(x, given, probs)))
        expected = [f"routing_map chooses more than {topk} experts for token {token}" for token in wrong]
        assert text.startswith(tuple(expected)) and "--moe-router-topk" in text, text
    *_, back = all_steps(dispatcher, x, routing_map, probs)
    assert dispatcher.topk_idx.shape == (24, topk * layout.etp) and int(dispatcher.topk_idx.max()) < 8 * layout.etp
    torch.testing.assert_close(back, x * layout.etp * (probs * routing_map).sum(1).view(12, 2, 1))
    monkeypatch.undo()
    assert torch.equal(layer(x)[0], output), "no rank has sent anything, and all go on"


@on_ranks(2, None)
def test_other_errors_stay_as_they_are(rank: int):
    repeated, negative = (checks.invalid_entry_error((0, 1, *entry), 8) for entry in ((5, True), (-2, False)))
    for error in (
        ValueError("topk_idx[0, 1] is 8, but has to be 7"),
        checks.too_few_rows_error([(5, 4)]),
        repeated,
        negative,
    ):
        assert routing.explained(error, 2) is error
    capacities = rank_capacity.Capacities(num_choices=4, num_ranks=8, max_tokens=10, share_of_node=0.4)
    for error in (ValueError("rank 0 needs 5 rows, but has 4"), repeated):
        assert rank_capacity.explained(error, capacities) is error
    ended = copy_error(checks.too_few_rows_error([(5, 4), (7, 4)]), ". It ends")
    assert str(rank_capacity.explained(ended, capacities)).endswith(
        "It ends. --ep-dispatcher-rank-capacity-factor 1.75 is enough for this dispatch"
    )
    padded = checks.too_few_rows_error([(35, 4)])
    assert "factor 8 is enough" in str(rank_capacity.explained(padded, capacities)), "never more than the ranks"
    crowded = checks.too_many_to_node_error([(3, 4), (9, 4)])
    assert "node-capacity-factor 2.25 is enough" in str(rank_capacity.explained(crowded, capacities))


WHERE = {  # the backward of a combine is a dispatch
    "forward": "layer 3, microbatch 2",
    "backward": "layer 3, microbatch 1, backward",
    "recompute": "layer 3, microbatch 1",
}


@pytest.mark.parametrize("when, victim", [("forward", 0), exhaustive("backward", 1), exhaustive("recompute", 0)])
@on_ranks()
def test_a_late_rank_is_named_with_layer_and_microbatch(rank: int, when: str, victim: int):
    with environment(EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S)):
        settings = MOE if when == "recompute" else {}
        layer = make_layer(make_config(**settings), layer_number=3)
        first = layer(tokens_of(rank).requires_grad_())[0]

        def act() -> None:
            if when != "forward":
                first.sum().backward()
            if on_gpu() and when != "forward":  # no host has waited: a later operation finds it
                torch.cuda.synchronize()
            if when == "forward" or on_gpu():
                layer(tokens_of(rank))
            if on_gpu():  # what the late rank reads of a dispatch was there before the other gave up
                torch.cuda.synchronize()
                layer(tokens_of(rank))

        store = dist.distributed_c10d._get_default_store()
        name = f"megatron/{layer.token_dispatcher.buffer.id}"
        if rank == victim:
            store.wait([name], timedelta(seconds=LIMIT_S + 4 * SLACK_S))
            error_of(act, ep.PeerTimeoutError)
        else:
            started = time.monotonic()
            with pytest.raises(ep.PeerTimeoutError) as caught:
                act()
            error = caught.value
            assert LIMIT_S - 0.5 < time.monotonic() - started < LIMIT_S + SLACK_S
            # On a GPU no host waits, and a backward has gone on when the error is found; unless it had to wait until
            # CUDA has loaded a kernel of the experts.
            where = {WHERE["forward"], WHERE["backward"]} if on_gpu() else {WHERE[when]}
            assert str(error).startswith(f"{error.note}: dispatch, epoch 3, phase"), str(error)
            assert error.note in where and error.late_ranks == (victim,) and error.rank == rank
            copied = pickle.loads(pickle.dumps(error))
            assert str(copied) == str(error) and vars(copied) == vars(error)
            store.set(name, "")
        dist.barrier()  # the ranks gave up at different times
        use_layout(Layout(ep=2))  # with new buffers all goes on
        layer(tokens_of(rank).requires_grad_())[0].sum().backward()


@pytest.mark.parametrize("settings", [{}, MOE], ids=["plain", "recompute"])
@on_ranks()
def test_every_operation_knows_its_layer_and_microbatch(rank: int, monkeypatch, settings: dict):
    """Whatever runs, the buffer knows for which layer and microbatch: also two layers in one backward."""
    layers = [make_layer(make_config(**settings), number) for number in (3, 7)]
    notes = []

    for kind, name in itertools.product(engine_classes(), ("dispatch", "combine")):

        def note(run, engine, request):
            notes.append(engine.config.wording.note)
            return run(engine, request)

        monkeypatch.setattr(kind, name, partialmethod(partial(note, getattr(kind, name))))
    outputs = [layers[1](layers[0](tokens_of(rank, number).requires_grad_())[0])[0] for number in range(2)]
    for output in outputs:
        output.sum().backward()
    where = "layer {1}, microbatch {0}".format
    expected = [where(*one) for one in itertools.product((1, 2), (3, 7)) for _ in range(2)]
    for one in itertools.product((1, 2), (7, 3)):
        expected += [where(*one)] * 2 * bool(settings) + [where(*one) + ", backward"] * 2
    assert notes == expected, notes


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [None, 64])
@on_ranks(4, None)
def test_a_rank_that_is_late_for_the_first_forward(rank: int, size: int | None):
    """Rank 3 begins when the others have given up. All first agree on a size, also where one is given."""
    name = f"megatron/first/{size}"
    others = [f"{name}/{other}" for other in range(3)]
    store = dist.distributed_c10d._get_default_store()
    with environment(EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S), max_tokens_per_rank=size):
        use_layout(Layout(ep=4))
        layer = make_layer(make_config(), layer_number=3)
        if rank == 3:
            store.wait(others, timedelta(seconds=60))
        started = time.monotonic()
        with pytest.raises(ep.PeerTimeoutError) as caught:
            layer(tokens_of(rank))
        assert time.monotonic() - started < LIMIT_S + SLACK_S
        error = caught.value
        assert str(error).startswith("layer 3, microbatch 1: ") and error.note == "layer 3, microbatch 1"
        assert error.late_ranks == ((0, 1, 2) if rank == 3 else (3,))
        if rank < 3:
            store.set(others[rank], "")
        assert error.operation == "buffer" and error.phase == "agree on the number of tokens"
    dist.barrier()
    with environment(max_tokens_per_rank=64):  # the next attempt of all ranks
        layer(tokens_of(rank).requires_grad_())[0].sum().backward()


@on_ranks()
def test_a_backward_beside_a_forward_is_named(rank: int):
    """Rank 0 is in a backward, rank 1 in a forward pass: the error names both with layer and microbatch."""
    layer = make_layer(make_config(), layer_number=3)
    output = layer(tokens_of(rank).requires_grad_())[0].sum()

    def run() -> None:
        output.backward() if rank == 0 else layer(tokens_of(rank))
        torch.cuda.synchronize() if on_gpu() else None
        layer.token_dispatcher.buffer.check()

    text = error_of(run)
    if not on_gpu():  # there an operation later may find it
        where = ("layer 3, microbatch 1, backward", "layer 3, microbatch 2")[rank]
        assert text.startswith(f"{where}: handle: rank "), text
    assert "one of them is in a backward" in text and "the plan of epoch" in text
    use_layout(Layout(ep=2))  # with new buffers
