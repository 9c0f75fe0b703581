"""Times training jobs of Megatron-LM in turn: all start together, and train one after the other.

    python benchmarks/megatron_in_turn.py --ranks 2 --rounds 3 --at-once 3 --out runs/megatron \\
        --job 'alltoall: --moe-token-dispatcher-type alltoall' \\
        --job 'ep_dispatcher: --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher \\
               --ep-dispatcher-experts auto' \\
        pretrain_gpt.py --num-layers 4 --train-iters 30 --log-interval 1 ...

Machines and hours differ more than dispatchers, so compared jobs take turns on one machine. The start of a job takes
longer than its steps. So jobs of a batch start together, and each waits before its first step until all are ready and
those before it have ended. The GPUs hold weights and optimizer states of a whole batch (--at-once).

A job has its own name, variables and arguments. Arguments after the script go to all jobs. Jobs with a variable or an
argument of ep_dispatcher start through its launcher; -m MODULE before the arguments names another launcher. The script
is in the folder of Megatron-LM. $(cat benchmarks/megatron_job.txt) gives the arguments of a job for 2 GPUs, and a file
of benchmarks/megatron_shapes those of a job with the layers of a real model.

Other dispatchers of Megatron are jobs too. Each needs its own package deep_ep, so they differ in PYTHONPATH:

        --job 'deepep: PYTHONPATH=/opt/deepep --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep' \\
        --job 'hybridep: PYTHONPATH=/opt/hybridep --moe-token-dispatcher-type flex \\
               --moe-flex-dispatcher-backend hybridep'

It prints the median and the middle 80 % of the last --last iterations of each run, the ratio of the median run to that
of the first job, losses, and norms of the gradient. Logs and JSON are in --out, and are complete as far as the jobs
came if --limit ends them. benchmarks/megatron_steps.py makes a table and a chart of the JSON of several calls. The
exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_jobs import LOSS, MILLISECONDS, NORM, Job, StepTime, exit_on_sigterm, read_iterations

# Jobs without ep_dispatcher run this file too, so it is imported in functions only.
TURN = "--turn"
POLL_S = 0.05


@dataclass
class Run:
    job: Job
    log: Path
    code: int = -1
    milliseconds: list[float] = field(default_factory=list)  # of each iteration
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of the gradient

    def read(self) -> None:
        sound = [found for found in read_iterations(self.log) if LOSS in found]
        self.milliseconds = [found[MILLISECONDS] for found in sound]
        self.losses = [found[LOSS] for found in sound]
        self.norms = [found[NORM] for found in sound if NORM in found]

    def figures(self) -> dict[str, Any]:
        """Return what times.json has about the run."""
        about = dict(job=self.job.name, arguments=shlex.join(self.job.arguments), log=self.log.name, code=self.code)
        return about | dict(ms=self.milliseconds, losses=self.losses, norms=self.norms)


def main(argv: list[str]) -> int:
    if argv[:1] == [TURN]:
        folder, number, count, script, *arguments = argv[1:]
        take_turn(Path(folder), int(number), int(count), script, arguments)
        return 0
    from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json

    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [
        Run(job, args.out / f"{job.name}.{turn + 1}.log")
        for turn in range(args.rounds)
        for job in (args.job if turn % 2 == 0 else args.job[::-1])
    ]
    try:
        with exit_on_sigterm():
            for first in range(0, len(runs), args.at_once):
                run_batch(runs[first : first + args.at_once], args)
    finally:
        print(report(runs, args.job, args.last))
        found = dict(machine=describe_machine(), ranks=args.ranks, last=args.last, arguments=shlex.join(args.arguments))
        (args.out / "times.json").write_text(to_json(found | dict(runs=[run.figures() for run in runs])))
    return int(any(run.code != 0 for run in runs))


def parse_args(argv: list[str]) -> argparse.Namespace:
    from ep_dispatcher.tools.benchmark.harness import make_parser, number

    parser = make_parser(__doc__, rounds=3, at_once=2, last=20)
    parser.add_argument(
        "--job", type=Job.parse, action="append", required=True, metavar="'NAME: ...'", help="see above"
    )
    parser.add_argument("--ranks", type=number(int, 1), required=True, help="processes of a job, a GPU each")
    parser.add_argument("--limit", type=number(float, 1), default=600, help="seconds for a batch of jobs")
    parser.add_argument("--out", type=Path, default=Path("runs/megatron"), help="folder of logs and times.json")
    parser.add_argument("script", type=Path, help="pretrain_gpt.py, or another that calls megatron.training")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script, for all jobs")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"script is {str(args.script)!r}, but has to be a file that exists")
    names = [job.name for job in args.job]
    if len(set(names)) < len(names):
        parser.error(f"--job has the names {', '.join(names)}, but each may be there once")
    return args


def run_batch(runs: list[Run], args: argparse.Namespace) -> None:
    """Start all jobs, let each train when those before it have ended, and fill in the runs."""
    folder = args.out / f"turns-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    started = [start(number, run, len(runs), folder, args) for number, run in enumerate(runs)]
    end = time.monotonic() + args.limit
    try:
        while any(run.code == -1 for run in runs):
            for number, (run, process) in enumerate(zip(runs, started)):
                code = process.poll()
                if run.code == -1 and code is not None:
                    run.code = code
                    (folder / f"ended.{number}").touch()
                    run.read()
                    print(f"{run.log.name}: exit code {code}, {len(run.milliseconds)} iterations", flush=True)
            if time.monotonic() > end:
                raise TimeoutError(f"--limit: the jobs took more than {args.limit:g} s")
            time.sleep(POLL_S)
    finally:
        for process in started:
            process.terminate()  # torchrun ends its ranks
        for run, process in zip(runs, started):
            process.wait()
            if run.code == -1:
                run.read()  # as far as it came
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def start(number: int, run: Run, count: int, turns: Path, args: argparse.Namespace) -> subprocess.Popen:
    arguments = [str(Path(__file__).resolve()), TURN, str(turns.resolve()), str(number), str(count)]
    arguments += [str(args.script.resolve()), *args.arguments, *run.job.arguments]
    return run.job.start(args.ranks, args.script, arguments, run.log)


def take_turn(folder: Path, number: int, count: int, script: str, arguments: list[str]) -> None:
    """Run the script in this rank. Its training waits for this job's turn."""
    from megatron.training import training

    train = training.train
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def train_in_turn(*given, **options):
        (folder / f"ready.{number}.{rank}").touch()
        while not is_turn(folder, number, count, ranks):
            time.sleep(POLL_S)
        return train(*given, **options)

    training.train = train_in_turn
    run_script(script, arguments)


def run_script(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    own, its = str(Path(__file__).resolve().parent), str(Path(script).parent)
    sys.path[:] = [its if path == own else path for path in sys.path]  # in its place: launchers may put theirs first
    runpy.run_path(script, run_name="__main__")


def is_turn(folder: Path, number: int, count: int, ranks: int) -> bool:
    def has_ended(other: int) -> bool:
        return (folder / f"ended.{other}").exists()

    def is_ready(other: int) -> bool:
        return all((folder / f"ready.{other}.{rank}").exists() for rank in range(ranks))

    return all(has_ended(other) or (other >= number and is_ready(other)) for other in range(count))


def report(runs: list[Run], jobs: list[Job], last: int) -> str:
    from ep_dispatcher.tools.benchmark.harness import table

    titles = ("ms of a step", f"medians of the last {last}", "middle 80 %", "ratio", "losses: first, middle, last")
    titles += ("gradient norms: first, middle, last",)
    rows, base = [], None
    for job in jobs:
        sound = [run for run in runs if run.job is job and run.code == 0 and run.milliseconds]
        if not sound:
            rows.append((job.name, "no run ended well", "", "", "", ""))
            continue
        step = StepTime.of([run.milliseconds for run in sound], last)
        base = base or step.median
        losses, norms = three_of(sound[-1].losses, 4), three_of(sound[-1].norms, 3)
        spread, ratio = f"{step.low:.1f} to {step.high:.1f}", f"{step.median / base:.3f}"
        rows.append((job.name, ", ".join(f"{ms:.1f}" for ms in step.medians), spread, ratio, losses, norms))
    return "\n".join(table(titles, rows))


def three_of(values: list[float], digits: int) -> str:
    """Return the first, the middle and the last value as text, of no values nothing."""
    return ", ".join(f"{values[n]:.{digits}f}" for n in (0, len(values) // 2, -1)) if values else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
