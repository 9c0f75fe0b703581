"""Compares two dispatchers of Megatron in one MoE layer of your configuration: its outputs and every gradient.

torchrun --nproc-per-node 4 -m ep_dispatcher.integrations.megatron.parity \\
    --num-experts 8 --moe-router-topk 2 --hidden-size 1024 --expert-model-parallel-size 4 --bf16 ...

It takes the flags of a Megatron training job. The dispatcher that they choose is compared with --against, and the
verdict names both. To see whether the gradients of DeepEP are right in your layer, run it with

    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --against alltoall ...

Without such flags ep_dispatcher is compared with alltoall. If ep_dispatcher is neither of the two, Megatron is not
changed. It runs on GPUs (NCCL), or on the CPU (gloo) if there are none. Both layers get the same weights and tokens.

Flags that do not concern an MoE layer are listed. A flag that looks misspelled is refused, and the verdict lists
unknown flags. The arguments --ep-dispatcher-... apply to the layer with ep_dispatcher only.

The rule: a tensor is the same if its largest difference is at most `limit` times its largest absolute value.
  float32             1e-5
  bfloat16, float16   top-k x expert tensor parallel size + 2 roundings: 2^-8 each in bfloat16, 2^-11 in float16
  FP8, FP4            1/8: rows in another order may share other scales
Below float32 there is a second rule. A layer with alltoall also runs in float32, on the same weights and routing
logits. One of the two dispatchers is the reference: alltoall or allgather, otherwise the one given by --against. The
root mean square distance of the other one from the float32 run, over all ranks and steps, must be at most 1.25 times
the distance of the reference, plus a quarter of a rounding of the tensor's root mean square. In FP8 and FP4 the
distance of the reference without them is shown as well.

With --ep-dispatcher-redundant-experts-per-rank the router prefers the experts of the first rank, and a line says how
many experts were copied. Copies change which experts share a rounding, so results differ by roundings. The layer is
not timed without its experts, because only these can compute rows of copies.

Exit code of every rank: 0 the same within rounding, 1 different, 2 the configuration is refused. (torchrun itself
exits with 1 for all but 0.)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher import registration
from ep_dispatcher.statistics import BalanceStats
from ep_dispatcher.tools.parity import arguments, inputs, plot, report
from ep_dispatcher.tools.parity.arguments import Run
from ep_dispatcher.tools.parity.dispatchers import OURS
from ep_dispatcher.tools.parity.flags import Refused
from ep_dispatcher.tools.parity.profile import Profile, profile_layer
from ep_dispatcher.tools.parity.profile import table as profile_table
from ep_dispatcher.tools.parity.report import Part, Row, Seconds
from ep_dispatcher.tools.testing import balance_so_far

FLOAT32, UNQUANTIZED = "float32", "without FP8 or FP4"
say = partial(print, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Compare, and return the exit code. Collective. Without a default process group, make one and destroy it."""
    argv = sys.argv[1:] if argv is None else argv
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process_group())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # Megatron warns on each rank about missing packages and deprecated calls
        if dist.get_rank() != 0:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            code = _compare(_agreed_run(argv))
        except Refused as refusal:
            say(f"refused: {refusal}")
            code = 2
        dist.barrier()  # first let all ranks print: torchrun stops the others as soon as one exits with an error
        if code and "TORCHELASTIC_RUN_ID" in os.environ:
            _show_progress(f"exit code {code}, as said above. torchrun's own report follows, and adds nothing.")
    return code


def _show_progress(text: str) -> None:
    """Print on rank 0 what takes time now. It goes to stderr, because stdout has the results."""
    if dist.get_rank() == 0:
        say(f"parity: {text}", file=sys.stderr)


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Use the group of the caller, or that of torchrun's ranks, or a group of one rank."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants it with sequence parallelism
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        yield
        return
    alone: dict[str, Any] = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _agreed_run(argv: list[str]) -> Run:
    """Return the run. Raise Refused on all ranks if one of them refuses, because a package may be missing on a host."""
    run, refusal = None, None
    try:
        run = _parse(argv)
    except (Refused, argparse.ArgumentError) as error:
        refusal = str(error)
    for text in filter(None, _gather(refusal)):
        raise Refused(text)
    assert run is not None
    return run


def _parse(argv: list[str]) -> Run:
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise Refused(registration.why_not_importable(error)) from error
    gpu = has_te = torch.cuda.is_available()
    if gpu:
        from megatron.core.extensions import transformer_engine

        has_te = transformer_engine.HAVE_TE
    else:
        from ep_dispatcher.integrations.megatron.dispatcher.cpu import let_megatron_run_on_cpu

        let_megatron_run_on_cpu()
    return arguments.parse(argv, __doc__, dist.get_world_size(), cpu=not gpu, transformer_engine=has_te)


# ---- the comparison -------------------------------------------------------------------------------------------------


def _compare(run: Run) -> int:
    args = run.args
    with _megatron(run):
        _show_progress("making the layers")
        layers, versions = _make_layers(run), _versions(run)
        if run.has_copies:
            _refuse_copies(layers[OURS], run)
        config = layers[run.tested].config
        say(report.opening(run, config, versions))
        rows = [Row(name, parts, config, run.reference) for name, parts in _differences(layers, run).items()]
        copies = _copies(layers[OURS], run) if run.has_copies else None
        timed = (report.WHOLE,) if run.has_copies else report.TIMED
        times = {name: _times(layers, run, name) for name in timed} if args.timed_steps else {}
        profiles = _profiles(layers, run) if args.profiled_steps else {}
        shown = [_what_ran(layers, run), report.table(rows), report.rule(run, config)]
        shown += [] if copies is None else [report.copies_line(copies)]
        shown += [report.times_table(times, args.timed_steps)] if times else []
        shown += [profile_table(profiles)] if profiles else []
        say("\n" + "\n\n".join([*shown, report.verdict(run, rows, copies)]))
        figures = report.figures(run, config, versions, rows, times, copies)
        figures["profiles"] = {name: dataclasses.asdict(one) for name, one in profiles.items()}
        if dist.get_rank() == 0:
            _write(args, figures)
    return 0 if all(row.ok for row in rows) else 1


def _write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    for path in filter(None, (args.out, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot is not None:
        plot.draw(figures, args.plot)
        _show_progress(f"wrote {args.plot}")


def _versions(run: Run) -> str:
    import megatron.core

    kind = "Transformer Engine's layers" if run.transformer_engine else "local layers, no Transformer Engine"
    numbers = f"Megatron-core {megatron.core.__version__}, PyTorch {torch.__version__}, ep_dispatcher {ep.__version__}"
    return f"{numbers}; {kind}"


def _what_ran(layers: dict[str, Any], run: Run) -> str:
    """Return lines that name the classes that have run, as found in the layers."""
    lines = []
    for name in (run.reference, run.tested):
        dispatcher, kind = layers[name].token_dispatcher, type(layers[name].experts).__name__
        backend = getattr(dispatcher, "_comm_manager", None)  # of Megatron's flex dispatcher
        inside = "" if backend is None else f" ({type(backend).__name__})"
        how = ""
        if name == OURS:
            inside, how = f" (engine {dispatcher.buffer.engine})", _how_experts_ran(layers[name].experts)
        lines.append(f"{name:13} ran {type(dispatcher).__name__}{inside} with {kind}{how}")
    return "\n".join(lines)


def _how_experts_ran(module: torch.nn.Module) -> str:
    from ep_dispatcher.integrations.megatron.grouped_experts import experts

    grouped = " in grouped GEMMs, the activation in float32" if experts.decide_grouped(module) else ""
    in_float8 = ", in FP8" if experts.is_float8(module) else ""
    return grouped + in_float8


@contextlib.contextmanager
def _megatron(run: Run) -> Iterator[None]:
    """Make Megatron's groups for the time of the comparison, and register ep_dispatcher if it is compared."""
    from megatron.core import parallel_state, tensor_parallel

    from ep_dispatcher.integrations.megatron import destroy_buffers, register, unregister
    from ep_dispatcher.integrations.megatron.dispatcher import registration

    registered = registration.active() is not None
    if run.has_ours:
        size = None if registered or run.args.uneven_tokens else run.tokens * run.batch
        register(max_tokens_per_rank=size)
    sizes = ("tensor_model_parallel", "context_parallel", "expert_model_parallel", "expert_tensor_parallel")
    parallel_state.initialize_model_parallel(**{f"{name}_size": run.settings[f"{name}_size"] for name in sizes})
    if not run.cpu:
        tensor_parallel.model_parallel_cuda_manual_seed(run.args.seed)
    try:
        yield
    finally:
        destroy_buffers()
        parallel_state.destroy_model_parallel()
        if not registered:
            unregister()


def _make_layers(run: Run) -> dict[str, Any]:
    """Make a layer per dispatcher, and below float32 one in float32. Raise Refused if one of them refuses."""
    settings = run.settings
    dtype = torch.float32
    if settings.get("bf16"):
        dtype = torch.bfloat16
    elif settings.get("fp16"):
        dtype = torch.float16
    settings["params_dtype"] = dtype
    wanted = {name: arguments.settings_of(run, name) for name in (run.tested, run.reference)}
    if dtype != torch.float32:
        low = ["bf16", "fp16", "fp8", "fp4", "fp8_recipe", "fp4_recipe", "fp8_param", "fp4_param"]
        low.append("moe_router_padding_for_quantization")
        plain = {n: v for n, v in arguments.settings_of(run, run.exact).items() if n not in low}
        wanted[FLOAT32] = plain | {"params_dtype": torch.float32}
        if settings.get("fp8") or settings.get("fp4"):
            wanted[UNQUANTIZED] = plain | {n: settings[n] for n in ("bf16", "fp16") if n in settings}
    layers, refusal = {}, None
    try:
        for name, one in wanted.items():
            megatrons = {"ep_dispatcher_experts": "megatron", "ep_dispatcher_overlap": False}  # read by register()
            layers[name] = _make_layer(one, run.ours if name == OURS else megatrons, run)
    except (ValueError, AssertionError, NotImplementedError, ImportError) as error:
        refusal = f"{_text_of(error)} (the layer with {name})"
    for text in filter(None, _gather(refusal)):
        raise Refused(text)
    reference = layers[run.reference]
    inputs.set_weights(reference, run.args.seed)
    values = dict(reference.named_parameters()) | dict(reference.named_buffers())
    for layer in layers.values():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            tensor.detach().copy_(values[name])
    if run.has_copies:
        for name in (run.tested, run.reference):
            inputs.prefer_first_rank(layers[name])
    for name in layers.keys() & {FLOAT32, UNQUANTIZED}:
        inputs.follow_routing(reference.router, layers[name].router)
    return layers


def _gather(mine: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _text_of(error: Exception) -> str:
    """Return the text without what build_module() adds, or the line of code of an assertion without a text."""
    text = re.sub(r" when instantiating \w+$", "", str(error))
    return text or f"{type(error).__name__} in Megatron: {traceback.extract_tb(error.__traceback__)[-1].line}"


def _make_layer(settings: dict[str, Any], ours: dict[str, Any], run: Run):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**settings)
    vars(config).update(ours)
    spec = get_moe_module_spec(
        use_te=run.transformer_engine, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    with _quantization(config, is_init=True):  # from 0.18 on a spec is a function
        layer = build_module(spec, config=config) if hasattr(spec, "module") else spec(config=config)
    layer.set_layer_number(1)
    return layer if config.use_cpu_initialization else layer.cuda()


# ---- steps ----------------------------------------------------------------------------------------------------------


def _forward_backward(layer, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return output and input gradient; the parameters keep their gradients."""
    x = x.detach().requires_grad_()
    out = _forward(layer, x)
    out.backward(grad)
    return out.detach(), x.grad


def _forward(layer, x: Tensor) -> Tensor:
    from megatron.core import parallel_state, tensor_parallel

    def run(hidden_states: Tensor) -> Tensor:
        return layer(hidden_states)[0]

    quantizes = layer.config.fp8 or getattr(layer.config, "fp4", None)
    with _quantization(layer.config):
        if layer.config.recompute_granularity != "full":
            return run(x)
        if not quantizes:
            return tensor_parallel.checkpoint(run, False, x)
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # As Megatron does: the second forward needs the same context.
        group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(run, False, tensor_parallel.random.get_cuda_rng_tracker, group, x)


def _quantization(config, is_init: bool = False) -> contextlib.AbstractContextManager:
    """Return the context of Megatron's TransformerBlock around its layers: without it no GEMM is in FP8 or FP4."""
    from megatron.core.fp8_utils import get_fp8_context

    if getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_context

        return get_fp4_context(config, is_init=is_init)
    return get_fp8_context(config, is_init=is_init)


def _on_device(layer, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(layer.router.weight.device, layer.config.params_dtype) for tensor in tensors]


def _results(layer, x: Tensor, grad: Tensor, seed: int) -> dict[str, Tensor | None]:
    """Run one step. Return its tensors by name."""
    maps: list[Tensor] = []
    hook = layer.router.register_forward_hook(lambda module, inputs, output: maps.append(output[1]))
    layer.zero_grad(set_to_none=True)
    torch.manual_seed(seed)  # jitter, and routing that is forced at random
    out, x_grad = _forward_backward(layer, x, grad)
    hook.remove()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"routing map": maps[0], "output": out, "input gradient": x_grad, **gradients}


@contextlib.contextmanager
def _says_whose_error(name: str, step: int) -> Iterator[None]:
    """Say on this rank which layer raises an error. The traceback does not tell the two dispatchers apart."""
    try:
        yield
    except Exception as error:  # of any kind: it is raised again
        place = f"step {step + 1} on rank {dist.get_rank()}"
        sys.stderr.write(f"parity: the layer with {name} raised {type(error).__name__} in {place}\n")
        raise


def _differences(layers: dict[str, Any], run: Run) -> dict[str, list[Part]]:
    """Run all steps that are compared. Return the differences of all ranks by tensor, the same on every rank."""
    mine: dict[str, list[Part]] = {}
    for step in range(run.args.steps):
        first = "; Megatron compiles in the first one, which can take minutes on few cores" if step == 0 else ""
        _show_progress(f"comparing, step {step + 1} of {run.args.steps}{first}")
        results: dict[str, dict[str, Tensor | None]] = {FLOAT32: {}, UNQUANTIZED: {}}
        x, grad = inputs.tokens(run, step)
        pair = (run.reference, run.tested)
        for name in (*pair, *layers.keys() - {*pair}):  # float32 follows the reference
            x, grad = _on_device(layers[name], x, grad)
            with _says_whose_error(name, step):
                results[name] = _results(layers[name], x, grad, run.args.seed + step)
        for name, tested in results[run.tested].items():
            expert = inputs.expert_of(layers[run.tested], name)
            parts = mine.setdefault(name if expert is None else inputs.shared_name(name), [])
            where = f"rank {dist.get_rank()}" + ("" if expert is None else f", expert {expert}")
            reference = results[run.reference][name]
            if tested is not None and reference is not None:
                others = results[FLOAT32].get(name), results[UNQUANTIZED].get(name)
                parts.append(report.part_of(tested, reference, *others, where, expert))
            elif tested is not None:  # only one of them has this gradient
                parts.append(Part(tuple(tested.shape), where, expert))
            elif reference is not None:
                parts.append(Part(tuple(reference.shape), where, expert))
    everyone = _gather(mine)
    return {name: [part for of_rank in everyone for part in of_rank.get(name, ())] for name in mine}


def _refuse_copies(layer, run: Run) -> None:
    """Raise Refused on all ranks if the experts of this layer cannot have redundant copies. Collective."""
    refusal = None
    try:
        _forward_only(layer, run, 0)
    except ValueError as error:
        refusal = str(error)
    for text in filter(None, _gather(refusal)):
        raise Refused(text)


def _copies(layer, run: Run) -> BalanceStats:
    """Return what copies do in the steps that are compared, by running their forward passes again. Collective."""
    buffer = layer.token_dispatcher.buffer
    buffer.stats()  # it begins to count
    for step in range(run.args.steps):
        _forward_only(layer, run, step)
    buffer.check()
    return balance_so_far(buffer)


@torch.no_grad()
def _forward_only(layer, run: Run, step: int) -> None:
    """Run a forward pass, which leaves the state of a router as it is."""
    torch.manual_seed(run.args.seed + step)
    _forward(layer, _on_device(layer, inputs.tokens(run, step)[0])[0])


def _times(layers: dict[str, Any], run: Run, what: str) -> dict[str, Seconds]:
    """Return medians of steps, each of its slowest rank. The dispatchers take turns, and the first is a warm-up."""
    _show_progress(f"timing {what}, {run.args.timed_steps} steps after a warm-up")
    seconds: dict[str, list[list[float]]] = {run.reference: [], run.tested: []}
    for step in range(run.args.timed_steps + 1):
        for name, of_layer in seconds.items():
            layer = layers[name]
            x, grad = _on_device(layer, *inputs.tokens(run, run.args.steps + step))
            moments: list[float] = []
            hook = layer.register_forward_hook(lambda *_, m=moments: m.append(time.perf_counter()))
            with _without_experts(layer) if what == report.WITHOUT_EXPERTS else contextlib.nullcontext():
                dist.barrier()
                _synchronize(run)
                start = time.perf_counter()
                _forward_backward(layer, x, grad)
                moments.append(time.perf_counter())
                _synchronize(run)
            hook.remove()
            seconds_here = [time.perf_counter() - start, moments[0] - start, moments[-1] - start]
            took = torch.tensor(seconds_here, dtype=torch.float32, device=x.device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            of_layer.append(took.tolist())
    return {name: Seconds(*map(statistics.median, zip(*of_layer[1:]))) for name, of_layer in seconds.items()}


def _profiles(layers: dict[str, Any], run: Run) -> dict[str, Profile]:
    """Return the profile of each dispatcher's layer on this rank, after a pass that is not profiled."""
    found = {}
    for name in (run.reference, run.tested):
        _show_progress(f"profiling the layer with {name}, {run.args.profiled_steps} steps")
        x, grad = _on_device(layers[name], *inputs.tokens(run, run.args.steps))
        x.requires_grad_()
        _forward_backward(layers[name], x, grad)
        forward, backward = partial(_forward, layers[name], x), partial(Tensor.backward, gradient=grad)
        found[name] = profile_layer(layers[name], forward, backward, run.args.profiled_steps)
    return found


@contextlib.contextmanager
def _without_experts(layer) -> Iterator[None]:
    """Let experts only multiply their rows by the probabilities.

    The rows arrive as before, also for experts in grouped GEMMs.
    """
    from ep_dispatcher.integrations.megatron.dispatcher.experts_interface import PendingDispatch, QuantizedInput
    from ep_dispatcher.integrations.megatron.grouped_experts import (
        overlapped_dispatch,  # imports Megatron, which not all have
    )
    from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import register_forward

    def weigh(rows: Tensor, counts: Any, probs: Tensor) -> tuple[Tensor, None]:
        return (rows * probs.unsqueeze(-1)).to(rows.dtype), None

    def forward(rows: Tensor, counts: Any, probs: Tensor) -> tuple[Tensor, None]:
        if isinstance(counts, PendingDispatch):
            return overlapped_dispatch.run_megatron_experts(counts, rows, probs, weigh), None
        if isinstance(counts, QuantizedInput):
            rows = ep.dequantize(counts.with_anchor(rows))
        return weigh(rows, counts, probs)

    register_forward(forward)  # it accepts what our forward accepts, so the layer sees no change
    layer.experts.forward = forward
    try:
        yield
    finally:
        del layer.experts.forward


def _synchronize(run: Run) -> None:
    if not run.cpu:
        torch.cuda.synchronize()
