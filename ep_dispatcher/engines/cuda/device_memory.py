"""Device memory that is mapped and unmapped at fixed addresses, by CUDA's virtual memory management.

NVIDIA's package cuda-bindings makes the calls. It comes with PyTorch's own CUDA builds from 2.10 on. Memory lives as
long as a process has it mapped, or has a descriptor of it.

What other processes map memory by is a file descriptor. For processes on other hosts that NVLink joins it is a fabric
handle: 64 bytes that hold nothing themselves, and can be mapped as long as their maker holds the memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
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
        handle = memory.create(offset, size)          # map new memory; the handle is for `attach` in another process
        memory.attach(offset, size, handle)           # map memory of another process
        memory.unmap(offset)                          # the addresses stay, and can be mapped again
        memory.free()                                 # all of it; at the latest when nobody holds the object any more

    Offsets and sizes are multiples of ``page_bytes``. Nothing may use memory when it is unmapped or freed. Handles are
    file descriptors, which the caller closes, or with ``between_hosts`` fabric handles.
    """

    def __init__(self, num_bytes: int, device: int, between_hosts: bool = False):
        self._device, self._between_hosts = device, between_hosts
        self.address = int(_call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        self._mapped: dict[int, int] = {}  # bytes by address
        self._held: dict[int, Any] = {}  # allocations with a fabric handle, by address
        self._free = weakref.finalize(
            self, _free, self.address, num_bytes, self._mapped, self._held, device, os.getpid()
        )
        self._free.atexit = False  # at exit the driver frees it, and may be gone already

    def create(self, offset: int, num_bytes: int) -> int | bytes:
        properties = _properties(self._device, self._between_hosts)
        try:
            handle = _call("cuMemCreate", num_bytes, properties, 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # memory that PyTorch keeps for later
            try:
                handle = _call("cuMemCreate", num_bytes, properties, 0)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(f"{error}, and {num_bytes / 2**20:,.1f} MiB are needed") from None
        is_held = False
        try:
            shared = _call("cuMemExportToShareableHandle", handle, properties.requestedHandleTypes, 0)
            shared = bytes(shared.data) if self._between_hosts else int(shared)
            try:
                self._map(offset, num_bytes, handle)
            except BaseException:  # it is raised again
                close([shared])
                raise
            if self._between_hosts:
                self._held[self.address + offset] = handle
                is_held = True
        finally:
            if not is_held:
                _call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
        return shared

    def attach(self, offset: int, num_bytes: int, handle: int | bytes) -> None:
        allocation = _call("cuMemImportFromShareableHandle", handle, _kind(self._between_hosts))
        try:
            self._map(offset, num_bytes, allocation)
        finally:
            _call("cuMemRelease", allocation)

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
        if address in self._held:
            _call("cuMemRelease", self._held.pop(address))

    def free(self) -> None:
        self._free()


def close(handles: Iterable[int | bytes]) -> None:
    """Close those that are file descriptors."""
    for handle in handles:
        if isinstance(handle, int):
            os.close(handle)


def _kind(between_hosts: bool) -> Any:
    kinds = _driver().CUmemAllocationHandleType
    return kinds.CU_MEM_HANDLE_TYPE_FABRIC if between_hosts else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(device: int, between_hosts: bool) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _kind(between_hosts)
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def page_bytes(device: int, between_hosts: bool = False) -> int:
    """Return the bytes of a page of device memory: 2 MiB on the GPUs of today."""
    least = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _properties(device, between_hosts), least))


def try_fabric(device: int) -> None:
    """Make, pass on and map a page between hosts. ImportError or RuntimeError if that cannot be done here."""
    page = page_bytes(device, between_hosts=True)
    memory = DeviceMemory(2 * page, device, between_hosts=True)
    try:
        memory.attach(page, page, memory.create(0, page))
    finally:
        memory.free()


def _free(address: int, num_bytes: int, mapped: dict[int, int], held: dict[int, Any], device: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child: the addresses are its parent's
        return
    torch.cuda.synchronize(device)  # kernels may still use it where a buffer is dropped without destroy()
    for begin in list(mapped):
        _call("cuMemUnmap", begin, mapped.pop(begin))
    while held:
        _call("cuMemRelease", held.popitem()[1])
    _call("cuMemAddressFree", address, num_bytes)
