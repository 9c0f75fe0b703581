"""Four ranks whose router drifts, and then a slow rank: what Buffer.stats() shows of it, as a chart.

    torchrun --nproc-per-node 4 examples/watch_experts.py

The steps are made up, so that it is known what the chart must show: from a third of them on more and more tokens go to
the first experts, and from two thirds on rank 2 is late to each step. It runs on CPUs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ep_dispatcher as ep
from ep_dispatcher.integrations.job_stats import JobStats, JobSums

HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 256, 32, 4, 512
LATE_RANK, LATE_S = 2, 0.02


def routing(step: int, steps: int) -> torch.Tensor:
    """Choose experts by random scores. The first eighth of them gets a bonus that grows after a third of the steps."""
    scores = torch.randn(NUM_TOKENS, NUM_EXPERTS)
    scores[:, : NUM_EXPERTS // 8] += 3 * max(0.0, step / steps - 1 / 3)
    return scores.topk(NUM_TOPK).indices


def run(steps: int) -> list[JobStats]:
    """Return what was counted in each step, on every rank."""
    sums, found = JobSums(), []
    sums.grow(num_labels=1, num_experts=NUM_EXPERTS)  # one layer, without a label
    torch.manual_seed(dist.get_rank())
    with ep.Buffer(
        hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=NUM_TOKENS, engine="cpu"
    ) as buffer:
        sums.start(buffer)  # from here on it counts
        for step in range(steps):
            if dist.get_rank() == LATE_RANK and step >= steps * 2 / 3:
                time.sleep(LATE_S)
            out = buffer.dispatch(torch.randn(NUM_TOKENS, HIDDEN).bfloat16(), routing(step, steps))
            assert isinstance(out.x, torch.Tensor)
            buffer.combine(out.x, out.handle)
            sums.begin(steps=1)  # in a real job: every tenth step, or what the logs need
            if (newest := sums.newest()) is not None:
                found.append(newest)
    return found


def draw(found: list[JobStats], path: Path) -> None:
    """Draw the load of the busiest rank and expert, the waits for each rank, and the tokens of each expert, by step."""
    from matplotlib.figure import Figure

    figure = Figure((14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, label in (("rank", "busiest rank"), ("expert", "busiest expert")):
        left.plot([one.scalars()[f"ep_dispatcher/busiest_{name}_over_mean"] for one in found], label=label)
    left.set(title="tokens, over the mean", xlabel="step", ylim=(1, None))
    left.legend()
    waits = torch.stack([one.waited_for for one in found], 1) / 1e6
    image = middle.imshow(waits, aspect="auto", interpolation="nearest", cmap="magma")
    middle.set(title="ms that others waited for each rank", xlabel="step", ylabel="rank", yticks=range(len(waits)))
    figure.colorbar(image)
    experts = torch.cat([one.experts for one in found]).T
    image = right.imshow(experts, aspect="auto", interpolation="nearest", cmap="viridis")
    right.set(title="tokens of each expert", xlabel="step", ylabel="expert")
    figure.colorbar(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=90, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/watch_experts.png"), help="the chart; %(default)s")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    found = run(args.steps)
    if dist.get_rank() == 0:
        for name, value in found[-1].scalars().items():
            print(f"{name:50} {value:8.2f}")
        draw(found, args.out)
        print(f"chart: {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
