"""python benchmarks/two_hosts.py: times an engine and the all-to-all between two hosts of this machine, by rate.

The hosts are namespaces (tests/lib: needs root and iproute2), with one rank each, and with a GPU each for the
CUDA engine. At every rate the same processes measure both sides. The JSON has the figures of ``ep_dispatcher.bench``,
and how busy the machine was before. The chart is beside it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lib.two_hosts import Hosts, HostsPool  # noqa: E402
from rates import RATES, draw_rates, rate, set_rate  # noqa: E402

from ep_dispatcher.tools.benchmark import suite  # noqa: E402
from ep_dispatcher.tools.benchmark.cases import STANDARD  # noqa: E402
from ep_dispatcher.tools.benchmark.harness import make_parser  # noqa: E402
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json  # noqa: E402
from ep_dispatcher.tools.benchmark.measurements import measure_engine  # noqa: E402

OPERATION = "dispatch+combine"


def main() -> int:
    parser = make_parser(__doc__, tokens=1024, hidden=2048, iters=10)
    parser.add_argument("--engine", choices=tuple(STANDARD), default="cpu", help="cuda: needs two GPUs")
    parser.add_argument("--rates", type=rate, nargs="+", default=RATES, help="of what a host sends")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each rate")
    parser.add_argument("--out", type=Path, help="JSON; None: benchmarks/results/two-hosts-ENGINE.json")
    args = parser.parse_args()
    if args.engine == "cuda" and torch.cuda.device_count() < 2:
        parser.error("--engine is cuda, but has to be cpu, because there are fewer than two GPUs")
    out = args.out or ROOT / f"benchmarks/results/two-hosts-{args.engine}.json"
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "iters")}
    case = replace(STANDARD[args.engine], ranks=2, ranks_per_node=1, operations=(OPERATION,), **sizes)
    report: dict = {"title": f"{OPERATION} between two hosts", "median_ms": {}}
    report |= {"shape": asdict(case), "machine": describe_machine(), "rates": {}}
    right, options = True, dict(timeout_s=args.timeout, backend=suite.BACKENDS[args.engine])
    with Hosts(2) as hosts, HostsPool(hosts, 1, **options) as pool:
        for text in args.rates:
            load = os.getloadavg()[0]
            set_rate(hosts, text)
            result = suite.new_result(case)
            found = pool.run(measure_engine, case)[0]
            del found["usable"]
            suite.merge(result, found)
            suite.summarize(result, case)
            print(f"{text}:\n{suite.table(result)}", flush=True)
            right &= not result["notes"] and all(compared["same"] for compared in result["compared"].values())
            report["wire_bytes"] = result["wire_bytes"]
            report["rates"][text] = {"load_before": load, "operations": result["operations"]}
            for side, figures in result["operations"][OPERATION].items():
                report["median_ms"].setdefault(side, {})[text] = figures["median_s"] * 1e3
            out.write_text(to_json(report))
    draw_rates(out)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
