"""examples/recipes: each has the shapes of its model, fits its nodes, and needs the memory that the page says."""

import re
import subprocess

import pytest
from lib.commands import ROOT

import ep_dispatcher as ep

FOLDER = ROOT / "examples/recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.sh"))
# Billions of parameters as the models' authors give them: all (without layers for more than one token), and of a token.
PUBLISHED = {"deepseek_v3": (671, 37), "gpt_oss_120b": (117, 5.1), "kimi_k2": (1040, 32), "qwen3_235b": (235, 22)}


def recipe(name: str) -> list[str]:
    command = f'set -eu; source {FOLDER / name}.sh; printf "%s\\n" "${{RECIPE[@]}}"'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()


def value(arguments: list[str], flag: str, default: int | None = None) -> int:
    if flag not in arguments:
        assert default is not None, flag
        return default
    return int(arguments[arguments.index(flag) + 1])


def attention_parameters(a: list[str]) -> int:
    hidden, heads = value(a, "--hidden-size"), value(a, "--num-attention-heads")
    if "--multi-latent-attention" not in a:
        channels, groups = value(a, "--kv-channels"), value(a, "--num-query-groups")
        return hidden * channels * 2 * (heads + groups)
    q, kv, rope = (value(a, f"--{name}") for name in ("q-lora-rank", "kv-lora-rank", "qk-pos-emb-head-dim"))
    head, v = value(a, "--qk-head-dim"), value(a, "--v-head-dim")
    down = hidden * (q + kv + rope)
    return down + heads * (q * (head + rope) + kv * (head + v) + v * hidden)


def moe_layers(a: list[str]) -> list[int]:
    """1 for each layer with experts, 0 for a dense one."""
    if "--moe-layer-freq" not in a:
        return [1] * value(a, "--num-layers")
    dense, moe = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)", a[a.index("--moe-layer-freq") + 1]).groups()
    return [0] * int(dense) + [1] * int(moe)


def billions_of_parameters(a: list[str]) -> tuple[float, float]:
    """All of them, and those that one token meets. Norms and biases are left out."""
    hidden, layers = value(a, "--hidden-size"), moe_layers(a)
    assert len(layers) == value(a, "--num-layers")
    matrix = 3 * hidden  # of a gated MLP, for each intermediate feature
    common = len(layers) * attention_parameters(a) + 2 * hidden * value(a, "--vocab-size")
    common += layers.count(0) * matrix * value(a, "--ffn-hidden-size")
    shared = matrix * value(a, "--moe-shared-expert-intermediate-size", 0)
    common += layers.count(1) * (shared + hidden * value(a, "--num-experts"))
    expert = layers.count(1) * matrix * value(a, "--moe-ffn-hidden-size")
    return (
        (common + value(a, "--num-experts") * expert) / 1e9,
        (common + value(a, "--moe-router-topk") * expert) / 1e9,
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_shapes_of_its_model(name):
    a = recipe(name)
    assert {"--swiglu", "--quick-geglu"} & set(a), "a gate"
    # A token's share is given without or with the embedding, by author.
    embedding = value(a, "--hidden-size") * value(a, "--vocab-size") / 1e9
    seen, (all_of_them, of_a_token) = billions_of_parameters(a), PUBLISHED[name]
    assert seen[0] == pytest.approx(all_of_them, rel=0.02)
    assert of_a_token - 0.03 * of_a_token <= seen[1] <= 1.03 * of_a_token + embedding


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_its_parallelism_and_memory(name):
    a, page = recipe(name), (ROOT / "docs/recipes.md").read_text()
    tp, pp, ep_size = (value(a, f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline", "expert"))
    tokens = value(a, "--seq-length") * value(a, "--micro-batch-size") // tp
    assert tp == 1 or "--sequence-parallel" in a
    memory = ep.buffer_bytes(
        num_ranks=ep_size,
        ranks_per_node=8,
        hidden=value(a, "--hidden-size"),
        num_experts=value(a, "--num-experts"),
        num_topk=value(a, "--moe-router-topk"),
        max_tokens_per_rank=tokens,
    )
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
    nodes = int(row.split("|")[2])
    assert nodes * 8 % (pp * ep_size) == 0 and nodes * 8 % (tp * pp) == 0
    mib = f"{memory.total / 2**20:.0f} MiB"
    assert row == f"| `{name}` | {nodes} | {tp}, {pp}, {ep_size} | {max(1, ep_size // 8)} | {tokens} | {mib} |"
    assert f"{nodes} nodes of 8" in (FOLDER / f"{name}.sh").read_text().splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_its_layers_fill_the_pipeline(name):
    a = recipe(name)
    stages, layers = value(a, "--pipeline-model-parallel-size"), value(a, "--num-layers")
    if "--pipeline-model-parallel-layout" in a:
        layout = a[a.index("--pipeline-model-parallel-layout") + 1]
        layout = re.sub(r"\(([^)]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
        assert layout.count("t") == layers and (layout.count("|") + 1) % stages == 0
    else:
        counted = layers + sum(f"--account-for-{what}-in-pipeline-split" in a for what in ("embedding", "loss"))
        assert counted % (stages * value(a, "--num-virtual-stages-per-pipeline-rank", 1)) == 0
