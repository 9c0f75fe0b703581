"""The parts of ``python -m ep_dispatcher.bench``.

nodes.py  nodes_report.py      several topologies of CPU ranks: measuring; table, JSON and chart
cases.py  suite.py  parts.py   many cases on one set of ranks, for GPUs: what, the run, a rank's part
clock.py                       how a call is timed
sides.py  baseline.py  deep_ep.py  wires.py   what is compared, and the bytes that it moves
report.py  charts.py           the part of docs/performance.md and charts, from the JSON files
machine.py  ranks.py           where it ran; what ranks tell each other
"""
