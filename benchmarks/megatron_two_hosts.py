"""Times training jobs of Megatron-LM between two hosts of this machine, by the rate of the network.

    python benchmarks/megatron_two_hosts.py --rates 10gbit none --steps 4 --out runs/megatron_two_hosts \\
        --job 'ep_dispatcher: --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher' \\
        --job 'alltoall: --moe-token-dispatcher-type alltoall' \\
        pretrain_gpt.py --num-layers 2 --expert-model-parallel-size 2 --train-iters 1000 --log-interval 1 ...

The hosts are namespaces (tests/lib/two_hosts.py: needs root and iproute2), with one rank each, and a GPU each. With
--one-gpu they share one: start NVIDIA's MPS before, or their kernels take turns, and waits of one host stop the other.
NCCL's messages go through the network all the same.

All jobs start together and stay, because a start takes longer than the steps: at each rate every job takes its steps in
turn, while the others wait before theirs. The first --warmup steps have no limit and are not reported. --train-iters
must be more than all of them; the jobs are killed at the end. A job is described as for ``megatron_in_turn.py``. One
that fails is left out from then on, and the exit code is 1.

It prints the median step of each job at each rate, and the losses of all its steps. A step is ``train_step`` of
Megatron-LM, the optimizer's included, and its time that of the slower rank. Logs, JSON and the chart are in --out.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

from megatron_in_turn import run_script
from megatron_jobs import LOSS, Job, read_iterations

# Jobs without ep_dispatcher run this file too, so it is imported in functions only.
ROOT = Path(__file__).resolve().parents[1]
RANK = "--rank"
POLL_S = 0.001


def main(argv: list[str]) -> int:
    if argv[:1] == [RANK]:
        folder, script, *arguments = argv[1:]
        step_when_allowed(Path(folder))
        run_script(script, arguments)
        return 0
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from lib.two_hosts import Hosts
    from rates import draw_rates, set_rate

    from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json

    args = parse_args(argv)
    report: dict = {"title": "a training step between two hosts", "median_ms": {job.name: {} for job in args.job}}
    report |= {"losses": {}, "seconds": {}, "arguments": args.arguments, "one_gpu": args.one_gpu}
    report["machine"] = describe_machine()
    path = args.out / "times.json"
    with Hosts(2, own_memory=not args.one_gpu) as hosts:
        runs = [Run(hosts, job, n, args) for n, job in enumerate(args.job)]
        step_all(runs, args.warmup, float("inf"))
        for rate in args.rates:
            set_rate(hosts, rate)
            report["seconds"][rate] = seconds = step_all(runs, args.steps, args.seconds)
            report["losses"] = {run.job.name: run.losses() for run in runs}
            for name, of_job in seconds.items():
                report["median_ms"][name][rate] = statistics.median(of_job) * 1e3
            report["median_ms"] = {run.job.name: report["median_ms"][run.job.name] for run in runs}
            path.write_text(to_json(report))
            print(f"{rate}: {json.dumps(seconds)}", flush=True)
    print(json.dumps({name: report[name] for name in ("median_ms", "losses")}))
    if runs:
        draw_rates(path)
    return int(len(runs) < len(args.job))


def step_all(runs: list[Run], most: int, seconds: float) -> dict[str, list[float]]:
    """Let each job take steps, and return the seconds of each by job. End a job that fails, and remove it."""
    found: dict[str, list[float]] = {}
    for run in [*runs]:
        try:
            found[run.job.name] = run.steps(most, seconds)
        except JobFailed as error:
            print(error, flush=True)
            run.end()
            runs.remove(run)
    return found


def parse_args(argv: list[str]):
    from rates import RATES, rate

    from ep_dispatcher.tools.benchmark.harness import make_parser, number

    parser = make_parser(__doc__, steps=4, warmup=3)
    parser.add_argument(
        "--job", type=Job.parse, action="append", required=True, metavar="'NAME: ...'", help="ours first"
    )
    parser.add_argument("--rates", type=rate, nargs="+", default=RATES, help="of what a host sends")
    parser.add_argument(
        "--seconds", type=number(float, 0), default=60, help="a job's steps at a rate begin within these"
    )
    parser.add_argument("--one-gpu", action="store_true", help="both hosts use the first GPU")
    parser.add_argument("--limit", type=number(float, 0), default=300, help="seconds for one step, or for the start")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/megatron_two_hosts"), help="folder of logs and times.json"
    )
    parser.add_argument("script", type=Path, help="pretrain_gpt.py, or another that calls megatron.training")
    parser.add_argument("arguments", nargs="...", help="of the script, for all jobs")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"script is {str(args.script)!r}, but has to be a file that exists")
    return args


class JobFailed(Exception):
    pass


class Run:
    """A job on both hosts. In its folder its ranks read how many steps they may take, and write how long each took."""

    def __init__(self, hosts, job: Job, number: int, args):
        self.job, self._limit_s, self._done = job, args.limit, 0
        self._folder, script = args.out.resolve() / job.name, args.script.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*"):  # of a run before
            path.unlink()
        launcher = ["-m", job.launcher] if job.launcher else []
        command = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "host0", "--master-port", 29500 + number]
        command += [*launcher, __file__, RANK, self._folder, script, *args.arguments, *job.arguments]
        environment = job.environment(script.parent, ROOT)
        given = {name: environment[name] for name in (*job.variables, "PYTHONPATH")}
        start = f"cd {shlex.quote(str(script.parent))} && exec torchrun --node-rank $NODE_RANK"
        self._processes = [
            hosts.run(
                host,
                f"{start} {shlex.join(map(str, command))} > {shlex.quote(str(self._log(host)))} 2>&1",
                {"CUDA_VISIBLE_DEVICES": "0" if args.one_gpu else str(host), **given},
            )
            for host in range(2)
        ]

    def _log(self, host: int) -> Path:
        return self._folder / f"host{host}.log"

    def end(self) -> None:
        """Kill its processes: where one host's has ended, the other's keeps its GPU."""
        from lib.two_hosts import kill_tree

        for process in self._processes:
            kill_tree(process.pid)

    def losses(self) -> list[float]:
        """Megatron-LM's last rank prints them."""
        return [found[LOSS] for found in read_iterations(self._log(1)) if LOSS in found]

    def steps(self, most: int, seconds: float) -> list[float]:
        """Let the job take steps, and return the seconds of each, of the slower rank."""
        first, end = self._done, time.monotonic() + seconds
        while self._done < first + most and (self._done == first or time.monotonic() < end):
            write(self._folder / "allowed", self._done + 1)
            self._wait()
            self._done += 1
        ranks = [json.loads((self._folder / f"rank{rank}").read_text()) for rank in range(2)]
        return [round(max(both), 6) for both in zip(*ranks)][first:]

    def _wait(self) -> None:
        end = time.monotonic() + self._limit_s
        while not all(len(read(self._folder / f"rank{rank}", [])) > self._done for rank in range(2)):
            ended = [host for host, process in enumerate(self._processes) if process.poll() is not None]
            if ended or time.monotonic() > end:
                print(*self._log(ended[0] if ended else 1).read_text(errors="replace").splitlines()[-40:], sep="\n")
                raise JobFailed(f"{self.job.name}: {'ended' if ended else 'too late'} in step {self._done + 1}")
            time.sleep(POLL_S)


def write(path: Path, value: object) -> None:
    """Write at once: a reader finds the value before or this one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.replace(path)


def read(path: Path, default):
    return json.loads(path.read_text()) if path.exists() else default


def step_when_allowed(folder: Path) -> None:
    """Make Megatron-LM's steps wait until they are allowed, and time them."""
    import torch
    from megatron.training import training

    train_step, seconds = training.train_step, []
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def timed(*given, **options):
        while read(folder / "allowed", 0) <= len(seconds):
            time.sleep(POLL_S)
        synchronize()
        begin = time.perf_counter()
        result = train_step(*given, **options)
        synchronize()
        seconds.append(time.perf_counter() - begin)
        write(folder / f"rank{os.environ['RANK']}", seconds)
        return result

    training.train_step = timed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
