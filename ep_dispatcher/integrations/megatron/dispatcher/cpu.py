"""What Megatron needs to run its MoE layers on a machine without a GPU. For tests, examples and the parity tool."""

from __future__ import annotations

import contextlib
import functools

import torch


def _nothing(*args, **kwargs):
    pass


class _Now:
    """Stands for a CUDA stream and for an event: on a CPU everything is complete when a call returns."""

    __init__ = wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event=None):
        return self


def let_megatron_run_on_cpu() -> None:
    """Replace, for good in this process, what Megatron-core takes from CUDA without asking. Not where there is a GPU.

    It is enough for layers and models, and for a loop of one's own around them. Megatron's training loop and its
    schedules are not covered: they make tensors with device="cuda".

    torch.cuda.current_device            the router and the all-to-all buffers make their tensors there
    torch.cuda.Stream, Event, ...        MoEAlltoAllTokenDispatcher and SharedExpertMLP with overlap; the 1F1B schedule
    Tensor.record_stream, nvtx ranges    the 1F1B schedule
    moe_utils.te_general_gemm            0.16 uses the name also where Transformer Engine is missing
    token_dispatcher.maybe_move_tensor_to_cpu  all-to-all splits have to be integers, and stay tensors on a CPU
    random._get/_set_cuda_rng_state      activation recompute saves the state of the CUDA generator
    CudaRNGStatesTracker.fork            dropout of attention forks it
    """
    if torch.cuda.is_available():
        raise RuntimeError("let_megatron_run_on_cpu() is for machines without a GPU, and this one has a GPU")
    if getattr(torch.cuda, "Stream", None) is _Now:
        return  # it was done
    replace = functools.partial(setattr, torch.cuda)  # with other types than torch.cuda has
    replace("current_device", lambda: torch.device("cpu"))
    replace("Stream", _Now)
    replace("Event", _Now)
    now = _Now()
    replace("current_stream", lambda device=None: now)
    replace("stream", lambda stream: contextlib.nullcontext())
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]  # there are no streams
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing

    import megatron.core.tensor_parallel.random as rng
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_cpu(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8, device="cpu")
    rng._set_cuda_rng_state = _nothing
    rng.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
