"""The CPU engine: runs compiled steps inside a node, and sends through gloo between nodes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ep_dispatcher import _C_cpu, checks, envs, float8
from ep_dispatcher.addressable import as_addressable, check_memory
from ep_dispatcher.decode.masks import Masks
from ep_dispatcher.engines import suspension
from ep_dispatcher.engines.base import Engine, EngineConfig, PendingOperation, address_of
from ep_dispatcher.engines.cpu.rail import Rail, RailLate
from ep_dispatcher.engines.cpu.waiter import Message
from ep_dispatcher.engines.descriptors import Descriptors
from ep_dispatcher.engines.health import Health
from ep_dispatcher.engines.late_ranks import find_late_ranks
from ep_dispatcher.engines.profiler_ranges import profile_operation
from ep_dispatcher.engines.rendezvous import OwnKeys
from ep_dispatcher.engines.trace import Trace
from ep_dispatcher.errors import PeerDataError, PeerTimeoutError, copy_error
from ep_dispatcher.gather import Gather
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received

_LAYOUTS = {"expert": _C_cpu.Layout.expert, "rank": _C_cpu.Layout.rank, "decode": _C_cpu.Layout.decode}
_COUNTS, _LISTS, _ROWS, _SUMS, _WEIGHTS = range(5)  # kinds of messages between nodes


def _check_memory(request: DispatchRequest | CombineRequest) -> None:
    """Refuse tensors whose storage somebody has made too small: reading behind its end can end the process."""
    for argument, t in request.tensors():
        if t is not None:
            check_memory(argument, t)


class _Connections:
    """This rank's memory and rail. ``abort()`` ends the peers' waits, ``interrupt()`` those of this rank.

    Does not refer to the engine, so a dropped engine is freed at once.
    """

    def __init__(self) -> None:
        self.c: _C_cpu.Engine | None = None
        self.descriptors: Descriptors | None = None  # while the buffer is made
        self.rail: Rail | None = None
        self.why = _C_cpu.AbortReason.left

    def abort(self) -> None:
        if self.c is not None:
            self.c.abort(self.why)
        if self.rail is not None:
            self.rail.abort()

    def interrupt(self) -> None:
        if self.c is not None and self.rail is not None:
            self.c.stop()
            self.rail.interrupt()

    def close_descriptors(self) -> None:
        """Close the descriptor of this rank's memory, and the sockets that have passed it on."""
        descriptors, self.descriptors = self.descriptors, None
        if descriptors is not None:
            descriptors.close()
        if self.c is not None:
            self.c.close_fd()

    def free(self) -> None:
        """Abort, and free memory and connections, even if an exception keeps the objects alive."""
        self.abort()
        self.close_descriptors()
        if self.c is not None:
            self.c.close()


class CpuEngine(Engine):
    device = "cpu"
    layouts: tuple[str, ...] = tuple(_LAYOUTS)
    used_sms = 0

    def __init__(self, config: EngineConfig):
        topology = config.topology
        self.config, self._topology, self.wait_ns = config, topology, {}
        c = self._c_config = config.fill_sizes(_C_cpu.Config())
        c.rank, c.node, c.local_rank = topology.rank, topology.node, topology.local_rank
        c.rank_at = [r for ranks in topology.nodes for r in ranks]
        if config.mask_late_ranks:
            self.layouts = ("decode",)
        self.summary = "CPU engine, shared memory" + (", gloo between nodes" if topology.num_nodes > 1 else "")
        self._trace = Trace(topology.rank) if envs.trace() else None
        self._connections = _Connections()
        self.health = Health(self._connections.abort, config.timeout_s)
        self._masks = Masks(self.health)
        self._c: _C_cpu.Engine
        self._rail: Rail
        store = OwnKeys(config.store)
        self._rail_store = store  # compiled code calls it later, and keeps no reference

        def create() -> None:
            self._c = self._connections.c = _C_cpu.Engine(c, int(config.buffer_id))
            secret = f"ep_dispatcher/{config.buffer_id}/{topology.node_ranks[0]}"
            self._connections.descriptors = Descriptors(secret, topology.rank, topology.node_ranks)

        def attach() -> None:
            descriptors = self._connections.descriptors
            assert descriptors is not None  # since `create`
            of_ranks = descriptors.exchange([self._c.fd()], config.timeout_s)
            try:
                self._c.attach(descriptors.pids, [fds[0] if fds else -1 for fds in of_ranks])
            finally:
                for fd in itertools.chain.from_iterable(of_ranks):
                    os.close(fd)

        def connect() -> None:
            self._rail = self._connections.rail = Rail(store, topology.rail, topology.node, config.timeout_s)

        try:
            config.gather("memory", create)
            config.gather("memory of the other ranks", attach, waits_for_peers=True)
            self._connections.close_descriptors()  # all peers have attached
            if topology.num_nodes > 1:
                config.gather("connections between nodes", connect, waits_for_peers=True)
                if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0"):  # else gloo connects at the first send
                    store.delete_keys()
            else:
                connect()
        except BaseException:  # it is raised again
            self._connections.free()
            raise

    def dispatch(self, request: DispatchRequest) -> Received:
        self.refuse_if_pending("dispatch")
        request.make_addressable()
        _check_memory(request)
        if request.topk_idx is not None:
            self.check_routing(request.topk_idx)
        rows, scales = request.rows, request.scales
        if request.quantize:
            rows, scales = float8.quantize(rows, request.quantize)
        together = [t for t in (rows, scales) if t is not None]
        arrays = [(address_of(t), t.shape[1] * t.itemsize) for t in together]  # bytes of a row
        c, rail, num_tokens, weights = self._c, self._rail, rows.shape[0], address_of(request.topk_weights)
        c.num_scales = 0 if scales is None else scales.shape[1]
        with self._operation("dispatch", request.plan, num_tokens, request.num_rows, request.label) as step:
            if request.meanwhile is not None:
                request.meanwhile()
            if request.plan is None:
                plan, num_rows, pending_lists = self._start_plan(request, arrays, weights, step)
            else:
                step("stage")
                plan, num_rows, pending_lists = None, request.num_rows, {}
                c.reuse(_C_cpu.DISPATCH, request.plan.data_ptr(), [size for _, size in arrays], weights != 0)
                c.stage(arrays, weights, num_tokens)
            step("send")
            pending = self._exchange(
                "rows between nodes",
                _ROWS,
                c.incoming_payload,
                lambda m: c.pack_payload(m, arrays, weights, num_tokens),
            )
            if request.plan is None:
                step("plan")
                self._arrive(pending_lists, c.lists_arrived)
                c.finish_plan()
            step("pull")
            received = self._allocate(request, rows, scales, num_rows, plan)
            out = [address_of(t) for t in (received.rows, received.scales) if t is not None]
            to = (out, address_of(received.topk_weights), address_of(received.topk_idx))
            c.prepare_output(*to)
            c.pull(self._topology.node, *to)
            for m in rail.others:
                rail.wait(pending[m])
                c.payload_arrived(m)
                c.pull(m, *to)
            c.agree()
        if request.plan is None:
            self.count(request.label, received.tokens_per_expert)
        self.pending = PendingOperation("dispatch") if request.is_send_only else None
        return received

    def _start_plan(
        self, request: DispatchRequest, arrays: list[tuple[int, int]], weights: int, step: Callable[[str], None]
    ) -> tuple[Tensor, int, dict[int, Message | None]]:
        """Count and stage. Return the plan, the rows of the output, and the messages for the lists of other nodes."""
        step("route")
        c, num_rows, num_tokens = self._c, request.num_rows, request.rows.shape[0]
        topk_idx, layout = address_of(request.topk_idx), _LAYOUTS[request.layout]
        c.route(topk_idx, layout, request.expert_alignment, num_rows, arrays, weights, num_tokens)
        pending = self._exchange(
            "counts between nodes", _COUNTS, c.incoming_counts, lambda m: c.own_counts(), is_list=True
        )
        step("stage")
        c.stage(arrays, weights, num_tokens)
        step("count")
        self._arrive(pending, c.counts_arrived)
        counted_rows, elements = c.count()
        if num_rows >= 0:
            elements = self.plan_capacity(num_rows, request.layout)
        plan = torch.empty(elements, dtype=torch.int32, device="cpu")
        c.start_plan(plan.data_ptr(), elements)
        step("send lists")
        pending = self._exchange("lists between nodes", _LISTS, c.incoming_lists, c.outgoing_lists, is_list=True)
        return plan, counted_rows, pending

    def _allocate(
        self, request: DispatchRequest, rows: Tensor, scales: Tensor | None, num_rows: int, plan: Tensor | None
    ) -> Received:
        """Allocate the tensors of a dispatch, and fill in the counts. rows, scales: as they travel."""
        config, by_rank = self.config, request.layout == "rank"
        tokens, padded = (torch.empty(config.num_local_experts, dtype=torch.int64, device="cpu") for _ in range(2))
        self._c.counts_per_expert(address_of(tokens), address_of(padded))
        per_choice = (num_rows, config.num_topk)
        weights_shape = per_choice if by_rank else (num_rows,)
        return Received(
            rows=rows.new_empty(num_rows, rows.shape[1]),
            scales=None if scales is None else scales.new_empty(num_rows, scales.shape[1]),
            topk_weights=None if request.topk_weights is None else request.topk_weights.new_empty(weights_shape),
            topk_idx=torch.empty(per_choice, dtype=torch.int64, device="cpu") if by_rank else None,
            tokens_per_expert=tokens,
            rows_per_expert=padded,
            plan=plan,
            rows_on_host=None if plan is None else padded.clone(),  # `padded` belongs to the caller
        )

    def combine(self, request: CombineRequest) -> Combined:
        self.refuse_if_pending("combine")
        request.make_addressable()
        _check_memory(request)
        y, weights, has_weights = request.y, request.weights, request.topk_weights is not None
        c, rail = self._c, self._rail
        x = y.new_empty(request.num_tokens, self.config.hidden) if request.out is None else request.out
        weights_out = None
        if request.topk_weights is not None:
            weights_out = request.topk_weights.new_empty(request.num_tokens, self.config.num_topk)
        topk_weights = address_of(request.topk_weights)
        with self._operation("combine", request.plan, request.num_tokens, y.shape[0]) as step:
            operation = _C_cpu.COMBINE if weights is None else _C_cpu.WEIGHTED_COMBINE
            c.reuse(operation, request.plan.data_ptr(), [y.shape[1] * y.itemsize], has_weights)
            if weights is not None:
                self._send_weights(weights, step)
            step("push")
            phase, tag = "sums between nodes", self._tag(_SUMS)
            pending = [rail.receive(phase, m, c.incoming_sums(m), tag) for m in rail.others]
            for m in rail.others:
                c.push(m, address_of(y), topk_weights)
            step("send")
            for m in rail.others:
                rail.send(phase, m, c.reduce(m, has_weights), tag)
            step("push")
            c.push(self._topology.node, address_of(y), topk_weights)
            step("sum")
            for receive in pending:
                rail.wait(receive)
            c.sum(topk_weights, address_of(x), address_of(weights_out))
        self.pending = PendingOperation("combine") if request.is_send_only else None
        return Combined(x, weights_out)

    def receive(self) -> None:
        """Only note it: every operation is complete when its call returns."""
        self.pending = None

    def _send_weights(self, weights: Tensor, step: Callable[[str], None]) -> None:
        """Give the weights of this rank's tokens to the ranks of their experts."""
        c, address, num_tokens = self._c, address_of(weights), weights.shape[0]
        step("stage")
        c.stage([], address, num_tokens)
        step("send")
        c.compare_on_node("weights")
        pending = self._exchange(
            "weights between nodes", _WEIGHTS, c.incoming_payload, lambda m: c.pack_payload(m, [], address, num_tokens)
        )
        self._arrive(pending, c.payload_arrived)

    def _exchange(
        self,
        phase: str,
        kind: int,
        incoming: Callable[[int], memoryview],
        outgoing: Callable[[int], memoryview],
        *,
        is_list: bool = False,
    ) -> dict[int, Message | None]:
        """Start to receive into ``incoming(node)`` from every other node, then send ``outgoing(node)`` to it."""
        tag, rail = self._tag(kind), self._rail
        pending = {m: rail.receive(phase, m, incoming(m), tag) for m in rail.others}
        for m in rail.others:
            rail.send(phase, m, outgoing(m), tag, is_list=is_list)
        return pending

    def _arrive(self, pending: dict[int, Message | None], arrived: Callable[[int], None]) -> None:
        """Wait for the message from each other node, and call ``arrived(node)``."""
        for m, message in pending.items():
            self._rail.wait(message)
            arrived(m)

    def plan_capacity(self, num_rows: int, layout: str) -> int:
        return _C_cpu.plan_capacity(self._c_config, self.config.max_tokens_per_rank, num_rows, _LAYOUTS[layout])

    def limit_tokens_to_node(self, most: int) -> None:
        super().limit_tokens_to_node(most)
        self._c.max_tokens_to_node = most

    def _add_waits(self, wait_ns: Tensor, rail_before: list[int]) -> None:
        """Add the operation's wait for each rank. ``rail_before``: the rail's times at the start of the operation."""
        waited = self._c.waited_ns
        for rank, now, before in zip(self._rail.ranks, self._rail.waited_ns, rail_before, strict=True):
            waited[rank] += now - before
        wait_ns.detach().add_(torch.tensor(waited, dtype=torch.int64, device="cpu"))

    def check(self) -> None:
        self.health.raise_if_ended()

    def counters(self) -> dict[str, list[int]]:
        """Return bytes in total for each rank of the group: those in its memory, or sent to it between nodes."""
        if self.health.is_stopped:
            self.health.raise_if_ended()

        def of_rail(by_node: list[int]) -> list[int]:
            sent = dict(zip(self._rail.ranks, by_node, strict=True))
            return [sent.get(rank, 0) for rank in range(self._topology.num_ranks)]

        return {
            "inter_node_bytes_sent": of_rail(self._rail.bytes_sent),
            "inter_node_list_bytes_sent": of_rail(self._rail.list_bytes_sent),
            "intra_node_bytes_read": list(self._c.bytes_read),
            "intra_node_bytes_written": list(self._c.bytes_written),
        }

    @property
    def mask(self) -> Tensor:
        return torch.tensor(self._c.masked, dtype=torch.int32, device="cpu")

    def mask_rank(self, rank: int) -> None:
        self.health.raise_if_ended()
        self._c.mask(rank)

    def unmask(self, meet: Callable[[], Gather]) -> None:
        def reset(epoch: int) -> None:
            self._c.unmask(epoch)
            self._connections.why, self.pending = _C_cpu.AbortReason.left, None

        self._masks.unmask(meet, settle=lambda: self._c.epoch, reset=reset)

    def suspend(self, meet: Callable[[], Gather]) -> None:
        suspension.change("suspend", meet, self.health, lambda: None, lambda _: self._c.give_back())

    def resume(self, meet: Callable[[], Gather]) -> None:
        """Resume. The system allocates memory page by page when it is used.

        Every rank has the same epoch: it counts one only in an operation, which all ranks complete, or which ends the
        buffer.
        """
        suspension.change("resume", meet, self.health, lambda: None, lambda _: None)

    def destroy(self) -> None:
        self.health.stop(self._connections.interrupt, self._connections.free)

    def check_routing(self, topk_idx: Tensor, num_experts: int | None = None) -> None:
        check_memory("topk_idx", topk_idx)
        topk_idx = as_addressable("topk_idx", topk_idx).long()
        num_tokens, num_topk = topk_idx.shape
        if num_experts is None:
            num_experts = self.config.num_experts
        entry = _C_cpu.find_bad_entry(topk_idx.data_ptr(), num_tokens, num_topk, num_experts)
        if entry is not None:
            raise self.config.wording.reword(checks.invalid_entry_error(entry, num_experts))

    def compare_routing(self, planned: Tensor, given: Tensor, where: tuple[int, int]) -> None:
        with self.config.wording:
            self.check()
            if not torch.equal(planned, given):
                token, k = (planned != given).nonzero()[0].tolist()
                entries = int(given[token, k]), int(planned[token, k])
                raise checks.other_routing_error(f"topk_idx[{token}, {k}]", *entries, where)

    def _tag(self, kind: int) -> int:
        """Return the tag of a message: epoch and kind. So a message never matches the receive of another kind.

        Otherwise gloo would end the process if the message is longer than the memory of that receive.
        """
        return ((self._c.epoch & 0x0FFFFFFF) << 3) | kind

    @contextmanager
    def _operation(
        self, name: str, plan: Tensor | None, num_tokens: int, num_rows: int, label: int = 0
    ) -> Iterator[Callable[[str], None]]:
        """Begin one epoch, and end it, also after errors. Yield the function that names a step to profilers.

        plan, num_tokens, num_rows: a handle's; only with a plan are the sizes used.
        """
        with self.config.wording, profile_operation(name) as ranges:
            ranges.step("check")
            self.check()
            if plan is not None:
                self._c.check_plan(plan.data_ptr(), plan.numel(), num_tokens, num_rows)
            refused = None
            with self.health.operation(name) as operation:
                epoch = self._c.begin(self.config.timeout_s, torch.get_num_threads())
                operation.name = f"{name}, epoch {epoch}"
                begin = time.monotonic()
                self._rail.deadline = begin + self.config.timeout_s
                wait_ns, rail_before = self.wait_ns.get(name), list(self._rail.waited_ns)
                try:
                    try:
                        yield ranges.step
                    except _C_cpu.Refused as refusal:
                        refused = _word(refusal, label)
                        if not refusal.by_all:
                            self._end_out_of_step(refused)
                    ranges.step("finish")
                    self._rail.flush()
                    self._c.finish()
                    if wait_ns is not None:
                        self._add_waits(wait_ns, rail_before)
                    if self._trace is not None and refused is None:
                        self._trace.write(name, epoch, 1e3 * (time.monotonic() - begin), self.counters())
                except _C_cpu.MaskedByPeer as masked:
                    # Data that this rank has read may have been overwritten meanwhile.
                    self._connections.why, waited_s = _C_cpu.AbortReason.waited, time.monotonic() - begin
                    raise self._masks.end(name, epoch, masked.phase, self._topology.rank, waited_s)() from masked
                except _C_cpu.BadPeerData as bad:
                    facts = bad.rank, bad.field, bad.found, bad.least, bad.most
                    raise PeerDataError(name, epoch, self._topology.rank, *facts) from None
                except (_C_cpu.PeerLate, RailLate) as late:
                    cached = " with a handle" * (name == "dispatch" and plan is not None)
                    raise self._end_late(name, cached, epoch, late, time.monotonic() - begin) from late
            if refused is not None:  # every rank has refused it, so the buffer stays usable
                raise copy_error(refused)

    def _end_late(
        self, name: str, cached: str, epoch: int, late: _C_cpu.PeerLate | RailLate, waited_s: float
    ) -> PeerTimeoutError:
        """End the buffer's use, abort, and find out who is late."""
        ranks, gone = (late.ranks, late.gone) if isinstance(late, _C_cpu.PeerLate) else ([late.rank], [])
        error = partial(PeerTimeoutError, name, epoch, late.phase, self._topology.rank, waited_s=waited_s)
        self._connections.why = _C_cpu.AbortReason.waited
        self.health.end(partial(error, late_ranks=ranks))
        chain = find_late_ranks(
            self.config.store,
            self._topology.rank,
            ranks,
            gone=gone,
            beside=self._topology.node_ranks,
            operation=name + cached,
            epoch=epoch,
            is_stopped=lambda: self.health.is_stopped,
        )
        named = partial(error, late_ranks=chain.late_ranks, reason=chain.reason)
        self.health.end(named, replace=True)
        return named()

    def _end_out_of_step(self, refused: ValueError) -> None:
        """End the buffer's use: ranks of this node are in different operations, and other nodes cannot find it out."""
        failure = partial(copy_error, refused, ". This leaves the ranks of other nodes behind; destroy() this buffer")
        self.health.end(failure)
        raise failure()


def _word(refusal: _C_cpu.Refused, label: int) -> ValueError:
    """Return the error of a refusal. csrc/cpu/call.h lists the facts of each kind."""
    facts = refusal.facts
    if refusal.kind == "disagreement":
        return checks.disagreement_error(refusal.field, *facts)
    if refusal.kind == "too_few_rows":
        return checks.too_few_rows_error(zip(facts[::2], facts[1::2]), label)
    if refusal.kind == "too_many_to_node":
        return checks.too_many_to_node_error(zip(facts[::2], facts[1::2]), label)
    if refusal.kind == "too_many_rows":
        return checks.too_many_rows_error(*facts)
    return checks.too_many_choices_error(*facts)
