"""No argument of ``deep_ep.Buffer`` is ignored in silence: each works, is refused, or a line says that it does nothing.

The tables name every parameter of every public method, so that a new one has to be put into one of them.
"""

import inspect
import logging

import pytest
import torch
import torch.distributed as dist

from ep_dispatcher.integrations.deep_ep import Buffer
from ep_dispatcher.integrations.deep_ep import config as configs

MOST, EXPERTS, HIDDEN = 8, 4, 128

# A value that is not allowed: an error begins with the argument, so it is looked at.
REFUSED = {
    "__init__": dict(group=None, comm="MPI", allow_nvlink_for_low_latency_mode=False),
    "set_num_sms": dict(new_num_sms=3),
    "get_low_latency_rdma_size_hint": dict(num_ranks=0),
    "get_dispatch_config": dict(num_ranks=0),
    "get_combine_config": dict(num_ranks=0),
    "get_local_buffer_tensor": dict(size=torch.Size([1]), offset=1),
    "get_dispatch_layout": dict(topk_idx=torch.zeros(2), num_experts=0, allocate_on_comm_stream=True),
    "dispatch": dict(
        x=torch.zeros(2),
        handle=(1, 2),
        num_tokens_per_rank=torch.zeros(1),
        num_tokens_per_rdma_rank=torch.zeros(2, dtype=torch.int32),
        is_token_in_rank=torch.zeros(2),
        num_tokens_per_expert=torch.zeros(1),
        topk_idx=torch.zeros(2),
        topk_weights=None,
        expert_alignment=0,
        num_worst_tokens=-1,
        allocate_on_comm_stream=True,
    ),
    "combine": dict(
        x=torch.zeros(1, 1),
        handle=(1, 2),
        topk_weights=torch.zeros(1),
        bias=torch.zeros(1, HIDDEN),
        allocate_on_comm_stream=True,
    ),
    "clean_low_latency_buffer": dict(num_max_dispatch_tokens_per_rank=0, hidden=0, num_experts=0),
    "low_latency_dispatch": dict(
        x=torch.zeros(2),
        topk_idx=torch.zeros(2),
        num_max_dispatch_tokens_per_rank=0,
        cumulative_local_expert_recv_stats=torch.zeros(1),
        dispatch_wait_recv_cost_stats=torch.zeros(2),
        use_ue8m0=True,
        use_nvfp4=True,
        x_global_scale=torch.ones(1),
    ),
    "low_latency_combine": dict(
        x=torch.zeros(1),
        topk_idx=torch.zeros(2),
        topk_weights=torch.zeros(2),
        handle=(1, 2),
        zero_copy=True,
        out=torch.zeros(2),
        combine_wait_recv_cost_stats=torch.zeros(2),
        overlap=True,
    ),
    "get_next_low_latency_combine_buffer": dict(handle=(1, 2)),
    "low_latency_update_mask_buffer": dict(rank_to_mask=7),
    "low_latency_query_mask_buffer": dict(mask_status=torch.zeros(1)),
}
# Accepted without effect: a line names it, and comes once.
SAID = {
    "__init__": dict(num_qps_per_rank=8, allow_mnnvl=True, use_fabric=True),
    "get_local_buffer_tensor": dict(use_rdma_buffer=True),
    "dispatch": dict(config="config"),
    "combine": dict(config="config"),
    "low_latency_combine": dict(use_logfmt=True),
}
# Seen in results, here or in the tests of each method.
WORKS = {
    "__init__": {"num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "explicitly_destroy", "enable_shrink"},
    "get_low_latency_rdma_size_hint": {"num_max_dispatch_tokens_per_rank", "hidden", "num_experts"},
    "get_local_buffer_tensor": {"dtype"},
    "get_dispatch_layout": {"previous_event", "async_finish"},
    "dispatch": {"previous_event", "async_finish"},
    "combine": {"previous_event", "async_finish"},
    "low_latency_dispatch": {"num_experts", "use_fp8", "round_scale", "async_finish", "return_recv_hook"},
    "low_latency_combine": {"async_finish", "return_recv_hook"},
    "low_latency_update_mask_buffer": {"mask"},
}
# They describe the signals of an overlap, which is refused.
DESCRIBE = {
    "low_latency_combine": {
        "packed_recv_count",
        "comp_signal",
        "block_m",
        "threshold",
        "num_sms",
        "src_signals",
        "src_signal_expect_value",
    }
}
TABLES = (REFUSED, SAID, WORKS, DESCRIBE)


def test_every_argument_is_in_one_table():
    for name, member in inspect.getmembers(Buffer, callable):
        if (name.startswith("_") and name != "__init__") or name.startswith("internode_"):
            continue  # internode_ methods hand everything on
        found = [argument for table in TABLES for argument in table.get(name, ())]
        expected = [argument for argument in inspect.signature(member).parameters if argument != "self"]
        assert sorted(found) == sorted(expected), name
    for name in ("dispatch", "combine"):
        signatures = [inspect.signature(getattr(Buffer, n)).parameters for n in (name, f"internode_{name}")]
        assert list(signatures[0].values()) == list(signatures[1].values())


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run_arguments(rank: int):
    handler, wrong = Lines(), []
    configs.logger.addHandler(handler)
    configs._said.clear()
    x = torch.randn(3, HIDDEN).bfloat16()
    idx = torch.tensor([[0, 1], [2, -1], [3, 0]])
    weights = torch.rand(3, 2)
    buffer = Buffer(dist.group.WORLD, 1, 2, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1, 2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    routing = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    routing |= dict(topk_idx=idx, topk_weights=weights)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, **routing)
    packed, _, trip, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    named = [line.split(" is ")[0].split("of ")[1] for line in handler.lines if "EP_DISPATCHER_DEEP_EP_EXACT" in line]
    assert named == ["rank_prefix_matrix", "recv_src_info and recv_layout_range"]
    good = {
        "__init__": dict(group=dist.group.WORLD),
        "set_num_sms": dict(new_num_sms=20),
        "get_low_latency_rdma_size_hint": dict(
            num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=1, num_experts=EXPERTS
        ),
        "get_dispatch_config": dict(num_ranks=1),
        "get_combine_config": dict(num_ranks=1),
        "get_local_buffer_tensor": dict(dtype=torch.int8),
        "get_dispatch_layout": dict(topk_idx=idx, num_experts=EXPERTS),
        "dispatch": dict(x=x, **routing),
        "combine": dict(x=recv_x, handle=handle),
        "clean_low_latency_buffer": dict(num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_experts=EXPERTS),
        "low_latency_dispatch": dict(
            x=x, topk_idx=idx, num_max_dispatch_tokens_per_rank=MOST, num_experts=EXPERTS, use_fp8=False
        ),
        "low_latency_combine": dict(x=packed, topk_idx=idx, topk_weights=weights, handle=trip),
        "get_next_low_latency_combine_buffer": dict(handle=trip),
        "low_latency_update_mask_buffer": dict(rank_to_mask=0),
        "low_latency_query_mask_buffer": dict(mask_status=torch.zeros(1, dtype=torch.int32)),
    }

    def call(name: str, **changes):
        given = good[name] | changes
        return Buffer(**given) if name == "__init__" else getattr(buffer, name)(**given)

    for name, arguments in REFUSED.items():
        for argument, value in arguments.items():
            changes = {argument: value} | (dict(group=None) if argument == "comm" else {})
            try:
                call(name, **changes)
            except (ValueError, NotImplementedError) as error:
                begin = "get_local_buffer_tensor" if name == "get_local_buffer_tensor" else argument
                if not str(error).startswith(begin) and argument != "allocate_on_comm_stream":
                    wrong.append(f"{name}({argument}): {error}")
            else:
                wrong.append(f"{name}({argument}): not refused")
    for name, arguments in SAID.items():
        for argument, value in arguments.items():
            configs._said.clear()
            handler.lines.clear()
            value = buffer.get_dispatch_config(1) if argument == "config" else value
            for _ in range(2):
                call(name, **{argument: value})
            begin = "get_local_buffer_tensor" if name == "get_local_buffer_tensor" else argument
            if sum(begin in line for line in handler.lines) != 1:
                wrong.append(f"{name}({argument}): said {handler.lines}")
    handler.lines.clear()
    configs._said.clear()
    again = buffer.dispatch(x, handle=handle, **routing | dict(topk_idx=None, topk_weights=None))[0]
    assert torch.equal(again, recv_x) and ["beside handle" in line for line in handler.lines] == [True]
    with pytest.raises(ValueError, match="num_worst_tokens: given 99"):
        buffer.dispatch(x, handle=handle, num_worst_tokens=99)
    # Each of these changes a result.
    event = buffer.capture()
    for name in ("get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"):
        results = [
            [one for one in call(name, async_finish=on) if type(one).__name__ == "EventOverlap"] for on in (False, True)
        ]
        assert [one.event is not None for (one,) in results] == [False, True]
        if name.startswith("low_latency_"):
            assert callable(call(name, return_recv_hook=True)[-1])
        else:
            call(name, async_finish=True, previous_event=event, allocate_on_comm_stream=True)
    assert call("low_latency_dispatch", num_experts=8)[0].shape[0] == 8
    pairs = [call("low_latency_dispatch", use_fp8=True, round_scale=rounded)[0] for rounded in (False, True)]
    assert not torch.equal(pairs[0][1], pairs[1][1])
    configs.logger.removeHandler(handler)
    buffer.destroy()
    return wrong


def test_every_argument_does_what_its_table_says(pools):
    assert pools(1).run(run_arguments) == [[]]
