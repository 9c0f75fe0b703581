"""benchmarks/megatron_shapes: jobs whose layers are those of examples/recipes, and which differ in nothing else."""

import pytest
from lib.commands import ROOT
from test_recipes import NAMES, recipe, value

FOLDER = ROOT / "benchmarks/megatron_shapes"
SHAPES = {path.stem: path.read_text().split() for path in FOLDER.glob("*.txt")}
LAYER = {  # flags of a layer whose values a recipe has too
    *("--hidden-size", "--num-attention-heads", "--num-query-groups", "--kv-channels", "--q-lora-rank"),
    *("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--num-experts"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-router-topk", "--moe-router-num-groups"),
    *("--moe-router-group-topk", "--moe-router-topk-scaling-factor", "--moe-router-score-function"),
    *("--moe-router-load-balancing-type", "--seq-length", "--glu-linear-offset", "--activation-func-clamp-value"),
}
SWITCHES = {
    *("--swiglu", "--quick-geglu", "--squared-relu", "--disable-bias-linear", "--multi-latent-attention"),
    *("--group-query-attention", "--qk-layernorm", "--add-qkv-bias", "--moe-router-enable-expert-bias"),
    *("--moe-router-pre-softmax", "--moe-router-fusion", "--moe-grouped-gemm", "--moe-permute-fusion"),
    "--no-bias-dropout-fusion",
}


def layer_of(arguments: list[str]) -> dict[str, str | None]:
    """Return the flags that make a layer, with their values."""
    values = {flag: after for flag, after in zip(arguments, arguments[1:]) if flag in LAYER}
    return values | dict.fromkeys(SWITCHES.intersection(arguments))


@pytest.mark.parametrize("name", sorted(set(SHAPES) & set(NAMES)))
def test_its_layer_is_that_of_the_recipe(name):
    assert layer_of(SHAPES[name]) == layer_of(recipe(name))


@pytest.mark.parametrize("arguments", [*map(recipe, NAMES), *SHAPES.values()], ids=[*NAMES, *SHAPES])
def test_megatron_builds_its_experts(arguments):
    """TEGroupedMLP refuses biases with the fusion of bias and dropout, which is on by default."""
    assert {"--disable-bias-linear", "--no-bias-dropout-fusion"} & set(arguments)


def test_nemotron_has_the_experts_of_its_model():
    """Nearly all of the 31.6 billion parameters are in the experts of 23 layers, which have no gate."""
    a = SHAPES["nemotron_3_nano"]
    features = value(a, "--num-experts") * value(a, "--moe-ffn-hidden-size")
    features += value(a, "--moe-shared-expert-intermediate-size")
    assert 0.93 < 23 * 2 * value(a, "--hidden-size") * features / 31.6e9 < 0.97


def test_they_train_alike():
    """All but the model is the same, and no dispatcher is chosen."""
    training = {tuple(arguments[arguments.index("--seq-length") :]) for arguments in SHAPES.values()}
    assert len(training) == 1 and len(SHAPES) == 4
    assert not any("dispatcher" in word for arguments in SHAPES.values() for word in arguments)
    for arguments in SHAPES.values():
        flags = [word for word in arguments if word.startswith("--")]
        assert len(flags) == len(set(flags)), "no flag twice"
