"""The parity tool: its verdict and exit codes, what it shows, and that it finds a dispatcher that is wrong."""

import contextlib
import io
import json
import os
import subprocess
import sys
import types

import pytest
import torch
from conftest import exhaustive, sparsely
from lib.commands import run_module, torchrun
from lib.megatron_layer import end_groups, leave_layout, megatron_pool, on_gpu, plain_latent_projections

from ep_dispatcher.tools.testing import RankPool

MODULE = "ep_dispatcher.integrations.megatron.parity"
EXPERTS = ["gradient of experts.*.linear_fc1.weight", "gradient of experts.*.linear_fc2.weight"]
SAME = "the same within rounding: ep_dispatcher and "
NOT_AS_GIVEN = " This is not the layer as given: see {} point(s) above, after 'Not as given'."
FUSED = NOT_AS_GIVEN.format(1)  # no activation is fused on a CPU
# Small, without the time of compiling or measuring anything.
SIZES = ["--hidden-size", "32", "--seq-length", "16", "--timed-steps", "0"]
SMALL = ["--swiglu", "--disable-bias-linear", *SIZES]


def run_main(rank: int, argv: list[str], bug) -> tuple[int, str]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.compiler.set_stance("force_eager")  # compiling Megatron's activations takes longer than all the rest
    from ep_dispatcher.integrations.megatron import destroy_buffers, unregister
    from ep_dispatcher.tools.parity import compare as parity

    unregister()
    destroy_buffers()
    leave_layout()
    output = io.StringIO()
    wrong = has(bug) if bug else contextlib.nullcontext()
    with contextlib.redirect_stdout(output), plain_latent_projections(), wrong:
        code = parity.main(argv)
    if code != 2:  # before there are groups
        end_groups()
    return code, output.getvalue()


@pytest.fixture(scope="module")
def own_pool():
    """Ranks on CPUs where the others are on GPUs."""
    with RankPool(4, timeout_s=120) if on_gpu() else contextlib.nullcontext() as ranks:
        yield ranks


@pytest.fixture
def parity(own_pool):
    """parity("--bf16", ...) -> (exit code of every rank, what rank 0 printed); the other ranks print nothing."""

    def run(*flags: str, bug=None, base: list[str] = SMALL) -> tuple[int, str]:
        pool = own_pool or megatron_pool(4)
        (code, output), *others = pool.run(run_main, [*base, *flags], bug)
        assert others == [(code, "")] * 3
        return code, output

    return run


def rows(output: str) -> dict[str, str]:
    """The table: tensor -> the rest of its line."""
    lines = output.partition("\ntensor ")[2].partition("\n\n")[0].splitlines()[1:]
    return {name: rest.strip() for name, _, rest in (line.partition("  ") for line in lines)}


def verdict(output: str) -> str:
    """The last lines, as one."""
    return " ".join(output.rstrip().rpartition("\n\n")[2].split())


def test_plain(parity):
    code, output = parity()
    assert (code, verdict(output)) == (0, SAME + "alltoall" + FUSED)
    table = rows(output)
    assert list(table) == ["routing map", "output", "input gradient", "gradient of router.weight", *EXPERTS]
    assert all(row.endswith("  ok") for row in table.values())
    assert table["output"].startswith("[16, 2, 32] ") and "8 x [128, 32]" in table[EXPERTS[0]]
    assert "ep_dispatcher ran MoEEPTokenDispatcher (engine cpu) with SequentialMLP" in output
    assert "--num-experts 8" in output


GROUPED = "with SequentialMLP in grouped GEMMs"
SHARED = """--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1
    --moe-expert-capacity-factor 1.0 --moe-shared-expert-intermediate-size 48 --moe-shared-expert-overlap"""


@pytest.mark.parametrize(
    "flags, shown",
    [
        exhaustive(SHARED, ("gradient of shared_experts.linear_fc2.weight", "moe_expert_capacity_factor 1.0")),
        ("--expert-tensor-parallel-size 2 --recompute-granularity full", ("MoEAllGatherTokenDispatcher",)),
        exhaustive("--uneven-tokens --steps 3", ("up to 32 tokens per rank",)),
        ("--ep-dispatcher-experts grouped", (GROUPED,)),  # ours alone: Megatron's layer is what it is compared with
        exhaustive("--bf16 --ep-dispatcher-experts grouped", (GROUPED,)),
        ("--timed-steps 1 --profiled-steps 1 --ep-dispatcher-overlap", ("without its experts", "token_combine")),
    ],
    ids=["shared experts", "gloo takes allgather", "uneven tokens", "grouped", "grouped, bf16", "overlap"],
)
def test_the_same(parity, flags, shown):
    code, output = parity(*flags.split())
    assert code == 0 and verdict(output).startswith(SAME)
    assert all(text in " ".join(output.split()) for text in shown) and output.count(GROUPED) <= 1


# Small ones like them. 72 is 2880 / 40. Megatron has no SiTU: test_activations.py has Kimi K3's experts.
FAMILIES = {
    "gpt-oss": """--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.7 --moe-router-topk 4
        --hidden-size 72 --ffn-hidden-size 72""",
    "DeepSeek-V4": """--swiglu --disable-bias-linear --activation-func-clamp-value 1.0 --moe-router-topk 6
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 48""",
    "Nemotron 3": """--squared-relu --disable-bias-linear --moe-router-topk 22 --num-experts 32 --moe-latent-size 16
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --expert-tensor-parallel-size 2""",
    "GELU": "",
    "Llama 4": """--swiglu --disable-bias-linear --moe-apply-probs-on-input --moe-router-topk 1
        --moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 48""",
}


@pytest.mark.parametrize("dtype", [[], exhaustive(["--bf16"])], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", sparsely(FAMILIES, 3))
def test_experts_of_each_family_are_the_same(parity, name, dtype):
    code, output = parity(*FAMILIES[name].split(), *dtype, base=SIZES)
    assert code == 0 and verdict(output).startswith(SAME), output
    assert output.count(GROUPED) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_is_compared_with_float32_too(parity, dtype):
    code, output = parity(f"--{dtype}", "--moe-router-topk", "4", "--moe-aux-loss-coeff", "0.01")
    assert code == 0 and verdict(output).startswith(SAME)
    limit = {"bf16": 6 * 2.0**-8, "fp16": 6 * 2.0**-11}[dtype]
    row = rows(output)["output"].split()
    ours, theirs, allowed = (float(x) for x in row[-4:-1])
    assert row[-5] == f"{limit:.1e}"
    assert 0 < ours <= allowed and 0 < theirs < allowed


COPIES = "--ep-dispatcher-redundant-experts-per-rank"


@pytest.mark.parametrize(
    "flags",
    [
        "--timed-steps 1 --profiled-steps 1",
        exhaustive("--bf16"),
        exhaustive("--uneven-tokens --steps 3"),
        exhaustive("--recompute-granularity full --moe-aux-loss-coeff 0.01"),
    ],
)
def test_copies_of_experts_are_made_and_compared(parity, tmp_path, flags):
    """The tool's routing was even, so nothing was copied, and its timing without experts was refused."""
    path = tmp_path / "figures.json"
    code, output = parity(COPIES, "1", "--seq-length", "1024", *flags.split(), "--out", str(path))
    assert code == 0 and verdict(output).startswith(SAME + "alltoall" + NOT_AS_GIVEN.format(2)), output
    figures = json.loads(path.read_text())
    copies = figures["copies"]
    assert copies["num_copies"] > 0 and copies["fullest_after"] < copies["fullest_before"]
    said = " ".join(output.split())
    assert f"{copies['num_copies']} redundant copies of experts in {copies['num_microbatches']} step(s)" in said
    assert copies["num_microbatches"] == figures["steps"] and "the router prefers the experts of the first rank" in said
    assert list(figures["milliseconds"]) == (["the whole layer"] if "--timed-steps" in flags else [])


def test_it_says_that_nothing_was_copied(parity, tmp_path):
    code, output = parity(COPIES, "1", "--out", str(tmp_path / "figures.json"))
    assert code == 0 and "No expert was copied, so copies were not compared" in verdict(output)
    assert json.loads((tmp_path / "figures.json").read_text())["copies"]["num_copies"] == 0


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--expert-tensor-parallel-size 2", "expert_tensor_parallel_size is 2"),
        ("--expert-model-parallel-size 1", "redundant_experts_per_rank"),  # no rank to copy to
    ],
)
def test_a_layer_that_cannot_have_copies_is_refused(parity, flags, named):
    """The first pass says so, after lines about the buffer and the experts."""
    code, output = parity(COPIES, "1", *flags.split())
    refusal = output.splitlines()[-1]
    assert code == 2 and refusal.startswith("refused: ") and named in refusal, output


def test_a_copy_with_wrong_gradients_is_found(parity):
    code, output = parity(COPIES, "1", "--seq-length", "1024", bug=copies_without_gradients)
    assert code == 1 and verdict(output).startswith("DIFFERENT: ep_dispatcher and alltoall, in " + ", ".join(EXPERTS))


# What a step of the dispatcher does wrong. Each is given the right one.


def one_token_lost(combine, dispatcher, hidden_states):
    """Combine forgets the first token of the last rank."""
    out = combine(dispatcher, hidden_states)
    return torch.cat([out[:1] * 0, out[1:]]) if torch.distributed.get_rank() == 3 else out


def router_not_trained(postprocess, *given):
    """Right in every forward pass; the router gets no gradient through the experts' outputs."""
    rows, tokens_per_expert, permuted_probs = postprocess(*given)
    return rows, tokens_per_expert, permuted_probs.detach() + 0 * permuted_probs


def gradient_one_percent_off(dispatch, dispatcher, hidden_states, probs):
    """Less than a rounding of bfloat16."""
    return dispatch(dispatcher, hidden_states * 1.01 - 0.01 * hidden_states.detach(), probs)


def copies_without_gradients(pull, *given):
    """The home of a copied expert does not add the gradients of copies."""


STEPS = {
    one_token_lost: "token_combine",
    router_not_trained: "dispatch_postprocess",
    gradient_one_percent_off: "token_dispatch",
    copies_without_gradients: "pull",
}


@contextlib.contextmanager
def has(bug):
    from ep_dispatcher.balance.slots import Slots
    from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher

    owner = Slots if bug is copies_without_gradients else MoEEPTokenDispatcher
    right = getattr(owner, STEPS[bug])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, STEPS[bug], lambda *given: bug(right, *given))
        yield


@pytest.mark.parametrize(
    "bug, flags, found",
    [
        (one_token_lost, [], ["output", "input gradient", "gradient of router.weight", *EXPERTS]),
        (router_not_trained, [], ["input gradient", "gradient of router.weight"]),
        (gradient_one_percent_off, ["--bf16"], ["input gradient"]),
    ],
)
def test_a_wrong_dispatcher_is_found(parity, bug, flags, found):
    code, output = parity(*flags, bug=bug)
    assert code == 1
    assert verdict(output).startswith("DIFFERENT: ep_dispatcher and alltoall, in " + ", ".join(found) + FUSED)
    next_step = "Compare each with a third one: --against allgather." if not flags else "farther from float32"
    assert next_step in verdict(output)
    if bug is one_token_lost:
        assert rows(output)["output"].endswith("DIFFERENT (rank 3)")


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_a_layer_runs_in_megatrons_context_of_low_precision(monkeypatch, name):
    """Transformer Engine's layers quantize nothing outside of it."""
    from megatron.core import fp4_utils, fp8_utils

    from ep_dispatcher.tools.parity import compare as parity

    entered = []

    @contextlib.contextmanager
    def context(config, is_init=False):
        entered.append((config, is_init))
        yield
        entered.pop()

    class Layer:
        config = types.SimpleNamespace(**dict(fp8=None, fp4=None, recompute_granularity=None) | {name: "e4m3"})

        def __call__(self, x):
            assert entered == [(self.config, False)]
            return 2 * x, None

    monkeypatch.setattr(fp8_utils if name == "fp8" else fp4_utils, f"get_{name}_context", context)
    out, grad = parity._forward_backward(Layer(), torch.ones(3), torch.ones(3))
    assert out.tolist() == grad.tolist() == [2, 2, 2] and not entered


def test_errors_in_fp8_are_shown_beside_those_without_it():
    """Transformer Engine runs on no CPU: what the tool makes of the results of its layers."""
    from ep_dispatcher.tools.parity import report

    exact = torch.tensor([3.0, 4.0])
    shifts = dict(ours=0.3, theirs=0.4, plain=0.01)
    ours, theirs, plain = (exact + torch.tensor([0.0, 5 * shift]) for shift in shifts.values())
    config = types.SimpleNamespace(params_dtype=torch.bfloat16, fp8="e4m3", moe_router_topk=2)
    config.expert_tensor_parallel_size = 1
    rows = [
        report.Row(name, [report.part_of(ours, theirs, exact, plain, "rank 0", None)], config, "alltoall")
        for name in ("output", "input gradient")
    ]
    size = float(theirs.norm()) / 5
    wanted = [f"{shift / size:.1e}" for shift in shifts.values()]
    head, line, _ = report.table(rows).splitlines()
    assert head.split()[-2:] == ["without", "FP8"] and [line.split()[i] for i in (6, 7, 9)] == wanted
    run = types.SimpleNamespace(tested="ep_dispatcher", reference="alltoall", changes=[])
    run.others = types.SimpleNamespace(unknown=[])
    said = " ".join(report.verdict(run, rows).split())
    ours, theirs, plain = (f"{shift / size:.2%}" for shift in shifts.values())
    assert f"input gradient {ours} (alltoall's {theirs}, without FP8 or FP4 {plain})" in said
    config.fp8 = None
    assert "FP8" not in report.verdict(run, rows) + report.table(rows)


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--hidden-size 6", "--hidden-size"),
        ("--hidden-size 0", "--hidden-size"),
        ("--moe-router-topk 65 --num-experts 80", "--moe-router-topk"),
        ("--num-experts 6 --expert-model-parallel-size 4", "--num-experts"),
        ("--num-experts 15", "--num-experts"),
        ("--uneven-tokens --against allgather", "--uneven-tokens"),
        ("--hiden-size 8", "did you mean --hidden-size?"),  # it was of no effect
        ("--moe-token-dispatcher-type flexx", "--moe-token-dispatcher-type"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepepp", "--moe-flex-dispatcher-backend"),
        ("--moe-flex-dispatcher-backend deepep", "--moe-token-dispatcher-type"),  # Megatron would run allgather
        ("--moe-token-dispatcher-type alltoall --against alltoall", "--against"),
        ("--moe-token-dispatcher-type alltoall --against allgather --ep-dispatcher-overlap", "--ep-dispatcher-overlap"),
        ("--against hybridep", "needs DeepEP of its branch hybrid-ep, and `import deep_ep` raises ModuleNotFoundError"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep --against alltoall", "deepep cannot run here"),
        ("--expert-tensor-parallel-size 2 --against alltoall", "gloo"),
        ("--plot steps.gif", ".png, .svg, .pdf"),
        ("--moe-router-topkk 2", "--moe-router-topkk"),
        ("--moe-router-dtype fp8", "--moe-router-dtype"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--moe-pad-expert-input-to-capacity", "moe_expert_capacity_factor"),  # Megatron refuses
        (f"{COPIES} 1 --ep-dispatcher-experts megatron", COPIES),
        (f"{COPIES} 1 --ep-dispatcher-overlap", COPIES),
        (f"{COPIES} 1 --moe-token-dispatcher-type alltoall --against allgather", COPIES),
    ],
)
def test_what_is_wrong_or_missing_is_refused_by_its_flag(parity, flags, named):
    code, output = parity(*flags.split())
    assert code == 2 and output.startswith("refused: ") and named in output
    assert output.count("\n") == 1


def test_flags_of_a_training_job_are_accepted_and_named(parity):
    """Without megatron.training nobody knows some of them, and the verdict says so."""
    job = "pretrain_gpt.py --lr=1e-4 --data-path 0.3 a 0.7 b --no-load-rng --num-layers 24 --delay-wgrad-compute"
    recompute = "--recompute-granularity selective --recompute-modules core_attn moe moe_act"
    code, output = parity(*job.split(), "--moe-grouped-gemm", *recompute.split())
    shown = " ".join(output.split())
    assert code == 0 and "not of an MoE layer: --lr, --num-layers Given, but unknown" in shown
    unknown = "Flags that were ignored because they are unknown: --data-path, --no-load-rng"
    assert verdict(output) == SAME + "alltoall" + NOT_AS_GIVEN.format(5) + " " + unknown
    for change in ("--moe-grouped-gemm", "--recompute-modules moe_act", "--recompute-modules core_attn"):
        assert f"{change} left out" in shown
    assert "--delay-wgrad-compute: the layer runs without it" in shown and "recompute_modules moe," in shown


def test_flags_of_megatrons_training_and_of_the_script_are_known(tmp_path, monkeypatch):
    """They are read in the text of megatron.training, where it can be found, and of the script."""
    from ep_dispatcher.tools.parity import flags

    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "arguments.py").write_text("group.add_argument('--data-path', nargs='*')\n")
    (training / "config.py").write_text(
        "@dataclass\nclass Config:\n    train_iters: int = 0\n    load_rng: bool = True\n"
    )
    script = tmp_path / "pretrain.py"
    script.write_text('parser.add_argument("--my-flag")\n')
    given = ["--data-path", "a", "--train-iters=3", "--no-load-rng", "--my-flag", "--your-flag", "--lr", "1"]
    monkeypatch.syspath_prepend(tmp_path)
    found = flags.sort_others([str(script), *given], ["--hidden-size"])
    assert found == (["--data-path", "--train-iters", "--no-load-rng", "--my-flag", "--lr"], [], ["--your-flag"])


@pytest.mark.parametrize(
    "chosen, against, expected",
    [
        (None, None, ("ep_dispatcher", "alltoall")),
        ("ep_dispatcher", None, ("ep_dispatcher", "alltoall")),
        ("alltoall", None, ("ep_dispatcher", "alltoall")),  # whoever thinks of changing to it
        ("deepep", None, ("deepep", "ep_dispatcher")),
        ("deepep", "alltoall", ("deepep", "alltoall")),
        ("alltoall", "deepep", ("deepep", "alltoall")),  # the reference is Megatron's own
        ("deepep", "hybridep", ("deepep", "hybridep")),
        ("alltoall", "allgather", ("alltoall", "allgather")),
    ],
)
def test_which_two_are_compared(chosen, against, expected):
    from ep_dispatcher.tools.parity import dispatchers

    can = dict.fromkeys(dispatchers.MEGATRONS)
    assert dispatchers.pair(chosen, against, can) == expected
    if against is None and expected[1] == "alltoall" and chosen != "alltoall":
        assert dispatchers.pair(chosen, against, can | {"alltoall": "not here"}) == ("ep_dispatcher", "allgather")


def test_two_dispatchers_of_megatron_run_in_megatron_as_it_is(parity):
    code, output = parity("--moe-token-dispatcher-type", "alltoall", "--against", "allgather")
    assert (code, verdict(output)) == (0, "the same within rounding: alltoall and allgather" + FUSED)
    assert "ran MoEAlltoAllTokenDispatcher" in output and "ran MoEAllGatherTokenDispatcher" in output
    assert "carries the tokens" not in output and GROUPED not in output


def run_with_our_deep_ep(rank: int, *given) -> tuple[int, str]:
    from megatron.core.transformer.moe import fused_a2a

    try:
        return run_main(rank, *given)
    finally:
        fused_a2a._buffer = None  # of groups that have ended


@pytest.mark.exhaustive
def test_megatrons_own_deepep_backend_is_compared():
    """With our module in DeepEP's place, as DeepEP needs GPUs."""
    from lib.deep_ep_case import install

    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
    with RankPool(4, timeout_s=120) as ranks:  # Megatron looks for deep_ep once
        ranks.run(install)
        for other in ("alltoall", "ep_dispatcher"):
            given = [*SMALL, *flex.split(), "--against", other]
            (code, output), *_ = ranks.run(run_with_our_deep_ep, given, None)
            assert (code, verdict(output)) == (0, f"the same within rounding: deepep and {other}" + FUSED), output
            assert "ran MoEFlexTokenDispatcher (_DeepepManager)" in output
            assert ("carries the tokens of megatron-core" in output) == (other == "ep_dispatcher")


@pytest.mark.exhaustive
def test_with_torchrun(tmp_path):
    steps = ("--timed-steps", "3", "--profiled-steps", "2", "--steps", "1")
    chart = tmp_path / "charts" / "steps.svg"
    flags = (*SMALL, *steps, "--out", str(tmp_path / "new" / "figures.json"), "--plot", str(chart))
    code, output, errors = torchrun(2, "-m", MODULE, *flags)
    assert code == 0 and verdict(output).startswith(SAME), errors
    assert "have changed" not in output + errors  # timing without experts is no change of theirs
    drawn = chart.read_text()
    assert "<svg" in drawn and drawn.count("ep_dispatcher") >= 1
    figures = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert figures["same"] and figures["ranks"] == 2 and figures["tensors"]["output"]["ok"]
    assert list(figures["milliseconds"]) == ["the whole layer", "without its experts"]
    for times in figures["milliseconds"].values():
        assert list(times) == ["alltoall", "ep_dispatcher"] and all(times.values())
    for what, times in figures["milliseconds"].items():
        for name, step in times.items():
            forward, host = (figures[f"host_milliseconds{part}"][what][name] for part in ("_forward", ""))
            assert 0 < forward < host <= step  # medians of the same steps
    assert "\n  token_dispatch " in output
    assert errors.count("parity: ") >= 5  # making, comparing, timing and profiling
    for profile in figures["profiles"].values():
        assert all(times["host"] > 0 for times in profile["steps"].values()) and profile["idle"] == 0


def test_alone_and_refused():
    code, output, errors = run_module(MODULE, "--hidden-size", "6", "--disable-bias-linear")
    assert code == 2 and output.startswith("refused: --hidden-size") and output.count("\n") == 1
    assert "Traceback" not in errors


def test_an_error_in_a_step_is_said_to_be_of_one_layer():
    """With capacity for more than all tokens, alltoall of megatron-core 0.16.1 reshapes what it does not have."""
    flags = (*SMALL, "--steps", "1", "--moe-expert-capacity-factor", "6", "--moe-pad-expert-input-to-capacity")
    code, _, errors = run_module(MODULE, *flags)
    assert code == 1 and "parity: the layer with alltoall raised RuntimeError in step 1 on rank 0\n" in errors
    code, output, errors = run_module(MODULE, *flags, "--against", "allgather")
    assert code == 0 and SAME + "allgather" in output, errors


def test_one_rank_with_a_bias_is_refused():
    """Megatron adds it in place to what a reduction over one rank has returned, and autograd forbids that."""
    from ep_dispatcher.tools.parity import arguments

    machine = dict(num_ranks=1, cpu=True, transformer_engine=False)
    with pytest.raises(arguments.Refused, match="--expert-model-parallel-size is 1, .*--disable-bias-linear"):
        arguments.parse([], "", **machine)
    arguments.parse(["--disable-bias-linear"], "", **machine)


def test_without_megatron_it_says_what_to_install():
    code = f"import runpy, sys; sys.modules['megatron.core'] = None; runpy.run_module({MODULE!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout.startswith("refused: Megatron-core cannot be imported") and "pip install" in done.stdout
