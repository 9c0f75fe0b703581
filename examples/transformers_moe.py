"""Train a small mixture-of-experts model of Hugging Face transformers, with its experts spread over all ranks.

    torchrun --nproc-per-node 4 examples/transformers_moe.py        # on CPUs, or one rank per GPU
    torchrun --nproc-per-node 4 examples/transformers_moe.py --implementation all_to_all    # the same losses

It needs transformers 5.24 and accelerate. docs/transformers.md explains it.
"""

import argparse
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from ep_dispatcher.integrations.transformers import register

parser = argparse.ArgumentParser()
parser.add_argument("--implementation", choices=("ep_dispatcher", "all_to_all"), default="ep_dispatcher")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
register()

# A model of random weights, in a folder as a downloaded one would be.
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
if rank == 0:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
dist.barrier()

parallel = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=args.implementation)
model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=parallel, dtype=torch.float32)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(rank)).to(device)  # of this rank
for step in range(args.steps):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / num_ranks:.4f}", flush=True)
if rank == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
