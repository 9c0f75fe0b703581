"""The modules of ``python -m ep_dispatcher.bench``, and what it shares with the scripts in benchmarks/.

harness.py                     arguments, ranks that share GPUs, times of CUDA graphs, tables, charts
cases.py  suite.py             the cases; runs them one after the other
measurements.py                what a rank measures of a case
clock.py                       times a call, on a host and on a GPU
sides.py  baseline.py          the engine, and the all-to-all that it is compared with
wires.py                       the bytes that each side moves
deep_ep.py                     DeepEP as another side, for ``--with``
compare.py                     compares two runs
machine.py  ranks.py           describes the machine; exchanges between ranks
"""
