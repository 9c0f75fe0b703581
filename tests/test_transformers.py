"""ep_dispatcher.integrations.transformers: models of transformers with this implementation and with its all_to_all."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import HANG_S, exhaustive, launched_operations, planned_dispatches
from lib.commands import ROOT, torchrun
from lib.in_use import lines_in_use

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankError, RankPool

WHY = "no transformers 5.24 with accelerate, which .ci/run installs"
transformers = pytest.importorskip("transformers", minversion="5.24", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers takes the GPU, and its gloo has none")

LAYERS, TOP_K = 2, 3
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts_per_tok=TOP_K,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = dict(
    qwen3_moe=lambda experts: transformers.Qwen3MoeConfig(**SIZES, num_experts=experts, moe_intermediate_size=48),
    mixtral=lambda experts: transformers.MixtralConfig(**SIZES, num_local_experts=experts),
    gpt_oss=lambda experts: transformers.GptOssConfig(
        **SIZES, num_local_experts=experts, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
)
# Layouts by which ranks have tokens of their own: all, two groups, none.
BATCHES, BOTH, COPIES = dict(fsdp_size=4), dict(fsdp_size=2, tp_size=2), dict(tp_size=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(name, num_experts)`` is a folder with a model of random weights."""

    def save(name: str, num_experts: int = 8):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name](num_experts))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
        return folder

    return save


def load(folder, implementation: str, layout: dict, dtype: torch.dtype, **options):
    from transformers.distributed import DistributedConfig

    from ep_dispatcher.integrations.transformers import register

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register()
    parallel = DistributedConfig(**{"ep_size": 4, **layout}, ep_implementation=implementation)
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    return load_model(folder, distributed_config=parallel, dtype=dtype, **options)


def tokens(rank: int, layout: dict, length: int) -> torch.Tensor:
    """Ranks of a tensor parallel group have the same tokens, the other groups have more of them."""
    batch = rank // layout.get("tp_size", 1)
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, SIZES["vocab_size"], (1, length + batch), generator=generator)


def step(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and all gradients of a step, and what is generated then."""
    out = model.train()(input_ids=ids, labels=ids)
    out.loss.backward()
    seen = {"logits": out.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        seen["generated"] = model.eval().generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return {name: getattr(t, "to_local", lambda t=t: t)() for name, t in seen.items()}


def both(rank: int, folder, layout: dict, dtype: torch.dtype, length: int, options: dict) -> list[str]:
    """Compare a step with this implementation and with all_to_all. Return the operations of this engine."""
    ids = tokens(rank, layout, length)
    expected = step(load(folder, "all_to_all", layout, dtype, **options), ids)
    with launched_operations() as launched:
        seen = step(load(folder, "ep_dispatcher", layout, dtype, **options), ids)
    bound = 1e-5 if dtype == torch.float32 else 0.1
    for name, t in expected.items():
        if name == "generated":
            assert dtype != torch.float32 or torch.equal(seen[name], t)
            continue
        difference = (seen[name] - t).float().norm() / t.float().norm().clamp(min=1e-3)
        assert difference < bound, (name, difference)
    (router,) = [t for name, t in expected.items() if name.endswith(("1.mlp.gate.weight", "1.mlp.router.weight"))]
    assert router.numel() == 0 or router.abs().max() > 1e-5
    return launched


@pytest.mark.parametrize(
    "name, layout, dtype, length, options",
    [
        ("qwen3_moe", BATCHES, torch.float32, 6, {}),
        ("mixtral", BOTH, torch.bfloat16, 6, {}),
        ("gpt_oss", COPIES, torch.float32, 2, {}),  # some ranks have no tokens, and some no rows
        exhaustive("qwen3_moe", COPIES, torch.float32, 6, {}),
        exhaustive("qwen3_moe", BOTH, torch.float32, 2, dict(experts_implementation="eager")),
        exhaustive("mixtral", BATCHES, torch.float32, 6, {}),
        exhaustive("gpt_oss", BATCHES, torch.float32, 2, dict(experts_implementation="batched_mm")),
        exhaustive("gpt_oss", BOTH, torch.bfloat16, 6, {}),
    ],
)
def test_a_step_and_a_generation_are_as_with_all_to_all(pools, saved, name, layout, dtype, length, options):
    for launched in pools(4).run(both, saved(name), layout, dtype, length, options):
        passes = 2 + 4  # forward and backward, and a forward for each of 4 new tokens
        assert launched.count("dispatch") == launched.count("combine") == LAYERS * passes


def kinds(rank: int, folder) -> None:
    """Activation checkpoints, torch.compile and autocast around the layers."""
    ids = tokens(rank, BATCHES, 6)
    expected = step(load(folder, "all_to_all", BATCHES, torch.float32), ids)
    for kind in ("checkpoints", "checkpoints that keep plans", "compile"):
        model = load(folder, "ep_dispatcher", BATCHES, torch.float32)
        if kind == "checkpoints":
            model.activation_checkpointing_enable()
        elif kind == "checkpoints that keep plans":
            model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": ep.recompute_contexts})
        else:
            model.compile(backend="aot_eager")
        with planned_dispatches() as dispatches:
            seen = step(model, ids)
        num_passes = 4 + (2 if kind == "checkpoints" else 1)  # 4: tokens that are generated
        assert dispatches.count("plan") == LAYERS * num_passes, kind
        for name, t in expected.items():
            torch.testing.assert_close(seen[name], t, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_checkpoints_and_compile_change_nothing(pools, saved):
    pools(4).run(kinds, saved("qwen3_moe"))


def first_forward(rank: int, folder, compiles: bool) -> list[str]:
    with lines_in_use() as said:
        model = load(folder, "ep_dispatcher", BATCHES, torch.float32)
        if compiles:
            model.compile(backend="aot_eager")
        model(input_ids=tokens(rank, BATCHES, 6))
    return said


@pytest.mark.parametrize("compiles", [False, exhaustive(True)])
def test_one_line_says_that_it_is_in_use(saved, compiles):
    folder = saved("qwen3_moe")
    with RankPool(4, timeout_s=HANG_S) as pool:  # fresh ranks: buffers of earlier tests would be used again
        (line, *more), *others = pool.run(first_forward, folder, compiles)
    assert more == [] and others == [[]] * 3
    assert "carries the tokens of transformers 5." in line and "First buffer: Buffer(rank 0 of 1 node x 4, " in line


def refused(rank: int, folder, layout: dict, dtype: torch.dtype, limit: str | None) -> None:
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if limit is not None:
            patch.setenv("EP_DISPATCHER_MAX_TOKENS_PER_RANK", limit)
        model = load(folder, "ep_dispatcher", layout, dtype)
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))


@pytest.mark.parametrize(
    "layout, dtype, limit, experts, text",
    [
        (BATCHES, torch.float64, None, 8, "dtype is torch.float64, but has to be "),
        (BATCHES, torch.float32, "4", 8, "5 tokens on rank"),
        (BATCHES, torch.float32, "none", 8, "EP_DISPATCHER_MAX_TOKENS_PER_RANK is 'none', but has to be an integer"),
        (BATCHES, torch.float32, None, 6, "evenly shard 6 experts across 4"),
        (dict(fsdp_size=4, ep_size=3), torch.float32, None, 8, "`ep_size` must divide"),
    ],
)
def test_wrong_settings_are_errors_on_every_rank(pools, saved, layout, dtype, limit, experts, text):
    with pytest.raises(RankError) as error:
        pools(4).run(refused, saved("qwen3_moe", experts), layout, dtype, limit)
    failures = error.value.failures.values()
    assert len(failures) == 4 and all(kind == "ValueError" and text in said for kind, said, _ in failures), error.value


def one_too_many(rank: int, folder) -> tuple[str, str, float]:
    """The error of this rank when rank 1 alone brings more tokens than EP_DISPATCHER_MAX_TOKENS_PER_RANK says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_MAX_TOKENS_PER_RANK", "4")
        model = load(folder, "ep_dispatcher", BATCHES, torch.float32)
        dist.barrier()
        started = time.monotonic()
        try:
            model(input_ids=torch.ones(1, 4 + (rank == 1), dtype=torch.int64))
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def test_a_rank_that_alone_brings_too_many_tokens_says_so_at_once(saved):
    """Its peers waited out their limit of 100 s, and no text named the tokens of that rank to them."""
    with RankPool(4, timeout_s=HANG_S) as pool:
        ranks = pool.run(one_too_many, saved("qwen3_moe"))
    for rank, (kind, text, waited_s) in enumerate(ranks):
        assert kind == ("ValueError" if rank == 1 else "PeerTimeoutError") and waited_s < 20, (rank, kind, text)
        assert ("5 tokens on rank 1" in text) if rank == 1 else ("for rank 1." in text), text


def test_without_the_interface_register_says_what_is_needed(monkeypatch):
    from ep_dispatcher.integrations.transformers import register

    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(ImportError, match="transformers 5.24 is needed"):
        register()


def test_the_example_has_the_losses_of_all_to_all():
    """As docs/transformers.md starts it."""
    seen = []
    for implementation in ("ep_dispatcher", "all_to_all"):
        command = str(ROOT / "examples" / "transformers_moe.py"), "--implementation", implementation
        code, output, errors = torchrun(4, *command)
        assert code == 0, output + errors
        seen.append([float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")])
    assert len(seen[0]) == 10 and seen[0][-1] < seen[0][0] - 0.5
    assert seen[0] == pytest.approx(seen[1], abs=2e-3)
