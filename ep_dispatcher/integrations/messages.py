"""What the integrations print for the user, once a job, on its first rank."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

import ep_dispatcher as ep

_announced: set[str] = set()  # frameworks that ``announce`` has printed a line about


def is_first_rank() -> bool:
    """Return whether this is the rank of the job that tells the user something."""
    return not dist.is_initialized() or dist.get_rank() == 0


def print_on_first_rank(text: str) -> None:
    """Print a line of ours on the first rank of the job."""
    if is_first_rank():
        print(text, flush=True)


def announce(framework: str, buffer: ep.Buffer, more: str = "") -> None:
    """Print once a job, on its first rank, that this library carries the tokens of a framework.

    framework   its name and version, such as "torchtitan 0.3.0"
    buffer      the first one; the line has its engine, sizes, ranks, nodes, and the wire between nodes
    more        facts of this framework alone, which follow its name
    """
    name = framework.partition(" ")[0]
    if name not in _announced:
        _announced.add(name)
        print_on_first_rank(
            f"ep_dispatcher {ep.__version__} carries the tokens of {framework}{more}. First buffer: {buffer}"
        )


def name_and_version(package: str) -> str:
    """Return the name of a package, and its version if it is installed by pip."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # run from its sources
        return package
