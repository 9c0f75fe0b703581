"""The GPUs that the CUDA engine runs on. The doctor loads this file by itself, so it imports nothing."""

CAPABILITIES = "9.0 or newer, without 12.x"


def runs_on(capability: tuple[int, int]) -> bool:
    """Return whether kernels can run on a GPU. They need 227 KiB of shared memory in a block; 12.x has 99."""
    return capability >= (9, 0) and capability[0] != 12
