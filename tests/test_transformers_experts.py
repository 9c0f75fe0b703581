"""ep_dispatcher.integrations.transformers: every class of experts in the installed transformers that has an EP plan.

The classes are found in the package, so that another release is tested by itself. Each computes a few tokens with its
own eager forward and with the experts divided over two ranks. Outputs and all gradients must agree.
"""

import importlib
import inspect
import pkgutil
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor

WHY = "no transformers 5.24 with accelerate, which .ci/run installs"
transformers = pytest.importorskip("transformers", minversion="5.24", reason=WHY)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers takes the GPU, and its gloo has none")

STYLE = "ep_dispatch_experts"  # of a plan's entry for a module of experts
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 32, 48
MOST_PARAMETERS = 10**6  # of a class whose sizes `make_experts` has made small


def modules_of(package: str, prefix: str) -> list[ModuleType]:
    """The modules of a model whose names begin so."""
    folder = Path(importlib.import_module(package).__file__).parent
    names = sorted(info.name for info in pkgutil.iter_modules([str(folder)]) if info.name.startswith(prefix))
    return [importlib.import_module(f"{package}.{name}") for name in names]


def classes_of(module: ModuleType, base: type) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, base)
    ]


def takes_a_routing(owner: type) -> bool:
    """Whether a module's forward takes what a plan gives to experts: hidden states, indices and weights."""
    names = list(inspect.signature(owner.forward).parameters)[1:]
    return len(names) == 3 and names[0] == "hidden_states" and "ind" in names[1] and "weights" in names[2]


def config_classes(package: str) -> list[type[transformers.PreTrainedConfig]]:
    return [c for m in modules_of(package, "configuration_") for c in classes_of(m, transformers.PreTrainedConfig)]


def find_experts() -> dict[str, list[tuple[str, str]]]:
    """For each model with an EP plan and code of its own: module and name of its classes of experts."""
    found = {}
    for info in pkgutil.iter_modules(transformers.models.__path__):
        package = f"transformers.models.{info.name}"
        if any(STYLE in (c.base_model_ep_plan or {}).values() for c in config_classes(package)):
            modules = modules_of(package, "modeling_")
            classes = [c for m in modules for c in classes_of(m, nn.Module) if takes_a_routing(c)]
            if modules:  # without any, it is a configuration for the code of another model
                found[info.name] = [(c.__module__, c.__name__) for c in classes]
    return found


def build(owner: type, config: transformers.PreTrainedConfig) -> nn.Module:
    """A module of experts. The intermediate size of Ernie 4.5 VL is an argument beside the configuration."""
    names = list(inspect.signature(owner.__init__).parameters)[2:]
    return owner(config, **{name: INTERMEDIATE for name in names if name == "intermediate_size"})


def configs_of(module: str, owner: type) -> list[tuple[transformers.PreTrainedConfig, dict[str, str]]]:
    """The configurations with an EP plan that a class of experts takes, made small, and the part of the plan for it."""
    found, why = [], {}
    for config_class in config_classes(module.rpartition(".")[0]):
        plan = config_class.base_model_ep_plan or {}
        prefixes = [name for name, style in plan.items() if style == STYLE]
        if not prefixes:
            continue
        config = config_class()
        for name, value in list(vars(config).items()):
            if value is None or type(value) is int:
                if name.endswith("experts") and "shared" not in name:
                    setattr(config, name, NUM_EXPERTS)
                elif name.endswith(("intermediate_size", "ffn_hidden_size")):
                    setattr(config, name, INTERMEDIATE)
                elif name.endswith(("hidden_size", "latent_size")):
                    setattr(config, name, HIDDEN)
        try:
            with torch.device("meta"):
                num_parameters = sum(p.numel() for p in build(owner, config).parameters())
        except Exception as error:  # it is not for this class
            why[config_class.__name__] = repr(error)
            continue
        assert num_parameters < MOST_PARAMETERS, (
            f"{owner.__name__} is large: this function knows too few names of sizes"
        )
        inner = {
            f"experts{name.removeprefix(prefixes[0])}": style
            for name, style in plan.items()
            if name.startswith(prefixes[0])
        }
        found.append((config, inner))
    assert found, f"{owner.__name__} takes no configuration of its package that has an EP plan: {why}"
    return found


def make_experts(owner: type, config: transformers.PreTrainedConfig, implementation: str) -> nn.Module:
    config._experts_implementation = implementation
    experts, generator = build(owner, config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return experts


def run(
    forward, hidden: Tensor, indices: Tensor, weights: Tensor, out_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output for some tokens, and the gradients of their hidden states and weights."""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    y = forward(hidden, indices, weights)
    y.backward(out_gradient)
    return y.detach(), hidden.grad, weights.grad


def close(name: str, a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")


def compare(rank: int, owner: type, config, plan: dict[str, str], implementation: str, indices: Tensor) -> None:
    """Compare experts that are divided over the ranks with those that are not. indices: of all ranks together."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    num_tokens, num_ranks = indices.shape[0], dist.get_world_size()
    whole = make_experts(owner, config, "eager")
    generator = torch.Generator().manual_seed(1)
    hidden, out_gradient = torch.randn(2, num_tokens, HIDDEN, generator=generator)
    weights = torch.rand(num_tokens, indices.shape[1], generator=generator)
    expected = run(whole, hidden, indices, weights, out_gradient)

    model = nn.Module()
    model.experts = make_experts(owner, config, implementation)
    mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "ep_dispatcher")
    cut = num_tokens // 4  # ranks have different numbers of tokens
    mine = slice(0, cut) if rank == 0 else slice(cut, num_tokens)
    seen = run(model.experts, hidden[mine], indices[mine], weights[mine], out_gradient[mine])

    for name, a, b in zip(("output", "hidden states", "routing weights"), seen, expected):
        close(name, a, b[mine])
    # What all experts share, such as a norm, has an entry of its own in the plan, which sums its gradient over ranks.
    for (name, parameter), (_, whole_parameter) in zip(model.experts.named_parameters(), whole.named_parameters()):
        gradient, wanted = parameter.grad, whole_parameter.grad
        if isinstance(gradient, DTensor):  # of this rank's experts
            gradient, wanted = gradient.to_local(), wanted.chunk(num_ranks)[rank]
        close(name, gradient, wanted)


def compare_all(rank: int, classes: list[tuple[str, str]]) -> dict[str, str]:
    """Compare each class with both implementations of experts. Return the errors."""
    from ep_dispatcher.integrations.transformers import register

    register()
    transformers.logging.set_verbosity_error()
    generator, errors = torch.Generator().manual_seed(2), {}
    routings = {
        "a router": torch.rand(24, NUM_EXPERTS, generator=generator).topk(TOP_K).indices,
        "repeated experts": torch.randint(0, NUM_EXPERTS, (24, TOP_K), generator=generator),
        # As a hash router of DeepSeek-V4 that is made from a configuration. One rank gets no rows.
        "expert 0 alone": torch.zeros(24, TOP_K, dtype=torch.int64),
    }
    for module, name in classes:
        owner = getattr(importlib.import_module(module), name)
        for config, plan in configs_of(module, owner):
            for implementation in ("grouped_mm", "eager"):
                for routing, indices in routings.items():
                    try:
                        compare(rank, owner, config, plan, implementation, indices)
                    except Exception:
                        errors[f"{name}, {type(config).__name__}, {implementation}, {routing}"] = traceback.format_exc()
    return errors


def test_every_class_of_experts_is_found():
    found = find_experts()
    assert [model for model, classes in found.items() if not classes] == []
    assert sum(map(len, found.values())) >= 68


FEW = (
    "qwen3_moe",
    "gpt_oss",
    "nemotron_h",
    "muse_spark",
    "hy_v4",
    "hy_v4_vl",
    "glm5_next",
    "minimax_m3_vl",
    "deepseek_v4",
)


@pytest.mark.parametrize("models", [FEW, exhaustive(None)])
def test_experts_compute_as_their_own_eager_forward_does(pools, models):
    """HYV4, GLM-5-Next and MiniMax-M3 have no act_fn, and failed. Experts that a token has twice were refused."""
    found = find_experts()
    classes = [one for model in models or found for one in found[model]]
    for errors in pools(2).run(compare_all, classes, timeout_s=180):
        assert errors == {}, "\n".join(f"{case}\n{text}" for case, text in errors.items())
