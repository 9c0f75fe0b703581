"""EP_DISPATCHER_ENGINE=cpu torchrun --nproc-per-node 4 examples/quickstart.py"""

import torch
import torch.distributed as dist

import ep_dispatcher as ep

dist.init_process_group("gloo")
rank, num_experts = dist.get_rank(), 8
torch.manual_seed(rank)
x = torch.randn(16, 64, requires_grad=True)  # 16 tokens of this rank
topk_weights, topk_idx = torch.rand(16, num_experts).softmax(-1).topk(2)

with ep.Buffer(
    hidden=64, num_experts=num_experts, num_topk=2, max_tokens_per_rank=16, dtype=x.dtype, ranks_per_node=2
) as buffer:
    out = ep.dispatch(buffer, x, topk_idx, topk_weights)  # rows of the two experts that live here, one after the other
    first, second = out.x.split(out.rows_on_host.tolist())
    y = torch.cat([first * (2 * rank), second * (2 * rank + 1)])  # expert e multiplies by e
    res = ep.combine(buffer, y * out.topk_weights[:, None], out.handle)
    (grad,) = torch.autograd.grad(res.sum(), x)

expected = x * (topk_weights * topk_idx).sum(1, keepdim=True)
same = torch.allclose(res, expected) and torch.allclose(grad[:, 0], (topk_weights * topk_idx).sum(1))
line = f"rank {rank}: {len(x)} tokens out, {out.tokens_per_expert.tolist()} rows in, right: {same}\n"
print(line, end="", flush=True)  # one write, so that the lines of several ranks stay whole
dist.destroy_process_group()
