"""A MoELayer under torch.compile, from its first pass on, which makes buffers and lets ranks agree; and its errors."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive
from lib.megatron_layer import (
    Layout,
    assert_same_bits,
    grads_of,
    make_config,
    make_layer,
    on_ranks,
    step,
    tokens_of,
    use_layout,
)

from ep_dispatcher import gather
from ep_dispatcher.integrations.megatron.dispatcher import buffers

COMPILE_S = 300


@pytest.mark.parametrize(
    "settings,lengths", [exhaustive({}, (8, 8)), (dict(variable_seq_lengths=True), (8, 5))], ids=str
)
@on_ranks(timeout_s=COMPILE_S)
def test_a_compiled_layer_gives_the_same_bits(rank: int, monkeypatch, settings: dict, lengths: tuple):
    """Outputs and gradients of two steps."""
    monkeypatch.setenv("EP_DISPATCHER_TIMEOUT_S", str(COMPILE_S))
    results = []
    with torch.compiler.set_stance("default"):
        for is_compiled in (False, True):
            torch._dynamo.reset()
            use_layout(Layout(ep=2))  # with new buffers
            layer = make_layer(make_config(**settings))
            run = torch.compile(layer, backend="aot_eager") if is_compiled else layer
            steps = [step(run, tokens_of(rank, number, lengths[rank])) for number in range(2)]
            results.append((*steps, grads_of(layer)))
    for eager, compiled in zip(*results):
        assert_same_bits(compiled, eager)


@pytest.mark.parametrize("cause", [None, RuntimeError("not implemented")], ids=str)
def test_only_a_late_rank_keeps_others_from_a_larger_buffer(monkeypatch, cause):
    """Any other failure of the store keeps its text: healthy ranks were blamed for it."""

    class Store(dist.HashStore):
        def check(self, *args):
            if cause is not None:
                raise cause
            return super().check(*args)

    store = Store()
    monkeypatch.setattr(gather, "connection", lambda: store)
    monkeypatch.setattr(gather, "drop_connection", lambda: None)
    monkeypatch.setattr(gather, "PrefixStore", lambda prefix, connection: connection)
    monkeypatch.setenv("EP_DISPATCHER_TIMEOUT_S", "1")
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    config = SimpleNamespace(max_tokens_per_rank=8)
    buffer = SimpleNamespace(id="id", config=config, growth=gather.History("ep_dispatcher/grow/id"))
    expected = "at most 8 on rank 1" if cause is None else str(cause)
    with pytest.raises(ValueError if cause is None else RuntimeError, match=expected):
        buffers._agree_to_grow(group, buffer, 9)
