"""The parts of ``python -m ep_dispatcher.bench``, and what it shares with the scripts in benchmarks/.

harness.py                     arguments, ranks that share GPUs, graphs that take turns, tables, charts
cases.py  suite.py  parts.py   the cases; runs them; a rank's part of one
clock.py                       times a call, on a host and on a GPU
sides.py  baseline.py          the engine, and the all-to-all that it is compared with
wires.py                       bytes that each moves
deep_ep.py                     DeepEP as another side, for ``--with``
compare.py                     compares two runs
machine.py  ranks.py           describes the machine; exchanges between ranks
"""
