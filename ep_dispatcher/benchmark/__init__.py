"""The parts of ``python -m ep_dispatcher.bench``.

cases.py  suite.py  parts.py   what is measured, the run, a rank's part
clock.py                       how a call is timed, on a host and on a GPU
sides.py  baseline.py  wires.py   what is compared, and the bytes that it moves
deep_ep.py                     DeepEP, for ``--with``
compare.py                     two runs side by side
machine.py  ranks.py           where it ran; what ranks tell each other
"""
