"""Layers of Megatron as a CUDA graph captures them."""

import torch

from lib.megatron_experts import GROUPED, make_grouped_layer
from lib.megatron_layer import (
    make_config,
    with_graphs,
)


class Output(torch.nn.Module):
    """A layer whose only output is a tensor, as graphs of PyTorch want it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def make_bfloat16_layer(in_graphs: bool):
    config = make_config(bf16=True, params_dtype=torch.bfloat16, **GROUPED)
    config.gradient_accumulation_fusion = True
    layer = make_grouped_layer(with_graphs(config) if in_graphs else config)
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    forget_grads(layer)
    return layer


def forget_grads(layer) -> None:
    for parameter in layer.experts.parameters():
        parameter.main_grad.zero_()
    # A tensor of its own: without one autograd would keep the memory of a graph, which the next replay writes.
    layer.router.weight.grad = torch.zeros_like(layer.router.weight)


def take_grads(layer) -> dict[str, torch.Tensor]:
    assert all(p.grad is None for p in layer.experts.parameters())
    found = {name: p.main_grad.clone() for name, p in layer.experts.named_parameters()}
    found["router"] = layer.router.weight.grad
    forget_grads(layer)
    return found
