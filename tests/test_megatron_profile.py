"""The profile of one MoE layer: which step gets which time."""

from types import SimpleNamespace

import torch
from lib.megatron_layer import device, make_config, make_layer, on_ranks
from torch.autograd import DeviceType

from ep_dispatcher.tools.parity import profile
from ep_dispatcher.tools.parity.profile import PREFIX, Times


def event(name: str, start: float, end: float, kernels: tuple[float, ...] = (), on: str = "CPU"):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        kernels=[SimpleNamespace(duration=d) for d in kernels],
        device_type=getattr(DeviceType, on),
    )


def test_each_time_goes_to_the_step_that_it_belongs_to():
    one_pass = [
        event(PREFIX + "whole", 0, 100),
        event(PREFIX + "rest of forward", 0, 50),
        event(PREFIX + "router", 5, 15),
        event("aten::mm", 6, 7, (4.0,)),
        event(PREFIX + "token_dispatch", 20, 40),
        event("ep_dispatcher.dispatch.launch", 21, 22, (20.0,)),
        event("ep_dispatcher.dispatch.wait for counts", 22, 30),
        event(PREFIX + "backward", 50, 80),
        event("aten::mm", 60, 61, (5.0, 6.0)),  # in the thread of autograd
        event("cudaDeviceSynchronize", 80, 99),  # of the profile itself
        event("aten::add", 45, 46, (1.0,)),
        # On the device: annotations are no work; two kernels overlap; the last one ends after the pass.
        event(PREFIX + "router", 10, 95, on="CUDA"),
        event("mm", 10, 14, on="CUDA"),
        event("dispatch_kernel", 30, 50, on="CUDA"),
        event("add", 45, 46, on="CUDA"),
        event("mm", 90, 101, on="CUDA"),
    ]
    found = profile.summarize(one_pass, 1)
    assert found.steps["router"] == Times(host=10, waits=0, kernels=4)
    assert found.steps["token_dispatch"] == Times(host=20, waits=8, kernels=20)
    assert found.steps["rest of forward"] == Times(host=20, waits=0, kernels=1)
    assert found.steps["backward"] == Times(host=30, waits=0, kernels=11)
    assert found.steps["whole"] == Times(host=100, waits=8, kernels=36)
    assert found.steps["experts"] == Times()
    assert found.idle == 10 + 16 + 40
    assert profile.summarize([*one_pass, *one_pass], 2).steps == found.steps
    # A recompute runs the router again, in the backward.
    again = profile.summarize([*one_pass, event(PREFIX + "router", 55, 58)], 1)
    assert again.steps["router"].host == 13 and again.steps["rest of forward"] == found.steps["rest of forward"]
    shown = profile.table({"alltoall": found, "ep_dispatcher": found})
    assert "token_dispatch" in shown and "the device ran nothing for 66 us with alltoall" in shown


@on_ranks()
def test_a_layer_is_profiled(rank: int):
    for name in ("ep_dispatcher", "alltoall"):
        layer = make_layer(make_config(name))
        x = torch.randn(12, 2, layer.config.hidden_size, device=device(), requires_grad=True)
        own = type(layer.token_dispatcher).token_dispatch

        def forward(layer=layer, x=x):
            return layer(x)[0]

        forward().sum().backward()
        steps = profile.profile_layer(layer, forward, lambda out: out.sum().backward(), 2).steps
        assert "forward" not in vars(layer.router) and layer.token_dispatcher.token_dispatch.__func__ is own
        whole = steps.pop("whole")
        assert all(0 < times.host < whole.host for times in steps.values()), steps
        assert whole.host > sum(times.host for times in steps.values()) * 0.99
