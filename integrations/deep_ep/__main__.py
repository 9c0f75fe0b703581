"""Runs a program that is written for deep_ep with ep_dispatcher in DeepEP's place, without an edit of any file.

torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>
"""

from __future__ import annotations

import os
import runpy
import sys

from ep_dispatcher.integrations.deep_ep.path import install


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if len(sys.argv) > 1 else 2)
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    if not os.path.isfile(script):
        sys.exit(f"ep_dispatcher.integrations.deep_ep: program: given {script!r}, allowed: a Python file that exists")
    # As `python program.py` does: what lies beside the program comes first.
    if not getattr(sys.flags, "safe_path", False):  # python -P: Python puts no folder there, and so do we
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
