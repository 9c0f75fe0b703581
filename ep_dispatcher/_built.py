"""Sees whether the compiled modules are there, and says what to do where they are not.

The package imports this file before all others, as none of them works without ``_C_cpu``. The doctor loads it by
itself, so it imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


class NotBuilt(ImportError):
    """A compiled module is not there. ``found`` says what is there, ``fix`` what to do, ``hidden`` where it is."""

    def __init__(self, found: str, fix: str, hidden: Path | None = None):
        super().__init__(f"the compiled module of ep_dispatcher is {found}. To mend it: {fix}")
        self.found, self.fix, self.hidden = found, fix, hidden


def find(module: str, package: Path = PACKAGE) -> Path:
    """Return the file of a compiled module such as "_C_cpu" in a folder of this package; NotBuilt if there is none."""
    path = _file(module, package)
    if path is not None:
        return path
    hidden = [other for other in hidden_folders(package) if _file(module, other)]
    if hidden:
        raise NotBuilt(
            f"not built in {package}, which hides the package that is installed in {hidden[0]}",
            f"start Python in another folder than {package.parent}, or build its sources too: {_command(package)}",
            hidden[0],
        )
    others = sorted(other.name for other in package.glob(f"{module}.*") if other.suffix == ".so")
    if others:
        version = ".".join(map(str, sys.version_info[:2]))
        raise NotBuilt(f"built only for another Python than this {version}, as {', '.join(others)}", _command(package))
    raise NotBuilt(f"not built in {package}", _command(package))


def _file(module: str, package: Path) -> Path | None:
    paths = [package / (module + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def hidden_folders(package: Path = PACKAGE) -> list[Path]:
    """Return the folders that Python would import if it did not find ``package`` before them."""
    folders = list(dict.fromkeys((Path(entry) / package.name).resolve() for entry in sys.path))
    behind = folders[folders.index(package) + 1 :] if package in folders else []
    return [folder for folder in behind if (folder / "__init__.py").exists()]


def _command(package: Path) -> str:
    """Return how to build the package: from its sources if it lies among them."""
    sources = package.parent
    if (sources / "setup.py").exists():
        return f"make setup, or pip install -e . (in {sources})"
    return "pip install --force-reinstall --no-deps, with a wheel for this Python or with the sources"


def check() -> None:
    """Import ``_C_cpu``. NotBuilt if it is not there; ImportError if this system cannot load it."""
    path = find("_C_cpu")
    try:
        importlib.import_module("ep_dispatcher._C_cpu")
    except ImportError as error:
        raise ImportError(f"{path} cannot be loaded here ({error}). To mend it: {_command(PACKAGE)}") from error


def _starts_the_doctor() -> bool:
    """Return whether ``python -m ep_dispatcher.doctor`` imports the package, which comes before the doctor itself."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("ep_dispatcher.doctor")


if __name__ == "ep_dispatcher._built":
    try:
        check()
    except ImportError:
        if not _starts_the_doctor():
            raise
        runpy.run_path(str(PACKAGE / "tools" / "doctor.py"), run_name="__main__")  # it ends the process
