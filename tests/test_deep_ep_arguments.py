"""No argument of ``deep_ep.Buffer`` is ignored in silence: it works, is refused, or a line says it has no effect."""

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.deep_ep_case import routed

from ep_dispatcher.integrations.deep_ep import Buffer, Config, destroy_buffers
from ep_dispatcher.integrations.deep_ep import config as configs
from ep_dispatcher.integrations.deep_ep.handle import log_placeholders

MOST, EXPERTS, HIDDEN = 8, 4, 128
X, BFLOAT16 = torch.ones(3, HIDDEN), torch.bfloat16
NO_TOPK = dict(topk_idx=None, topk_weights=None)

# Changes of a good call that are not allowed. The error begins with the first argument, so it is looked at.
REFUSED = {
    "__init__": [dict(group=None), dict(comm="MPI", group=None), dict(allow_nvlink_for_low_latency_mode=False)],
    "set_num_sms": [dict(new_num_sms=3)],
    "get_low_latency_rdma_size_hint": [dict(num_ranks=0)],
    "get_dispatch_config": [dict(num_ranks=0)],
    "get_combine_config": [dict(num_ranks=0)],
    "get_dispatch_layout": [
        dict(topk_idx=torch.zeros(2)),
        dict(num_experts=0),
        dict(allocate_on_comm_stream=True),
    ],
    "dispatch": [
        *(dict(x=x) for x in (torch.zeros(2), (X, X[:, :1]), (X.byte(), X[:, :3]), (X.byte(), X[:2, :1]))),
        dict(handle=(1, 2), **NO_TOPK),
        dict(num_tokens_per_rank=None),
        dict(num_tokens_per_rdma_rank=torch.zeros(2, dtype=torch.int32)),
        dict(is_token_in_rank=torch.zeros(2)),
        dict(num_tokens_per_expert=torch.zeros(1)),
        dict(topk_idx=torch.zeros(2)),
        dict(topk_idx=None),
        dict(topk_weights=None),
        dict(expert_alignment=0),
        dict(num_worst_tokens=-1),
        dict(num_worst_tokens=9, **NO_TOPK),
        dict(allocate_on_comm_stream=True),
    ],
    "combine": [
        dict(x=torch.zeros(1, 1)),
        *(dict(handle=handle) for handle in ((1, 2), tuple(range(6)), (), None)),
        dict(topk_weights=torch.zeros(1)),
        dict(bias=torch.zeros(1, HIDDEN)),
        dict(bias=3 * (torch.zeros(3, HIDDEN),)),
        dict(allocate_on_comm_stream=True),
    ],
    "clean_low_latency_buffer": [
        dict(num_max_dispatch_tokens_per_rank=0),
        dict(hidden=0),
        dict(num_experts=0),
    ],
    "low_latency_dispatch": [
        *(dict(x=x) for x in (torch.zeros(2), X)),
        dict(x=torch.zeros(3, 520, dtype=BFLOAT16), use_fp8=True),
        dict(topk_idx=torch.zeros(2)),
        dict(num_max_dispatch_tokens_per_rank=0),
        dict(cumulative_local_expert_recv_stats=torch.zeros(1)),
        dict(dispatch_wait_recv_cost_stats=torch.zeros(2)),
        dict(use_ue8m0=True),
        dict(use_nvfp4=True),
        dict(x_global_scale=torch.ones(1)),
        dict(async_finish=True, return_recv_hook=True),
    ],
    "low_latency_combine": [
        dict(x=torch.zeros(1)),
        dict(topk_idx=torch.zeros(2)),
        dict(topk_weights=torch.zeros(2)),
        *(dict(handle=handle) for handle in ((1, 2), (1,), None)),
        dict(zero_copy=True),
        dict(out=torch.zeros(2)),
        dict(combine_wait_recv_cost_stats=torch.zeros(2)),
        dict(overlap=True),
        dict(async_finish=True, return_recv_hook=True),
    ],
    "get_next_low_latency_combine_buffer": [dict(handle=(1, 2))],
    "low_latency_update_mask_buffer": [dict(rank_to_mask=7)],
    "low_latency_query_mask_buffer": [dict(mask_status=torch.zeros(1))],
    "get_local_buffer_tensor": [dict(size=torch.Size([1])), dict(offset=1)],
}
# Accepted without effect: a line names it, and comes once.
SAID = {
    "__init__": dict(num_qps_per_rank=8, allow_mnnvl=True, use_fabric=True),
    "get_local_buffer_tensor": dict(use_rdma_buffer=True),
    "dispatch": dict(config=Config()),
    "combine": dict(config=Config()),
    "low_latency_combine": dict(use_logfmt=True, num_sms=8, comp_signal=torch.zeros(1)),
    "low_latency_dispatch": dict(round_scale=True),
}


@on_ranks(1)
def test_every_argument_does_what_its_table_says(rank: int):
    wrong, lines, notes, patch = [], [], [], pytest.MonkeyPatch()
    patch.setattr(configs.logger, "warning", lambda text, *args: lines.append(text % args))
    patch.setattr(configs.logger, "info", lambda text, *args: notes.append(text % args))
    log_placeholders.cache_clear()
    configs._said.clear()
    x, idx, weights = X.bfloat16(), torch.tensor([[0, 1], [2, -1], [3, 0]]), torch.rand(3, 2)
    buffer = Buffer(dist.group.WORLD, 1, 2, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1, 2)
    routing = routed(buffer, idx, weights, EXPERTS)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, **routing)
    packed, _, trip, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    buffer.dispatch(x, **routing)
    named = [note.split(" of a handle")[0].split("fill ")[1] for note in notes]
    assert named == ["rank_prefix_matrix", "recv_src_info and recv_layout_range"]
    assert not any("EP_DISPATCHER_DEEP_EP_EXACT" in line for line in lines), "most programs read none of these"
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

    def named_by(name: str, argument: str) -> str:
        return name if name == "get_local_buffer_tensor" else argument

    for name, argument, changes in ((name, next(iter(one)), one) for name, each in REFUSED.items() for one in each):
        try:
            call(name, **changes)
        except (ValueError, NotImplementedError) as error:
            if not str(error).startswith(named_by(name, argument)):
                wrong.append(f"{name}({argument}): {error}")
        else:
            wrong.append(f"{name}({argument}): not refused")
    for name, argument, value in ((name, *item) for name, each in SAID.items() for item in each.items()):
        configs._said.clear()
        lines.clear()
        for _ in range(2):
            call(name, **{argument: value})
        if sum(named_by(name, argument) in line for line in lines) != 1:
            wrong.append(f"{name}({argument}): said {lines}")
    lines.clear()
    configs._said.clear()
    again = buffer.dispatch(x, handle=handle, **routing | NO_TOPK)[0]
    assert torch.equal(again, recv_x) and ["with a handle" in line for line in lines] == [True]
    for beside in (dict(num_worst_tokens=99), dict(topk_idx=idx)):
        with pytest.raises(ValueError, match=next(iter(beside))):
            buffer.dispatch(x, handle=handle, **beside)
    lines.clear()
    configs._said.clear()
    patch.setattr(Buffer, "_chosen_sms", 6)
    buffer.dispatch(x, **routing)
    buffer.low_latency_dispatch(x, idx, MOST, EXPERTS)
    kept = [line.partition("num_sms ")[2] for line in lines if "num_sms" in line]
    assert kept == [f"is 6; buffers that were made before keep {sms} multiprocessors" for sms in (24, 64)]
    with pytest.raises(ValueError, match="low_latency_mode"):
        Buffer(dist.group.WORLD).low_latency_dispatch(x, idx, MOST, EXPERTS)
    patch.undo()
    destroy_buffers()
    buffer.destroy()
    assert not wrong
