"""examples/pytorch_moe.py: FSDP2, mixed precision, torch.compile and checkpoints around ep.moe_mlp; and DDP."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import launched_operations, long
from lib.commands import ROOT, torchrun
from lib.experts import swiglu_experts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_dispatcher as ep

NUM_STEPS = 4
COMPILE_S = 300  # of a run that compiles, on a busy machine


def example():
    """The program, as a module."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    return importlib.import_module("pytorch_moe")


def all_experts(experts: nn.Module):
    """`Experts.run` with all experts in one process, without a dispatcher."""

    def run(x, topk_idx, topk_weights):
        chosen = swiglu_experts(x, experts.w1, experts.w2).gather(1, topk_idx[:, :, None].expand(-1, -1, x.shape[1]))
        return (chosen * topk_weights[:, :, None]).sum(1)

    return run


def dense_model() -> nn.Sequential:
    buffer = SimpleNamespace(num_local_experts=example().NUM_EXPERTS, rank=0)
    model = example().make_model(buffer, checkpoints=False)
    for block in model[:-1]:
        block.experts.run = all_experts(block.experts)
    return model


def mean_loss(model: nn.Module, num_ranks: int, step: int) -> tuple[torch.Tensor, list[float]]:
    """The mean of all ranks' losses, and each of them."""
    losses = []
    for rank in range(num_ranks):
        x, target = example().data(rank, step, "cpu")
        losses.append(F.mse_loss(model(x), target))
    return sum(losses) / num_ranks, [loss.item() for loss in losses]


def dense_steps(num_ranks: int) -> list[tuple[list[float], float]]:
    """The losses of all ranks, and the norm of the gradients, in each step of one process that has all."""
    model = dense_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(NUM_STEPS):
        loss, losses = mean_loss(model, num_ranks, step)
        loss.backward()
        seen.append((losses, nn.utils.clip_grad_norm_(model.parameters(), example().MAX_NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def run(rank: int, options: dict) -> tuple[list[tuple[float, float]], list[str]]:
    """The losses and norms of a rank, and the operations that have run."""
    torch._dynamo.reset()
    with launched_operations() as launched:
        return example().train(NUM_STEPS, "cpu", **options), launched


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_fsdp2_trains_as_one_process_does(pools, replicas):
    """Losses, and the norm of all gradients: those of experts are means over all ranks, and each is counted once.

    With one replica FSDP2 divided the gradients of experts twice.
    """
    options = dict(precision="float32", compiles=False, checkpoints=False)
    ranks = pools(4).run(run, options | {"replicas": replicas})
    for step, (losses, norm) in enumerate(dense_steps(4)):
        for rank, (seen, _) in enumerate(ranks):
            assert seen[step] == pytest.approx((losses[rank], norm), rel=1e-3), (step, rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["policy", "autocast"])
def test_compile_and_checkpoints_change_no_bit_and_move_nothing(pools, precision):
    plain = dict(precision=precision, compiles=False, checkpoints=False)
    compiled = dict(precision=precision, compiles=True, checkpoints=True, backend="aot_eager")
    expected, *seen = (
        pools(4).run(run, options, timeout_s=COMPILE_S) for options in (plain, plain | {"checkpoints": True}, compiled)
    )
    for ranks in seen:
        assert [losses for losses, _ in ranks] == [losses for losses, _ in expected]
        assert [sorted(launched) for _, launched in ranks] == [sorted(launched) for _, launched in expected]
    (_, launched), *_ = expected
    assert len(launched) == NUM_STEPS * example().NUM_LAYERS * 4  # each operation, forward and backward


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["--precision autocast --no-compile", long("")])
def test_it_runs_as_a_user_starts_it(options, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, output, errors = torchrun(4, str(ROOT / "examples" / "pytorch_moe.py"), *options.split(), timeout_s=COMPILE_S)
    assert code == 0, output + errors
    losses = [float(line.split()[3].rstrip(",")) for line in output.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < losses[0] / 2


@pytest.mark.exhaustive
def test_the_blocks_of_the_page_run_as_one_program(tmp_path, monkeypatch):
    """A block without an import, or with a name that no block before it has made."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = (ROOT / "docs" / "pytorch.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    code, output, errors = torchrun(4, str(program), timeout_s=COMPILE_S)
    assert code == 0, errors
    assert "ep_dispatcher.dispatch." in output, "the profiler shows no step of an operation"


def ddp_gradients(rank: int) -> dict[str, torch.Tensor]:
    """The gradients of one step with DDP for the dense parameters, as docs/pytorch.md has it."""
    moe = example()
    sizes = dict(hidden=moe.HIDDEN, num_experts=moe.NUM_EXPERTS, num_topk=moe.NUM_TOPK)
    with ep.Buffer(**sizes, max_tokens_per_rank=moe.NUM_TOKENS, dtype=torch.float32, engine="cpu") as buffer:
        model = moe.make_model(buffer, checkpoints=False)
        experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        x, target = moe.data(rank, 0, "cpu")
        parallel = DistributedDataParallel(model)  # it sums gradients as long as it lives
        F.mse_loss(parallel(x), target).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_ddp_leaves_experts_alone(pools):
    ranks, model = pools(2).run(ddp_gradients), dense_model()
    mean_loss(model, 2, 0)[0].backward()
    for name, p in model.named_parameters():
        parts = [grads[name] for grads in ranks]
        seen = [torch.cat(parts)] if ".experts." in name else parts
        for grad in seen:
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-6)
