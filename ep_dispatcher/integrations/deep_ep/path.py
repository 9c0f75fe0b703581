"""Puts our ``deep_ep`` and ``deep_ep_cpp`` before installed ones, for this process and those that it starts."""

from __future__ import annotations

import importlib
import os
import sys

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modules")
_NAMES = ("deep_ep", "deep_ep_cpp")


def install() -> None:
    """Let ``import deep_ep`` find our module, here and in processes that this one starts.

        sys.path = [our folder, *sys.path]; PYTHONPATH likewise, for new processes (spawn, a launcher)

    A second call does nothing. Raises RuntimeError if another ``deep_ep`` has been imported already.
    """
    others = [name for name in _loaded() if not _is_ours(name)]
    if others:
        raise RuntimeError(f"install: given after the program has imported {others[0]}, allowed: before that")
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, paths)])
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo ``install``: the next ``import deep_ep`` finds an installed one. Existing objects stay usable."""
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    for name in _loaded():
        if _is_ours(name):
            del sys.modules[name]
    importlib.invalidate_caches()


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in _NAMES]


def _is_ours(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and os.path.abspath(file).startswith(FOLDER + os.sep)
