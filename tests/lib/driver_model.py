"""A model of CUDA's virtual memory management on a machine without a GPU: its calls, on files in memory and mmap.

``install(pages)`` puts it in the place of cuda-bindings in this process. It is as strict as the driver: addresses must
be reserved, mappings must not overlap and are unmapped as a whole, sizes are multiples of a page. Memory is real, and
real processes share it by real descriptors, so ``pages_in_use`` counts what a GPU would hold. A fabric handle names an
allocation of a process, and leads to it as long as the process has not released it.
"""

from __future__ import annotations

import ctypes
import enum
import os
import struct
import sys
from types import ModuleType, SimpleNamespace

from lib.faults import open_files

PAGE = 1 << 16
FIXED, READ_WRITE, SHARED, PRIVATE = 0x10, 3, 1, 2
NO_RESERVE, ANONYMOUS = 0x4000, 0x20


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_PERMITTED = 800


class Driver:
    """The functions that device_memory.py calls. ``pages_left``: how many this process may still create.

    ``has_imex``: whether it may make and take fabric handles.
    """

    CUresult = Status
    CUmemAllocationHandleType = SimpleNamespace(
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd", CU_MEM_HANDLE_TYPE_FABRIC="fabric"
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")

    def __init__(self, pages_left: int = 1 << 20):
        self.pages_left, self.has_imex = pages_left, True
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, str] = {}  # open descriptors, and the kind of handle that they were made for
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemGetAllocationGranularity(self, properties, option):
        assert properties.requestedHandleTypes in ("fd", "fabric")
        assert vars(properties) == dict(
            type="pinned",
            requestedHandleTypes=properties.requestedHandleTypes,
            location=SimpleNamespace(type="device", id=0),
        )
        return Status.CUDA_SUCCESS, PAGE

    def _nothing_at(self, address: int, num_bytes: int) -> int:
        flags = PRIVATE | ANONYMOUS | NO_RESERVE | (FIXED if address else 0)
        return self._libc.mmap(address, num_bytes, 0, flags, -1, 0)

    def cuMemAddressReserve(self, num_bytes, alignment, address, flags):
        assert num_bytes > 0 and num_bytes % PAGE == 0 and (alignment, address, flags) == (0, 0, 0)
        address = self._nothing_at(0, num_bytes)
        self.reserved[address] = num_bytes
        return Status.CUDA_SUCCESS, address

    def cuMemAddressFree(self, address, num_bytes):
        assert self.reserved.pop(address) == num_bytes
        assert not [at for at in self.mapped if address <= at < address + num_bytes], "still mapped"
        assert self._libc.munmap(address, num_bytes) == 0
        return (Status.CUDA_SUCCESS,)

    def cuMemCreate(self, num_bytes, properties, flags):
        assert num_bytes > 0 and num_bytes % PAGE == 0 and flags == 0 and properties.location.id == 0
        if num_bytes // PAGE > self.pages_left:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        if properties.requestedHandleTypes == "fabric" and not self.has_imex:
            return Status.CUDA_ERROR_NOT_PERMITTED, None
        handle = os.memfd_create("driver_model")
        os.posix_fallocate(handle, 0, num_bytes)
        self.handles[handle] = properties.requestedHandleTypes
        return Status.CUDA_SUCCESS, handle

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        assert self.handles[handle] == kind and flags == 0
        if kind == "fd":
            return Status.CUDA_SUCCESS, os.dup(handle)
        return Status.CUDA_SUCCESS, SimpleNamespace(data=struct.pack("3q40x", os.getpid(), handle, inode_of(handle)))

    def cuMemImportFromShareableHandle(self, shared, kind):
        if kind == "fd":
            assert isinstance(shared, int)
            handle = os.dup(shared)
        else:
            assert kind == "fabric" and isinstance(shared, bytes) and len(shared) == 64
            pid, fd, inode = struct.unpack("3q40x", shared)
            try:
                handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            except FileNotFoundError:
                return Status.CUDA_ERROR_INVALID_HANDLE, None
            if inode_of(handle) != inode:
                os.close(handle)
                return Status.CUDA_ERROR_INVALID_HANDLE, None
        self.handles[handle] = ""
        return Status.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle):
        del self.handles[handle]
        os.close(handle)
        return (Status.CUDA_SUCCESS,)

    def cuMemMap(self, address, num_bytes, offset, handle, flags):
        inside = any(at <= address and address + num_bytes <= at + size for at, size in self.reserved.items())
        apart = all(address + num_bytes <= at or at + size <= address for at, size in self.mapped.items())
        if not inside or not apart or num_bytes != os.fstat(handle).st_size or (offset, flags) != (0, 0):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        assert self._libc.mmap(address, num_bytes, 0, SHARED | FIXED, handle, 0) == address
        self.mapped[address] = num_bytes
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, num_bytes, access, count):
        assert self.mapped[address] == num_bytes and count == len(access) == 1
        assert vars(access[0]) == dict(flags="read and write", location=SimpleNamespace(type="device", id=0))
        assert self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), READ_WRITE) == 0
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, num_bytes):
        if self.mapped.pop(address, None) != num_bytes:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        assert self._nothing_at(address, num_bytes) == address
        return (Status.CUDA_SUCCESS,)


def inode_of(fd: int) -> int:
    return os.fstat(fd).st_ino


def install(pages_left: int = 1 << 20) -> Driver:
    """Put the model where device_memory.py looks for cuda-bindings, in this process alone."""
    import torch

    from ep_dispatcher.engines.cuda import device_memory

    driver = Driver(pages_left)
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    package.bindings, bindings.driver = bindings, driver
    sys.modules |= {"cuda": package, "cuda.bindings": bindings}
    device_memory._driver.cache_clear()
    torch.cuda.current_device, torch.cuda.synchronize = lambda: 0, lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    return driver


def at(address: int, num_bytes: int) -> memoryview:
    """Bytes at an address of this process, which ends with a fault where nothing is mapped."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def descriptors_of_memory() -> int:
    """Open descriptors of modelled memory in this process."""
    return sum("driver_model" in name for name in open_files())
