"""Puts our ``deep_ep``, ``deep_ep_cpp`` and ``deep_ep_v25`` first on the import path, here and in child processes."""

from __future__ import annotations

import importlib
import os
import sys

NAMES = "deep_ep", "deep_ep_cpp", "deep_ep_v25"
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modules")


def install() -> None:
    """Let ``import deep_ep`` find our module, here and in processes that this one starts.

        sys.path = [our folder, *sys.path]; PYTHONPATH likewise, for new processes (spawn, a launcher)

    A second call does nothing. Raises RuntimeError if another ``deep_ep`` has been imported already.
    """
    for name, ours in _loaded().items():
        if not ours:
            raise RuntimeError(f"install() has to come before the program imports {name}")
    _set_paths([FOLDER])


def uninstall() -> None:
    """Undo ``install``: the next ``import deep_ep`` finds an installed one. Existing objects stay usable."""
    for name, ours in _loaded().items():
        if ours:
            del sys.modules[name]
    _set_paths([])


def _set_paths(first: list[str]) -> None:
    """Set sys.path and PYTHONPATH to these folders, followed by what they have now without our folder."""
    sys.path[:] = [*first, *(path for path in sys.path if path != FOLDER)]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *(path for path in others if path not in ("", FOLDER))])
    importlib.invalidate_caches()


def _loaded() -> dict[str, bool]:
    """Return the modules of these names, and whether each is ours."""
    names = [name for name in sys.modules if name.partition(".")[0] in NAMES]
    return {name: str(getattr(sys.modules[name], "__file__", "")).startswith(FOLDER + os.sep) for name in names}
