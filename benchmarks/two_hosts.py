"""python benchmarks/two_hosts.py: times the CPU engine and the all-to-all between two hosts of this machine, by rate.

The hosts are namespaces (tests/two_hosts.py: needs root and iproute2), with one rank each. At every rate one run of
``ep_dispatcher.bench`` has both sides. The JSON has its figures, and how busy the machine was before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from two_hosts import Hosts  # noqa: E402

from ep_dispatcher.tools.benchmark.harness import make_parser  # noqa: E402

COMMAND = (
    "EP_DISPATCHER_ENGINE=cpu GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 1 "
    "--master-addr host0 --master-port 29500 -m ep_dispatcher.bench --engine cpu --tokens {tokens} --hidden {hidden} "
    "--iters {iters} --out {out}"
)


def main() -> int:
    parser = make_parser(__doc__, tokens=1024, hidden=2048, iters=10)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of the network, as tc has them")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each rate")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/two-hosts-cpu.json", help="JSON")
    args = parser.parse_args()
    report: dict = {"rates": {}}
    for rate in args.rates:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as out, Hosts(2, rate=rate) as hosts:
            command = COMMAND.format(out=out, tokens=args.tokens, hidden=args.hidden, iters=args.iters)
            ends = hosts.run_all(command, timeout_s=args.timeout)
            if any(code for code, _ in ends):
                print(*(output for _, output in ends), sep="\n", file=sys.stderr)
                return 1
            (path,) = Path(out).glob("*.json")
            run = json.loads(path.read_text())
        report |= {"shape": run["case"], "machine": run["machine"], "wire_bytes": run["wire_bytes"]}
        report["rates"][rate] = {"load_before": load, "operations": run["operations"]}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{rate}:\n{ends[0][1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
