"""Runs a program written for deep_ep with ep_dispatcher in place of DeepEP, without editing a file.

torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>
python -m ep_dispatcher.integrations.deep_ep -m package.module <arguments of the module>
"""

from __future__ import annotations

import os
import runpy
import sys

from ep_dispatcher.integrations.deep_ep.path import install


def main() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if arguments and not is_module else 2)
    sys.argv = arguments[is_module:]
    program = sys.argv[0]
    if not is_module and not os.path.isfile(program):
        sys.exit(f"ep_dispatcher.integrations.deep_ep: program: given {program!r}, allowed: a Python file that exists")
    # As `python program.py` does, search the folder of the program first.
    if not is_module and not getattr(sys.flags, "safe_path", False):  # with python -P sys.path has no such folder
        sys.path[0] = os.path.dirname(os.path.abspath(program))
    install()
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
