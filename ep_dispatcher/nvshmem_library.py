"""NVSHMEM's libraries in this process, and whether its IBGDA can serve. Nothing here starts NVSHMEM.

The doctor loads this file by itself, so it imports nothing but Python's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"


def loaded_versions() -> dict[str, str]:
    """Return path and version of every host library of NVSHMEM that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    found = {}
    for path in sorted(path for path in paths if os.path.basename(path).startswith("libnvshmem_host.so")):
        numbers = [ctypes.c_int() for _ in range(3)]
        try:
            ctypes.CDLL(path, os.RTLD_NOLOAD).nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
        except (OSError, AttributeError):  # replaced on disk since it was loaded; or too old for this function
            found[path] = "unknown"
        else:
            found[path] = ".".join(str(number.value) for number in numbers)
    return found


def one_version(module_file: str) -> str:
    """Return the version of NVSHMEM that _C_nvshmem and this process use. ValueError for a mixture.

    Called when the module has been imported, or could not be. NVSHMEM itself accepts a device library that is older
    than the host library, and jobs hang with some pairs. PyTorch loads its copy of the host library first, and the
    module then calls that one.
    """
    loaded = loaded_versions()
    if not loaded:  # a failed import unloads that of LD_LIBRARY_PATH
        with contextlib.suppress(OSError):
            ctypes.CDLL("libnvshmem_host.so.3")
        loaded = loaded_versions()
    found = re.search(rb"_C_nvshmem is built with NVSHMEM ([\d.]+)", Path(module_file).read_bytes())
    device = found[1].decode() if found else "of an older build"
    other = next((path for path, version in loaded.items() if version not in (device, "unknown")), None)
    if other is None:
        return device
    raise ValueError(
        f"NVSHMEM has device library {device} in _C_nvshmem and host library "
        f"{', '.join(f'{version} ({path})' for path, version in loaded.items())}, but needs one version: build again "
        f"with `NVSHMEM_HOME={Path(other).parents[1]} EP_DISPATCHER_NVSHMEM=1 pip install --no-build-isolation .`, and "
        "let LD_LIBRARY_PATH and LD_PRELOAD lead to no other"
    )


def ibgda_problem(root: Path = Path("/")) -> str:
    """Return why a buffer does not switch IBGDA on, "" where it does: the GPU then posts its puts to the card itself.

    It is left to the user who has chosen a transport. It serves NVIDIA's cards alone. ``root``: of /sys and /dev.
    """
    for name in (IBGDA, "NVSHMEM_REMOTE_TRANSPORT"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} is set"
    for port in root.glob("sys/class/infiniband/*/ports/*"):
        driver = (port.parents[1] / "device/driver").resolve().name
        if driver.startswith("mlx5_core") and "ACTIVE" in (port / "state").read_text():
            break
    else:
        return "no card of the driver mlx5_core has an active port"
    if not list(root.glob("dev/infiniband/uverbs*")):
        return "this process has no /dev/infiniband/uverbs*"
    try:
        ctypes.CDLL("libmlx5.so.1")
    except OSError as error:
        return str(error)
    return ""
