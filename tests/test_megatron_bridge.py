"""Megatron-Bridge: recipes that name this dispatcher, whatever the backends that its functions know."""

import argparse
import contextlib
import importlib
import sys
import types
from functools import partial
from pathlib import Path

import pytest
from lib.megatron_layer import OURS, make_config, on_ranks

from ep_dispatcher.integrations.megatron import register, unregister

BRIDGE = "megatron.bridge.training.flex_dispatcher_backend"


# Megatron-Bridge up to 0.6: names that it does not know are skipped with a warning.
OF_BRIDGE = """
def apply_flex_dispatcher_backend(model_config, moe_flex_dispatcher_backend=None):
    model_config.seen = moe_flex_dispatcher_backend

def validate_flex_dispatcher_backend(model_config):
    model_config.validated = True
"""
# 0.7, by its documentation: names that it does not know are refused, here and there, also for a model without experts.
OF_BRIDGE_7 = """
KNOWN = ("deepep", "hybridep", "ncclep")

def apply_flex_dispatcher_backend(model_config, moe_flex_dispatcher_backend=None):
    if moe_flex_dispatcher_backend not in (None, *KNOWN):
        raise ValueError("not a backend of Megatron-Bridge")
    model_config.seen = moe_flex_dispatcher_backend

def validate_flex_dispatcher_backend(model_config):
    if model_config.moe_token_dispatcher_type == "flex" and model_config.moe_flex_dispatcher_backend not in KNOWN:
        raise ValueError("not a backend of Megatron-Bridge")
    model_config.validated = True
"""
RECIPE = f"from {BRIDGE} import apply_flex_dispatcher_backend"
CONFIG = f"from {BRIDGE} import validate_flex_dispatcher_backend"


@pytest.fixture
def bridge_folder(request, tmp_path) -> Path:
    """A folder with the functions of Megatron-Bridge that count here, and modules that import them by name."""
    folder = tmp_path.joinpath(*BRIDGE.split("."))
    folder.parent.mkdir(parents=True)
    folder.with_suffix(".py").write_text(getattr(request, "param", OF_BRIDGE))
    (folder.parent / "recipe.py").write_text(RECIPE)
    (folder.parent / "config.py").write_text(CONFIG)
    return tmp_path


@contextlib.contextmanager
def bridge_in(folder: Path):
    """Yield what imports the recipe, before ours is registered. Afterwards nothing of Megatron-Bridge is left."""
    unregister()
    finders = list(sys.meta_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield lambda name="recipe": importlib.import_module(f"megatron.bridge.training.{name}")
        finally:
            unregister()
            for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
                del sys.modules[name]
            sys.modules["megatron"].__dict__.pop("bridge", None)
    assert sys.meta_path == finders


def model_of_bridge(num_moe_experts: int | None = 8, **fields) -> types.SimpleNamespace:
    dispatcher = dict(moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None)
    return types.SimpleNamespace(num_moe_experts=num_moe_experts, moe_shared_expert_overlap=True, **dispatcher | fields)


@pytest.mark.parametrize(
    "bridge_folder, refuses", [(OF_BRIDGE, False), (OF_BRIDGE_7, True)], indirect=["bridge_folder"]
)
@on_ranks()
def test_megatron_bridge_takes_our_name(rank: int, bridge_folder: Path, refuses: bool):
    """Up to 0.6 our name was skipped, by 0.7 it is refused when the fields are validated, however they were set."""

    def applied(module, name: str, **fields) -> dict:
        config = model_of_bridge(**fields)
        module.apply_flex_dispatcher_backend(config, name)
        return vars(config)

    def validate_of(module):
        return module.validate_flex_dispatcher_backend

    untouched = vars(model_of_bridge())
    ours = untouched | dict(moe_flex_dispatcher_backend=OURS, moe_token_dispatcher_type="flex")
    by_hand = model_of_bridge(moe_flex_dispatcher_backend=OURS, moe_token_dispatcher_type="flex")
    assert "bridge" not in str(register())
    with bridge_in(bridge_folder) as import_module:
        text = str(register())
        assert "apply_flex_dispatcher_backend" in text and "validate_flex_dispatcher_backend" in text
        assert BRIDGE not in sys.modules
        recipe, config = import_module(), import_module("config")
        module = sys.modules[BRIDGE]
        for _ in range(2):  # imported after register(), and before it
            assert applied(recipe, OURS) == applied(module, OURS) == ours
            assert applied(recipe, "deepep") == untouched | dict(seen="deepep")
            assert applied(recipe, OURS, num_moe_experts=None) == vars(model_of_bridge(None))
            for validate in (validate_of(config), validate_of(module)):
                assert validate(by_hand) is None and not hasattr(by_hand, "validated")
                other = model_of_bridge(moe_flex_dispatcher_backend="deepep", moe_token_dispatcher_type="flex")
                validate(other)
                assert other.validated
            unregister()
            if refuses:
                for refusing in (partial(applied, recipe, OURS), partial(validate_of(config), by_hand)):
                    with pytest.raises(ValueError, match="not a backend of Megatron-Bridge"):
                        refusing()
            else:
                assert applied(recipe, OURS) == applied(module, OURS) == untouched | dict(seen=OURS)
            register()


OTHER = "def apply_flex_dispatcher_backend(config, name): return config"
NONE = "apply_flex_dispatcher_backend = validate_flex_dispatcher_backend = None"


@pytest.mark.parametrize("bridge_folder, has_one", [(OTHER, True), (NONE, False)], indirect=["bridge_folder"])
@on_ranks()
def test_another_megatron_bridge_is_left_alone(rank: int, bridge_folder: Path, has_one: bool):
    """One with another function keeps it, except that our name is an error that says what to do."""
    with bridge_in(bridge_folder) as import_recipe:
        register()
        function = import_recipe().apply_flex_dispatcher_backend
        assert (function is not None) is has_one
        if has_one:
            assert function(1, "deepep") == 1
            with pytest.raises(ValueError, match=f'moe_flex_dispatcher_backend = "{OURS}" in the recipe'):
                function(1, name=OURS)


@on_ranks()
def test_a_script_of_megatron_bridge_that_ignores_our_name_ends(rank: int, bridge_folder: Path):
    """It takes our name from its command line, and gives it to no model."""
    with bridge_in(bridge_folder) as import_recipe:
        register()
        import_recipe()
        parser = argparse.ArgumentParser()
        parser.add_argument("--moe_flex_dispatcher_backend", choices=["deepep", "hybridep", None])
        parser.parse_args(["--moe_flex_dispatcher_backend", OURS])
        make_config()  # it has our name
        make_config("alltoall", num_moe_experts=None, expert_model_parallel_size=1)
        with pytest.raises(ValueError, match=f"model.moe_flex_dispatcher_backend={OURS} to its overrides"):
            make_config("alltoall")
