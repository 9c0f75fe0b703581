"""Trains a mixture of experts on real text with Megatron-LM, by alltoall and by this dispatcher, and compares losses.

    python benchmarks/megatron_corpus.py /usr/share/dictd/gcide.dict.dz runs/gcide
    python benchmarks/megatron_training.py --ranks 4 --corpus runs/gcide --out runs/training pretrain_gpt.py

The model has 8 layers of hidden size 512, each with 32 experts, top-4, and reads 32 sequences of 512 bytes a step.
There is no dropout, and alltoall trains it twice, because another seed (other weights, other order of the text) shows
how large differences may be that mean nothing. Jobs:

    ep_dispatcher     this dispatcher with its two flags; saves a checkpoint in the middle and at the end
    alltoall          Megatron's dispatcher, its other arguments and its seed the same
    resumed           goes on from the checkpoint in the middle
    resumed_other_ep  the same with half the expert parallel size
    balanced          this dispatcher with a slot of each rank for copies of hot experts
    alltoall_seed     alltoall with another seed

--gpus of twice as many GPUs as --ranks runs two jobs at once, and so on. --only chooses jobs; those of earlier calls
stay in the report of the same --out folder, so that runs can be spread over several calls. A job that takes more than
--limit-s is ended, and what it has logged is kept. Arguments after the script go to all jobs.

Logs, training.json and its chart are in --out, checkpoints in --checkpoints. The exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_corpus import VOCABULARY
from megatron_jobs import LOSS, MILLISECONDS, Job, exit_on_sigterm, read_iterations
from training_curves import draw_curves, report

from ep_dispatcher.tools.benchmark.harness import make_parser, number
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json

SEQUENCE, BATCH = 512, 32  # tokens of a sequence, sequences of a step
LOG_INTERVAL = 10
FIRST_STEPS = 100  # that times leave out
POLL_S, MEMORY_POLL_S = 0.1, 5.0
TRAINING = f"""
--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --swiglu --disable-bias-linear
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --global-batch-size {BATCH} --normalization RMSNorm
--position-embedding-type rope --no-rope-fusion --untie-embeddings-and-output-weights --init-method-std 0.02
--attention-dropout 0 --hidden-dropout 0 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 256
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-grouped-gemm
--moe-permute-fusion --expert-tensor-parallel-size 1 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine
--lr-warmup-fraction 0.05 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 --use-distributed-optimizer --bf16
--transformer-impl transformer_engine --cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad
--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 99,1,0 --num-workers 2 --eval-iters 10
--no-create-attention-mask-in-dataloader --log-interval {LOG_INTERVAL} --ckpt-format torch_dist
--dist-ckpt-optim-fully-reshardable --distributed-timeout-minutes 2 --seed 1234
"""
ALLTOALL = "--moe-token-dispatcher-type alltoall"
OURS = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher"
SAVING, RESUMED = "ep_dispatcher", ("resumed", "resumed_other_ep")
JOBS = {  # in the order in which they start
    SAVING: OURS,
    "alltoall": ALLTOALL,
    "resumed": OURS,
    "resumed_other_ep": OURS,
    "balanced": f"{OURS} --ep-dispatcher-redundant-experts-per-rank 1",
    "alltoall_seed": f"{ALLTOALL} --seed 4321",
}
MEMORY = re.compile(r"memory \(MB\).*?max allocated: ([\d.]+)")
VALIDATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: ([\d.E+-]+)")


@dataclass
class Run:
    job: Job
    log: Path
    gpus: list[int]
    process: subprocess.Popen
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    device_mb: float | None = None  # the largest that nvidia-smi has shown, of its fullest GPU

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def figures(self) -> dict[str, Any]:
        """Return what training.json has about the run."""
        about = dict(code=self.process.returncode, seconds=round(self.seconds, 1), device_mb=self.device_mb)
        return about | dict(arguments=shlex.join(self.job.arguments)) | read_log(self.log)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "training.json"
    found = read_report(args.out) | shared_settings(args) | dict(machine=describe_machine(), log_interval=LOG_INTERVAL)
    found["tokens_per_step"] = SEQUENCE * BATCH
    failed = set(args.only)
    with exit_on_sigterm():
        for run in run_jobs(args):
            runs = found["runs"] | {run.job.name: run.figures()}
            found["runs"] = {name: runs[name] for name in JOBS if name in runs}
            path.write_text(to_json(found))
            if run.process.returncode == 0:
                failed.remove(run.job.name)
    if found["runs"]:
        print(*report(found), sep="\n")
        draw_curves(path)
    return int(bool(failed))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, iterations=1500)
    add = parser.add_argument
    add("--ranks", type=number(int, 2), default=4, help="processes of a job, a GPU each; also its EP size")
    add("--gpus", type=number(int, 1), help="GPUs that all jobs together may use (default: --ranks)")
    add("--corpus", type=Path, required=True, help="prefix of a data set of megatron_corpus.py")
    add("--only", type=job_names, default=list(JOBS), metavar="JOB,JOB", help="jobs to run, see above (default: all)")
    add("--limit-s", type=number(float, 1), default=400, help="seconds for each job")
    add("--out", type=Path, default=Path("runs/megatron_training"), help="folder of logs, JSON and chart")
    add("--checkpoints", type=Path, help="folder of about 3 GB (default: checkpoints in --out)")
    add("script", type=Path, help="pretrain_gpt.py of Megatron-LM")
    add("arguments", nargs=argparse.REMAINDER, help="of the script, for all jobs")
    args = parser.parse_args(argv)
    args.gpus = args.gpus or args.ranks
    args.checkpoints = (args.checkpoints or args.out / "checkpoints").resolve()
    if args.gpus < args.ranks or BATCH % args.ranks:
        parser.error(f"--ranks is {args.ranks}, but has to divide {BATCH}, and to be at most --gpus {args.gpus}")
    if args.iterations % (2 * LOG_INTERVAL):
        parser.error(f"--iterations is {args.iterations}, but has to be a multiple of {2 * LOG_INTERVAL}")
    for file in (args.script, Path(f"{args.corpus}.bin"), Path(f"{args.corpus}.idx")):
        if not file.is_file():
            parser.error(f"{str(file)!r} has to be a file that exists")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out is {str(args.out)!r}, but has to be a folder")
    earlier = read_report(args.out)
    for name, value in shared_settings(args).items():
        if earlier.get(name, value) != value:
            parser.error(f"--out has jobs with {name} {earlier[name]}, but these have {value}: give another folder")
    return args


def read_report(out: Path) -> dict[str, Any]:
    """Return what earlier calls have found."""
    path = out / "training.json"
    return json.loads(path.read_text()) if path.exists() else {"runs": {}}


def shared_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all jobs of a report have in common."""
    return dict(ranks=args.ranks, iterations=args.iterations, arguments=shlex.join(common_arguments(args)))


def job_names(text: str) -> list[str]:
    """The type of an argument: names of jobs with commas between them, in the order in which they start."""
    names = text.split(",")
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        raise argparse.ArgumentTypeError(f"it has {', '.join(unknown)}, but the jobs are {', '.join(JOBS)}")
    return [name for name in JOBS if name in names]


# ---- jobs -----------------------------------------------------------------------------------------------------------


def common_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments of all jobs."""
    words = f"--train-iters {args.iterations} --eval-interval {args.iterations // 2}"
    words += f" --micro-batch-size {BATCH // args.ranks}"
    return [*shlex.split(f"{TRAINING} {words}"), "--data-path", str(args.corpus.resolve()), *args.arguments]


def make_job(name: str, args: argparse.Namespace) -> Job:
    """Return a job with the arguments that it has to itself."""
    middle, ep = args.iterations // 2, args.ranks
    words = ["--data-cache-path", str(args.out.resolve() / "cache" / name)]  # two jobs must not write the same file
    if name == SAVING:
        words += ["--save", str(args.checkpoints), "--save-interval", str(middle)]
    if name in RESUMED:
        words += ["--load", str(args.checkpoints), "--ckpt-step", str(middle)]
    if name == "resumed_other_ep":
        ep = args.ranks // 2
        # With EP 1 Megatron has one optimizer, but the checkpoint has two: one more for the experts.
        words += ["--no-load-optim"] if ep == 1 else []
    words += ["--expert-model-parallel-size", str(ep)]
    return Job.parse(f"{name}: CUDA_DEVICE_MAX_CONNECTIONS=1 {JOBS[name]} {shlex.join(words)}")


def run_jobs(args: argparse.Namespace) -> Iterator[Run]:
    """Run the jobs, each on GPUs of its own, and yield those that have ended."""
    waiting, running = list(args.only), []
    places = [list(range(first, first + args.ranks)) for first in range(0, args.gpus - args.ranks + 1, args.ranks)]
    memory_time = 0.0
    try:
        while waiting or running:
            for name in ready_jobs(waiting, running, args)[: len(places)]:
                waiting.remove(name)
                running.append(start(name, places.pop(0), args))
            if time.monotonic() > memory_time + MEMORY_POLL_S:
                note_memory(running)
                memory_time = time.monotonic()
            for run in [run for run in running if has_ended(run, args.limit_s)]:
                running.remove(run)
                places.append(run.gpus)
                print(f"{run.job.name}: exit code {run.process.returncode}, {run.seconds:.0f} s", flush=True)
                yield run
            time.sleep(POLL_S)
    finally:
        for run in running:
            stop(run)


def ready_jobs(waiting: list[str], running: list[Run], args: argparse.Namespace) -> list[str]:
    """Return the jobs that can start. Jobs that never can are taken from ``waiting``, with a line that says why."""
    if SAVING in waiting or any(run.job.name == SAVING for run in running):
        return [name for name in waiting if name not in RESUMED]
    checkpoint = args.checkpoints / f"iter_{args.iterations // 2:07d}"
    for name in [name for name in waiting if name in RESUMED and not checkpoint.is_dir()]:
        print(f"{name}: not run, because there is no checkpoint {checkpoint}: the job {SAVING} writes it", flush=True)
        waiting.remove(name)
    return list(waiting)


def start(name: str, gpus: list[int], args: argparse.Namespace) -> Run:
    job, log = make_job(name, args), args.out / f"{name}.log"
    job.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    arguments = [str(args.script.resolve()), *common_arguments(args), *job.arguments]
    return Run(job, log, gpus, job.start(args.ranks, args.script, arguments, log))


def has_ended(run: Run, limit_s: float) -> bool:
    """Return whether it has ended, by itself or because its time is up."""
    if run.process.poll() is None and run.seconds > limit_s:
        print(f"{run.job.name}: ended, because it took more than {limit_s:g} s", flush=True)
        stop(run)
    if run.process.poll() is None:
        return False
    run.ended = time.monotonic()
    return True


def stop(run: Run) -> None:
    run.process.terminate()  # torchrun ends its ranks
    run.process.wait()


# ---- figures --------------------------------------------------------------------------------------------------------


def note_memory(running: list[Run]) -> None:
    """Note the memory in use on the GPUs of each run: of the allocator, buffers, NCCL and the driver."""
    if not running or shutil.which("nvidia-smi") is None:
        return
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    used = [float(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    for run in running:
        run.device_mb = max([run.device_mb or 0.0, *(used[gpu] for gpu in run.gpus if gpu < len(used))])


def read_log(log: Path) -> dict[str, Any]:
    """Return the figures of a log: each list has a number for every logged iteration."""
    found, text = list(read_iterations(log)), log.read_text(errors="replace")

    def column(name: str, digits: int) -> list[float | None]:
        return [round(one[name], digits) if name in one else None for one in found]

    def total(name: str) -> int:
        return int(sum(one.get(f"number of {name} iterations", 0) for one in found))

    late = [one for one in found if one["iteration"] >= found[0]["iteration"] + FIRST_STEPS]
    times = [one[MILLISECONDS] for one in late if MILLISECONDS in one]  # the last line of an ended job may be cut
    return dict(
        median_ms=statistics.median(times) if times else None,
        allocated_mb=max(map(float, MEMORY.findall(text)), default=None),
        skipped=total("skipped"),
        nan=total("nan"),
        validation={iteration: float(loss) for iteration, loss in VALIDATION.findall(text)},
        iterations=[int(one["iteration"]) for one in found],
        losses=column(LOSS, 6),
        balance_losses=column("load_balancing_loss", 6),
        grad_norms=column("grad norm", 3),
        ms=column(MILLISECONDS, 1),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
