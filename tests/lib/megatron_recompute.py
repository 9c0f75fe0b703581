"""Configurations and microbatches of a recomputed layer."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from lib.megatron_layer import (
    checkpointed,
    grads_of,
    on_gpu,
    random,
)

MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])


@contextlib.contextmanager
def no_waits():
    """No host waits for a device or for another rank, except inside operations of the CPU engine."""

    def refuse(*args, **kwargs):
        raise AssertionError("a host waits")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier"):
            patch.setattr(dist, name, refuse)
        if on_gpu():
            from ep_dispatcher.engines.cuda.engine import CudaEngine

            patch.setattr(CudaEngine, "_wait_for_counts", refuse)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if on_gpu():
                torch.cuda.set_sync_debug_mode("default")


class Microbatch:
    """A forward pass whose backward comes later."""

    def __init__(self, layer, x, run=None):
        self.layer, self.x = layer, x.clone().requires_grad_()
        run = run or (checkpointed(layer) if layer.config.recompute_granularity == "full" else layer)
        self.output = run(self.x)[0]

    def backward(self, may_wait: bool = False) -> dict:
        """Return the output and all gradients of this microbatch alone. may_wait: the host, for a GPU"""
        self.layer.zero_grad()
        loss = (self.output * random(*self.output.shape, seed=7)).sum()
        with contextlib.nullcontext() if may_wait else no_waits():
            loss.backward()
        return {"output": self.output.detach(), "input gradient": self.x.grad} | grads_of(self.layer)
