"""Device memory that is mapped and unmapped at fixed addresses, by CUDA's virtual memory management.

NVIDIA's package cuda-bindings makes the calls. It comes with PyTorch's own CUDA builds from 2.10 on. Memory lives as
long as a process has it mapped, or has a descriptor of it.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Any

import torch

from ep_dispatcher import checks


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def load_driver() -> None:
    """Load cuda-bindings. Call this before anything else here. ValueError if it is missing."""
    try:
        _driver()
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        given = f"True, and the package cuda-bindings cannot be used here ({error})"
        checks.fail("suspendable", given, f"False; or True after pip install 'cuda-bindings=={major}.*'")


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver and return its result. RuntimeError with its name and status if it fails."""
    driver = _driver()
    status, *results = getattr(driver, name)(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {driver.CUresult(status).name}")
    return results[0] if results else None


class DeviceMemory:
    """A range of addresses. Whole pages of it are mapped to memory of this process or of another one.

        memory = DeviceMemory(num_bytes, device)      # addresses without memory
        fd = memory.create(offset, size)              # map new memory; fd is for `attach` in another process
        memory.attach(offset, size, fd)               # map memory of another process
        memory.unmap(offset)                          # the addresses stay, and can be mapped again
        memory.free()                                 # all of it; at the latest when nobody holds the object any more

    Offsets and sizes are multiples of ``page_bytes(device)``. Nothing may use memory when it is unmapped or freed.
    """

    def __init__(self, num_bytes: int, device: int):
        self._device = device
        self.address = int(_call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        self._mapped: dict[int, int] = {}  # bytes by address
        self._free = weakref.finalize(self, _free, self.address, num_bytes, self._mapped, device, os.getpid())
        self._free.atexit = False  # at exit the driver frees it, and may be gone already

    def create(self, offset: int, num_bytes: int) -> int:
        properties = _properties(self._device)
        try:
            handle = _call("cuMemCreate", num_bytes, properties, 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # memory that PyTorch keeps for later
            try:
                handle = _call("cuMemCreate", num_bytes, properties, 0)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(f"{error}, and {num_bytes / 2**20:,.1f} MiB are needed") from None
        try:
            fd = int(_call("cuMemExportToShareableHandle", handle, properties.requestedHandleTypes, 0))
            try:
                self._map(offset, num_bytes, handle)
            except BaseException:  # it is raised again
                os.close(fd)
                raise
        finally:
            _call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
        return fd

    def attach(self, offset: int, num_bytes: int, fd: int) -> None:
        kind = _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = _call("cuMemImportFromShareableHandle", fd, kind)
        try:
            self._map(offset, num_bytes, handle)
        finally:
            _call("cuMemRelease", handle)

    def _map(self, offset: int, num_bytes: int, handle: Any) -> None:
        driver, address = _driver(), self.address + offset
        _call("cuMemMap", address, num_bytes, 0, handle, 0)
        self._mapped[address] = num_bytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call("cuMemSetAccess", address, num_bytes, [access], 1)

    def unmap(self, offset: int) -> None:
        """Unmap the memory at this offset, if there is any."""
        address = self.address + offset
        if address in self._mapped:
            _call("cuMemUnmap", address, self._mapped[address])
            del self._mapped[address]

    def free(self) -> None:
        self._free()


def _properties(device: int) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def page_bytes(device: int) -> int:
    """Return the bytes of a page of device memory: 2 MiB on the GPUs of today."""
    least = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _properties(device), least))


def _free(address: int, num_bytes: int, mapped: dict[int, int], device: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child: the addresses are its parent's
        return
    torch.cuda.synchronize(device)  # kernels may still use it where a buffer is dropped without destroy()
    for begin in list(mapped):
        _call("cuMemUnmap", begin, mapped.pop(begin))
    _call("cuMemAddressFree", address, num_bytes)
