"""Makes results/routing-trace.npz: the experts that a router chooses which was trained without a balance loss.

    python benchmarks/routing_trace.py          # one rank on the CPU, some minutes

It trains the model of examples/train_moe_lm.py, with 128 experts and top-8, by its own training step. Then it keeps the
choices of the last layer for 16,384 tokens of the training text: topk_idx, uint8 [16384, 8].
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from moe_lm.layer import MoELayer, Router
from moe_lm.model import ModelConfig, MoELanguageModel
from moe_lm.step import backward, learning_rate, make_optimizer, reduce_gradients, update
from moe_lm.text import RandomWindows, load_text, to_tensor

OUT = Path(__file__).parent / "results" / "routing-trace.npz"
STEPS, BATCH, TOKENS = 500, 8, 16384
SIZES = dict(num_layers=2, hidden=128, num_heads=4, num_experts=128, num_topk=8, intermediate=64, seq_len=128)
ARGS = SimpleNamespace(weight_decay=0.1, lr=5e-3, clip=1.0, balance=0.0)


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = ModelConfig(**SIZES, seed=0, dtype=torch.float32)
    sizes = dict(hidden=config.hidden, num_experts=config.num_experts, num_topk=config.num_topk)
    with ep.Buffer(**sizes, max_tokens_per_rank=BATCH * config.seq_len, dtype=config.dtype, engine="cpu") as buffer:
        options = dict(**sizes, intermediate=config.intermediate, local_experts=range(config.num_experts))
        model = MoELanguageModel(config, lambda layer: MoELayer(buffer, layer=layer, **options))
        windows = RandomWindows(to_tensor(load_text()[0]), BATCH, config.seq_len, 0, 0)
        optimizer = make_optimizer(model, ARGS.weight_decay)
        for step in range(1, STEPS + 1):
            result = reduce_gradients(model, *backward(model, *windows.next(), ARGS.balance))
            update(model, optimizer, learning_rate(ARGS.lr, step / STEPS), result.grad_norm, ARGS.clip)
            if step % 50 == 0:
                print(step, result, flush=True)
        chosen: list[Tensor] = []
        last = [module for module in model.modules() if isinstance(module, Router)][-1]
        last.register_forward_hook(lambda _module, _inputs, out: chosen.append(out[0]))
        with torch.no_grad():
            while sum(map(len, chosen)) < TOKENS:
                model(windows.next()[0])
    topk_idx = torch.cat(chosen)[:TOKENS]
    numpy.savez_compressed(OUT, topk_idx=topk_idx.to(torch.uint8).numpy())
    rows = torch.bincount(topk_idx.flatten(), minlength=config.num_experts)
    for ranks in (2, 4, 8, 16):
        of_rank = rows.view(ranks, -1).sum(1).double()
        print(f"{ranks} ranks: max/mean {float(of_rank.max() / of_rank.mean()):.2f}")
    print(f"{OUT}: {OUT.stat().st_size} bytes; hottest expert over mean {float(rows.max() / rows.double().mean()):.2f}")


if __name__ == "__main__":
    main()
