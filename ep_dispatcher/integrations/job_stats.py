"""Sums the statistics of all ranks of a training job, for its logs. No host waits: results arrive in a later step.

    sums = JobSums()
    sums.grow(num_layers + 1, num_experts)
    sums.start(buffer)
    sums.begin(steps=1)      # all ranks, after a step: begins a sum over the job, while the GPU goes on
    found = sums.newest()    # JobStats of earlier steps, or None

Ranks may get a sum at different times, so no collective decision may depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.buffer import Buffer
from ep_dispatcher.integrations.collectives import job_device
from ep_dispatcher.statistics import NUM_LABELS, HostCopy, Totals, follow

_PREFIX = "ep_dispatcher/"


@dataclass(frozen=True)
class JobStats:
    """What the buffers of all ranks have done in some steps. Tensors are int64 on the CPU.

    steps       how many steps
    rows        [labels, ranks of the job]: tokens that have arrived for the experts of each rank, without padding. The
                label is a layer's number
    experts     [labels, experts of the largest buffer]: tokens of each expert, of all its replicas
    waited_for  [ranks of the job]: nanoseconds that other ranks have waited for each rank, all of them together
    waited      [ranks of the job]: nanoseconds that each rank has waited, for the rank that it has waited for most in
                dispatches, plus the same for combines. Waits for several ranks overlap, so this is a lower bound
    groups      [ranks of the job]: the number of each rank's expert-parallel group; -1 if it has none
    """

    steps: int
    rows: Tensor
    experts: Tensor
    waited_for: Tensor
    waited: Tensor
    groups: Tensor

    def rank_imbalance(self) -> Tensor:
        """Return the rows of the busiest rank divided by the mean: float64 [labels, groups], NaN without rows.

        The busiest rank of a group decides how long its layer takes.
        """
        num_groups = int(self.groups.max()) + 1
        found = torch.empty(len(self.rows), num_groups, dtype=torch.float64, device="cpu")
        for group in range(num_groups):
            rows = self.rows[:, self.groups == group].double()
            found[:, group] = rows.amax(1) / rows.mean(1)
        return found

    def expert_imbalance(self) -> Tensor:
        """Return the tokens of the busiest expert divided by the mean: float64 [labels], NaN where there are none."""
        experts = self.experts.double()
        return experts.amax(1) / experts.mean(1)

    def scalars(self) -> dict[str, float]:
        """Return what loggers show, by name. Nothing if no tokens have arrived."""
        if not self.rows.any():
            return {}
        of_ranks, rank = self.rank_imbalance(), int(self.waited_for.argmax())
        worst = of_ranks.nan_to_num(0).amax(1)
        found = {
            "busiest_rank_over_mean": float(of_ranks.nanmean()),
            "busiest_rank_over_mean_worst_layer": float(worst.max()),
            "worst_layer": int(worst.argmax()),
            "busiest_expert_over_mean": float(self.expert_imbalance().nanmean()),
            "most_waited_for_rank": rank,
            "waits_for_it_ms": int(self.waited_for[rank]) / 1e6 / self.steps,
            "waits_ms_per_rank": int(self.waited.sum()) / 1e6 / self.steps / len(self.waited),
        }
        return {_PREFIX + name: value for name, value in found.items()}


class _Sum(NamedTuple):
    """A sum over the job on its way to the host."""

    steps: int
    sizes: list[int]
    num_labels: int
    summed: Tensor  # kept alive until its copy has arrived
    copy: HostCopy


@dataclass
class _Counted:
    """The counts of a buffer at the last sum, and the job's ranks in its group. Both are on the buffer's device."""

    totals: Tensor
    ranks: Tensor


class JobSums:
    """Sums over the job. All its ranks call ``grow`` with the same sizes, and ``begin`` at the same places."""

    def __init__(self) -> None:
        self._num_labels = self._num_experts = 0
        self._counted: WeakKeyDictionary[Buffer, _Counted] = WeakKeyDictionary()
        self._pending: deque[_Sum] = deque()
        self._stream: torch.cuda.Stream | None = None

    def grow(self, num_labels: int, num_experts: int) -> None:
        """Make room for labels below ``num_labels``, and for buffers with up to ``num_experts`` experts.

        Tokens with other labels are left out, and so are larger buffers, because a sum must not fail on one rank alone.
        """
        self._num_labels = max(self._num_labels, min(num_labels, NUM_LABELS))
        self._num_experts = max(self._num_experts, num_experts)

    def start(self, buffer: Buffer) -> None:
        """Count what a buffer does from now on. CUDA graphs count only if they are captured later."""
        if buffer not in self._counted:
            ranks = torch.tensor(dist.get_process_group_ranks(buffer.config.group), dtype=torch.int64, device="cpu")
            if buffer.device.type == "cuda":
                ranks = ranks.pin_memory().to(buffer.device, non_blocking=True)
            self._counted[buffer] = _Counted(_copy_of_totals(buffer), ranks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what buffers do meanwhile, such as in an evaluation."""
        before = {buffer: _copy_of_totals(buffer) for buffer in self._living()}
        yield
        for buffer in self._living():
            if buffer in before:
                self._counted[buffer].totals += _copy_of_totals(buffer) - before[buffer]

    def begin(self, steps: int) -> None:
        """Sum what the started buffers have counted since the last call, which was ``steps`` steps ago. Collective.

        Raises ValueError before the first ``grow``.
        """
        if not self._num_labels or not self._num_experts:
            raise ValueError("begin() was called before grow(), which says how many labels and experts there are")
        num_labels, num_ranks = self._num_labels, dist.get_world_size()
        sizes = [num_labels * num_ranks, num_labels * self._num_experts, num_ranks, num_ranks, num_ranks]
        with torch.inference_mode(False), torch.no_grad():
            mine = torch.zeros(sum(sizes), dtype=torch.int64, device=job_device())
            for buffer in self._living():
                if buffer.num_experts <= self._num_experts:
                    self._add(buffer, *mine.split(sizes))
            self._pending.append(_Sum(steps, sizes, num_labels, mine, self._sum(mine)))

    def newest(self) -> JobStats | None:
        """Return the sums that have arrived since the last call, added up; None if there are none.

        After ``grow`` has made room for more, only those with the new sizes.
        """
        arrived: list[_Sum] = []
        while self._pending and self._pending[0].copy.is_here:
            arrived.append(self._pending.popleft())
        if not arrived:
            return None
        last = arrived[-1]
        same_sizes = [one for one in arrived if one.sizes == last.sizes]
        added = torch.stack([one.copy.values for one in same_sizes]).sum(0)
        rows, experts, waited_for, waited, _ = added.split(last.sizes)
        leaders = last.copy.values.split(last.sizes)[-1]  # these are not counts, so they are not added up
        numbers = {leader: number for number, leader in enumerate(leaders[leaders > 0].unique().tolist())}
        groups = torch.tensor([numbers.get(leader, -1) for leader in leaders.tolist()], dtype=torch.int64, device="cpu")
        rows, experts = (counts.view(last.num_labels, -1) for counts in (rows, experts))
        return JobStats(sum(one.steps for one in same_sizes), rows, experts, waited_for, waited, groups)

    def _living(self) -> list[Buffer]:
        return [buffer for buffer in list(self._counted) if not buffer.is_destroyed]

    def _add(
        self, buffer: Buffer, rows: Tensor, experts: Tensor, waited_for: Tensor, waited: Tensor, leaders: Tensor
    ) -> None:
        """Add what a buffer has counted to this rank's part of the sum."""
        config, counted, totals = buffer.config, self._counted[buffer], _copy_of_totals(buffer)
        assert buffer.totals is not None
        new, counted.totals = totals - counted.totals, totals
        tokens, *waits, _ = buffer.totals.parts(new.to(rows.device))
        ranks = counted.ranks.to(rows.device)
        tokens, num_local, own = tokens[: self._num_labels], config.num_own_experts, dist.get_rank()
        first = config.topology.rank * num_local
        rows.view(len(tokens), -1)[:, own] += tokens.sum(1)
        # Which expert's rows are in a slot changes. So they count for the rank, and for no expert.
        experts.view(len(tokens), -1)[:, first : first + num_local] += tokens[:, :num_local]
        waited_for.index_add_(0, ranks, waits[0] + waits[1])
        waited[own] += waits[0].max() + waits[1].max()
        leaders[own] = ranks[0] + 1  # 0: no group

    def _sum(self, mine: Tensor) -> HostCopy:
        """Begin the sum over all ranks, in place, and its copy to the host."""
        if not mine.is_cuda:
            dist.all_reduce(mine)
            return HostCopy(mine)
        if self._stream is None:
            self._stream = torch.cuda.Stream(mine.device)
        work = dist.all_reduce(mine, async_op=True)
        self._stream.wait_stream(torch.cuda.current_stream(mine.device))
        with torch.cuda.stream(self._stream):
            work.wait()  # lets this stream wait, not the current one
            return HostCopy(mine)


def _copy_of_totals(buffer: Buffer) -> Tensor:
    """Return what a buffer has counted so far, from now on if it does not count yet."""
    totals: Totals | None = buffer.totals
    if totals is None:
        buffer.stats()
        totals = buffer.totals
    assert totals is not None
    follow(buffer.live_engine(), buffer.device)
    with torch.inference_mode(False), torch.no_grad():
        return totals.all.clone()
