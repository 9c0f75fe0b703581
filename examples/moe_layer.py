"""Train ep.MoELayer under FSDP2, save it with torch.distributed.checkpoint, and load it into other ranks.

    torchrun --nproc-per-node 4 examples/moe_layer.py       # on CPUs, or one rank per GPU

4 ranks are 2 replicas of 2 expert-parallel ranks. docs/pytorch.md explains each step; pytorch_moe.py has a whole model.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ep_dispatcher as ep

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh(device, (num_ranks // 2, 2), mesh_dim_names=("replicas", "ep"))
buffer = ep.Buffer(mesh["ep"], hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=96, dtype=torch.float32)
with torch.device("meta"):
    layer = ep.MoELayer(buffer, intermediate=32)
layer.fully_shard_experts(mesh["replicas"])
fully_shard(layer, mesh=init_device_mesh(device, (num_ranks,)))
layer.to_empty(device=device)
layer.reset_parameters()

optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
x = torch.randn(96, 64, generator=torch.Generator().manual_seed(rank)).to(device)
for step in range(20):
    loss = F.mse_loss(layer(x), x.roll(1, dims=1).tanh())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item() / num_ranks:.4f}", flush=True)
y = layer(x).detach()

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
dcp.save(layer.state_dict(), checkpoint_id=folder[0])
with ep.Buffer(hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=96, dtype=torch.float32) as all_ranks:
    loaded = ep.MoELayer(all_ranks, intermediate=32, device=device)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    loaded.load_state_dict(state)
    same = torch.allclose(loaded(x), y, atol=1e-5)
print(f"rank {rank}: experts on {num_ranks} ranks in place of 2 give the same: {same}\n", end="", flush=True)
buffer.destroy()
dist.destroy_process_group()
