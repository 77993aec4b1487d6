"""A drafter in its own process: receives orders, drafts and replies. The target's side lives in `source`.

It shares the ring of hidden states with the target, and with CUDA IPC the memory of outcomes and trees. It has its own
weights, its own KV for the same blocks and its own copy of the request table. When the target dismisses it or dies, the
connection closes and `serve` returns.

After an early order (see `Order`) the device alone waits for the outcome. So this host runs a step ahead, like the
target's, and it replies when the trees are complete.

The drafters of a tensor-parallel target have a group of their own, and each has a part of the draft model. The first
one alone talks to the target, and passes orders, outcomes and hidden states on to the others (`follow`). So all read
the same orders, even where the target skips steps, and a fault of any of them is a fault of the drafter.
"""

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specray.channel import Channel, ChannelClosedError, spin_seconds
from specray.config import MAX_TREE_NODES, EngineConfig
from specray.errors import EngineDeadError
from specray.layers.parallel import RankGroup
from specray.models.files import target_folder
from specray.models.registry import context_length, load_config, resolve_dtype, shape_of
from specray.models.tokenizer import eos_token_ids, load_tokenizer
from specray.ops.attention import torch_dtype
from specray.ops.graphs import Graphs, make_graphs
from specray.ops.host_copy import HostCopy, wait_for
from specray.ops.linear import fixed_order
from specray.spec_decode import make_drafter
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import Drafter, DraftFaultError, TargetView, composite_of, device_drafter
from specray.spec_decode.pending_trees import limited
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.verifier import is_padded, make_sampler
from specray.worker.draft_graphs import DraftGraphs, graphs_of_members
from specray.worker.loading import choose_device
from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.device_trees import DeviceTrees
from specray.worker.remote_drafter.handshake import REFUSED, DrafterHandshake, pack_handshake
from specray.worker.remote_drafter.ring import HiddenStateRing
from specray.worker.remote_drafter.wire import (
    DeltaDecoder,
    DraftReply,
    Order,
    TargetHandshake,
    pack,
    unpack_order,
    unpack_target_handshake,
)
from specray.worker.warm_up import WarmUpSizes, warm_up_drafter

_POLL_S = 2e-5  # the host waits for the device and for the next order by turns

logger = logging.getLogger(__name__)


class _EarlyTrees(NamedTuple):
    """Trees of an early order without a reply."""

    number: int
    num_nodes: HostCopy
    early_nodes: int

    def reply(self) -> DraftReply:
        """Waits for the trees."""
        reply = DraftReply.of_sizes(self.number, self.num_nodes.wait().tolist(), has_others=False)
        return reply._replace(early_nodes=self.early_nodes)


class DraftServer:
    """Runs `drafter`, whose tensors are on `device`, for a target in another process."""

    def __init__(
        self,
        drafter: Drafter,
        device: torch.device,
        graphs: DraftGraphs | None = None,
        table: RequestTable | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """`table` is the empty one that CUDA graphs were captured for, those of the drafter's members or `graphs`.

        `group` are the drafters that draft together; None: this one alone.
        """
        self._drafter = drafter
        self._device = device
        self._group = group or RankGroup()
        self._graphs, self._table = graphs, table
        self._unsent: deque[_EarlyTrees] = deque()
        self._continues = False  # graphs have read all tokens of the last order's requests
        self._composite = composite_of(drafter)
        self.handshake = DrafterHandshake(
            drafter.max_draft_tokens, list(drafter.aux_hidden_state_layers), drafter.reads_next_token
        )

    def serve(
        self,
        address: str,
        epoch: int,
        on_connect: Callable[[], object] = lambda: None,
        on_accept: Callable[[], object] = lambda: None,
    ) -> None:
        """Draft for the target at the unix socket `address` until one of the two ends.

        `on_connect` is called when the handshake is sent; the target reads it before its next step. `on_accept` is
        called when the target has accepted this drafter; EngineDeadError if it has not.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(ChannelClosedError):
            connection.connect(address)
            channel = Channel(connection, epoch)
            channel.send(pack_handshake(self.handshake))
            on_connect()
            ring, trees, target = self._receive_handshake(connection, channel)
            on_accept()
            decoder = DeltaDecoder(target, self._device, self._table)
            self._group.broadcast_bytes(pack(target))
            spin_s = spin_seconds(self._device.type)
            with contextlib.closing(ring):
                while True:
                    order = unpack_order(self._group.broadcast_bytes(self._next_order(channel, spin_s)))
                    if order.region == NONE:
                        self._record(order, decoder)
                        continue
                    if order.outcome_nodes and trees is not None:
                        self._draft_early(order, ring, decoder, trees)
                        continue
                    while self._unsent:
                        channel.send(pack(self._unsent.popleft().reply()))
                    channel.send(pack(self._reply(order, self._pass_on(order, ring), decoder, trees)))

    def follow(self) -> None:
        """Draft along with the first drafter of the group, until that one ends."""
        target = unpack_target_handshake(self._group.broadcast_bytes(None))
        decoder, dtype = DeltaDecoder(target, self._device, self._table), torch_dtype(target.dtype)
        while True:
            try:
                order = unpack_order(self._group.broadcast_bytes(None))
            except RuntimeError as error:  # of torch.distributed
                logger.info("the first drafter has ended: %s", error)
                return
            states = torch.empty(order.num_tokens, target.width, dtype=dtype, device=self._device)
            self._draft_along(order, states, decoder)

    def _next_order(self, channel: Channel, spin_s: float) -> bytes:
        """It, before which the replies leave whose trees are complete by then."""
        while self._unsent:
            if self._unsent[0].num_nodes.is_there:
                channel.send(pack(self._unsent.popleft().reply()))
            elif channel.poll(_POLL_S):
                break
        return channel.recv(spin_s=spin_s)

    def _draft_early(
        self, order: Order, ring: HiddenStateRing | DeviceRing, decoder: DeltaDecoder, trees: DeviceTrees
    ) -> None:
        """Launch what drafts after a step whose outcome only the device will know."""
        count = len(order.requests)

        def read() -> tuple[Tensor, Tensor]:
            states = ring.read(order.region)[: order.num_tokens]
            return trees.outcome(order.region, count, order.outcome_nodes), states

        tree = self._launch_early(order, decoder, read)
        trees.put(order.region, order.number, limited(tree, [request.draft_limit for request in order.requests]))
        self._unsent.append(_EarlyTrees(order.number, HostCopy(tree.num_nodes), self._early_nodes(count)))

    def _draft_along(self, order: Order, states: Tensor, decoder: DeltaDecoder) -> None:
        """What the first drafter does, which sends `states`."""
        if order.region == NONE:
            self._record(order, decoder)
        elif order.outcome_nodes:
            size = len(order.requests), 2 + 2 * order.outcome_nodes
            outcome = torch.empty(size, dtype=torch.int64, device=self._device)
            self._launch_early(order, decoder, lambda: (outcome, states))
        else:
            self._reply(order, self._group.broadcast(states), decoder)

    def _launch_early(
        self, order: Order, decoder: DeltaDecoder, read: Callable[[], tuple[Tensor, Tensor]]
    ) -> DraftTree:
        """The trees, on every drafter of the group. `read` returns (outcome, hidden states), the first one's count."""
        assert self._graphs is not None, "see `DraftReply.early_nodes`"
        self._drafter.release(order.freed_slots)
        decoder.enter(order)
        decoder.flush()

        def passed_on() -> tuple[Tensor, Tensor]:
            outcome, states = read()
            return self._group.broadcast(outcome), self._group.broadcast(states)

        return self._graphs.draft_early(order.requests, order.outcome_nodes, passed_on)

    def _record(self, order: Order, decoder: DeltaDecoder) -> None:
        """What the step of an early order has committed, for the drafter's record of what it has read."""
        self._drafter.release(order.freed_slots)
        tree = DraftTree.from_lists([], self._device)  # nobody takes it
        self._continues &= self._drafter.propose(decoder.committed(order, tree)) is tree

    def _early_nodes(self, num_requests: int) -> int:
        """See `DraftReply.early_nodes`."""
        return self._graphs.early_nodes(num_requests) if self._graphs is not None and self._continues else 0

    def _pass_on(self, order: Order, ring: HiddenStateRing | DeviceRing) -> Tensor:
        """The hidden states of an order, which the other drafters get too."""
        return self._group.broadcast(ring.read(order.region)[: order.num_tokens].to(self._device, non_blocking=True))

    @torch.inference_mode()
    def warm_up(self, config: EngineConfig, target: TargetHandshake, sizes: WarmUpSizes) -> None:
        """Compile all kernels, before it connects to a target with these tables; see `warm_up`."""
        zeros = torch.zeros(target.region_tokens, target.width, dtype=torch_dtype(target.dtype), device=self._device)
        decoder, trees = DeltaDecoder(target, self._device, self._table), None
        if self._device.type == "cuda":
            trees = DeviceTrees.make(target.num_slots, 1 + self._drafter.max_draft_tokens, self._device)
        warm_up_drafter(lambda order: self._reply(order, zeros, decoder, trees), config, sizes)

    def _reply(
        self, order: Order, region: Tensor, decoder: DeltaDecoder, trees: DeviceTrees | None = None
    ) -> DraftReply:
        """Draft; the trees go to `trees`, for which the target's device waits, or into the reply."""
        start = time.perf_counter()
        self._drafter.release(order.freed_slots)
        context = decoder.context(order, region)
        if self._graphs is not None:
            context = replace(context, replay=self._graphs.replay(context))
        try:
            drafted = self._drafter.propose(context)
        except DraftFaultError as fault:
            if trees is not None:
                trees.put(order.region, order.number, None)
            return DraftReply.failed(order.number, time.perf_counter() - start, fault.kind)
        tree = limited(drafted, context.draft_limits)
        if trees is not None:
            trees.put(order.region, order.number, tree)
        has_others = self._composite is not None and len(self._composite.members) > 1
        roots = context.roots if has_others else None  # one that is broken must not end the others
        if trees is None:
            reply = DraftReply.of(order.number, 0.0, tree, roots)  # waits for the device
        else:
            reply = DraftReply.of_sizes(order.number, tree.num_nodes.tolist(), has_others)
        if not order.requests:  # no tree was waited for, and the target may write the region again after the reply
            wait_for(self._device)
        uses = [] if self._composite is None else list(self._composite.take_uses())
        self._continues = self._graphs is not None and drafted is self._graphs.last
        early_nodes = self._early_nodes(len(order.requests))
        return reply._replace(seconds=time.perf_counter() - start, uses=uses, early_nodes=early_nodes)

    def _receive_handshake(
        self, connection: socket.socket, channel: Channel
    ) -> tuple[HiddenStateRing | DeviceRing, DeviceTrees | None, TargetHandshake]:
        connection.settimeout(None)
        try:
            answer, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise ChannelClosedError(f"cannot receive: {error}") from error
        if answer == REFUSED:
            raise EngineDeadError(f"the target refused this drafter: {channel.recv().decode(errors='replace')}")
        if not fds:
            raise ChannelClosedError("the target closed the connection")
        try:
            target = unpack_target_handshake(channel.recv())
            dtype = torch_dtype(target.dtype)
            size = (target.region_tokens, target.width, dtype, self._device)
            ring = DeviceRing.open(target.device_ring, *size) if target.device_ring else HiddenStateRing(fds[0], *size)
            trees, most_nodes = None, 1 + self._drafter.max_draft_tokens
            if target.device_trees:
                trees = DeviceTrees.open(target.device_trees, target.num_slots, most_nodes, self._device)
        finally:
            os.close(fds[0])
        return ring, trees, target


def make_draft_server(config: EngineConfig, target: TargetView, num_slots: int) -> DraftServer:
    """A server of the configured drafter, whose CUDA graphs are captured and whose kernels are compiled."""
    drafter, device = make_remote_drafter(config, target, num_slots), target.device
    made = None if config.disable_cuda_graph else make_graphs(device, target.attention_backend)
    if made is None and device.type == "cpu":  # whose kernels are compiled already
        return DraftServer(drafter, device, group=target.group)
    max_tokens = target.context_length + MAX_TREE_NODES + config.page_size
    dimensions = config.max_running_requests, max_tokens, config.page_size, target.shape.vocab_size
    table = RequestTable(*dimensions, device)
    if made is None or not is_padded(make_sampler(config.speculative)):
        server = DraftServer(drafter, device, None, table, target.group)
    else:
        server = DraftServer(drafter, device, _capture(config, target, made, drafter, table), table, target.group)
    width = target.shape.hidden_size * len(drafter.aux_hidden_state_layers)
    states = (config.chunked_prefill_size, width, str(target.dtype).removeprefix("torch."))
    sizes = WarmUpSizes(num_slots, target.context_length, target.shape.vocab_size, drafter.max_draft_tokens)
    server.warm_up(config, TargetHandshake(*states, *dimensions), sizes)
    return server


def _capture(
    config: EngineConfig, target: TargetView, made: Graphs, drafter: Drafter, table: RequestTable
) -> DraftGraphs | None:
    """Capture the graphs of a drafter, or those of its members, for which it returns None."""
    rows = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
    sizes = table, target.shape.hidden_size, target.dtype, rows
    graphs, without = None, []
    if (composite := composite_of(drafter)) is not None:
        without = graphs_of_members(made, composite, *sizes)
    elif isinstance(recorded := device_drafter(drafter), str):
        without = [f"drafts: {recorded}"]
    else:
        graphs = DraftGraphs(made, drafter, recorded, *sizes, goes_on=config.speculative.merged_draft_tokens is None)
        graphs.capture()
    for each in without:
        logger.warning("without CUDA graphs: %s", each)
    return graphs


def make_remote_drafter(config: EngineConfig, target: TargetView, num_slots: int) -> Drafter:
    """The configured drafter for the target of `remote_target_view`, with the target's number of KV slots."""
    with fixed_order(config.deterministic):
        drafter = make_drafter(config.speculative, replace(target, num_slots=num_slots))
    assert drafter is not None, "plain decoding has no drafter"
    return drafter


def remote_target_view(config: EngineConfig) -> TargetView:
    """What a drafter may know of a target in another process, from the same configuration and files.

    `num_slots` is 0: it is known once the target has loaded.
    """
    device = choose_device(config, rank=0)
    folder = target_folder(config, progress=False)
    model_config = load_config(folder, config.model_impl)
    return TargetView(
        model=None,
        kv_pool=None,
        shape=shape_of(model_config, RankGroup()),
        dtype=resolve_dtype(config.dtype, model_config, device),
        folder=folder,
        load_format=config.load_format,
        architecture=(model_config.architectures or [""])[0],
        eos_token_ids=eos_token_ids(folder, load_tokenizer(folder)),
        context_length=context_length(model_config, config.context_length),
        num_slots=0,
        max_rows=config.max_running_requests,
        attention_backend=config.attention_backend,
        device=device,
        quantization=config.quantization,
        moe_runner_backend=config.moe_runner_backend,
    )
