"""Runs a program as Python would, after a preparation. The launchers of the integrations share this."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec


def run_program(launcher: str, usage: str, prepare: Callable[[], None]) -> None:
    """Run the program in sys.argv, a file or ``-m module``, with the sys.argv, sys.path and __main__ of Python.

    launcher  the module that runs, for errors
    usage     printed for --help, and if there is no program
    prepare   called with the program's sys.argv and sys.path, before anything of the program is imported
    """
    arguments, allowed = sys.argv[1:], "a Python file that exists, or -m and the name of a module"
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module or arguments[0] in ("-h", "--help"):
        print(usage.strip())
        sys.exit(0 if arguments and not is_module else 2)
    sys.argv = arguments[is_module:]
    program = sys.argv[0]
    if not is_module:
        if not os.path.isfile(program):
            sys.exit(f"{launcher}: program is {program!r}, but has to be {allowed}")
        # Like `python program.py`, put the program's folder first. `python -m` has the current folder there, as it is
        # now; `python -P` has neither.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.abspath(program))
    prepare()
    if not is_module:
        runpy.run_path(program, run_name="__main__")
    elif _exists(program):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.exit(f"{launcher}: -m is {program!r}, a module that Python does not find; it has to be {allowed}")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:  # of a package around it, or of something that such a package imports
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise
