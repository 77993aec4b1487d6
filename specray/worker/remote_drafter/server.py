"""A drafter in a process of its own: reads orders, drafts, answers. The target's side is `colocated`.

It shares nothing with the target but the ring of features: it has its own weights, its own KV for the same blocks and
its own copy of the rows. When the target dismisses it, or dies, its connection ends and so does `serve`.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig
from specray.layers.parallel import RankGroup
from specray.models.files import resolve_model
from specray.models.registry import context_length, load_config, resolve_dtype, shape_of
from specray.models.tokenizer import eos_token_ids, load_tokenizer
from specray.ops.attention import torch_dtype
from specray.spec_decode import make_drafter
from specray.spec_decode.drafter import Drafter, DraftFaultError, TargetView
from specray.worker.devices import choose_device
from specray.worker.remote_drafter.handshake import DrafterHandshake, pack_handshake
from specray.worker.remote_drafter.ring import HiddenStateRing
from specray.worker.remote_drafter.wire import DeltaDecoder, Order, Reply, pack, unpack_order, unpack_target_handshake


class DraftServer:
    """Has `drafter` draft for a target in another process."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._decoder = DeltaDecoder()
        self.handshake = DrafterHandshake(
            drafter.max_draft_tokens, list(drafter.aux_hidden_state_layers), drafter.reads_next_token
        )

    def serve(self, address: str, epoch: int, knocked: Callable[[], object] = lambda: None) -> None:
        """Draft for the target at the unix socket `address` until one of the two is gone.

        `knocked` is called once the target will find this drafter, which it does before its next step.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(ChannelClosedError):
            connection.connect(address)
            channel = Channel(connection, epoch)
            channel.send(pack_handshake(self.handshake))
            knocked()
            ring = _receive_ring(connection, channel)
            while True:
                channel.send(pack(self._answer(unpack_order(channel.recv()), ring)))

    def _answer(self, order: Order, ring: HiddenStateRing) -> Reply:
        start = time.perf_counter()
        self._decoder.release(order.freed_slots)
        self._drafter.release(order.freed_slots)
        try:
            trees = self._drafter.propose(self._decoder.context(order, ring.regions[order.region])).rows()
        except DraftFaultError as fault:
            return Reply(order.number, time.perf_counter() - start, [], fault.kind)
        return Reply(order.number, time.perf_counter() - start, trees, None)


def far_drafter(config: EngineConfig, target: TargetView, num_slots: int) -> Drafter:
    """The configured drafter for a target that `far_view` has seen and that has so many slots in its KV pool."""
    drafter = make_drafter(config.speculative, replace(target, num_slots=num_slots))
    assert drafter is not None, "plain decoding has no drafter"
    return drafter


def far_view(config: EngineConfig) -> TargetView:
    """What a drafter may know of a target that runs in another process, from the same configuration and files.

    But for its slots, of which there are none: their number is known once the target has loaded.
    """
    device = choose_device(config, rank=0)
    folder = resolve_model(config.model, config.revision, config.load_format, progress=False)
    model_config = load_config(folder)
    return TargetView(
        model=None,
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
    )


def _receive_ring(connection: socket.socket, channel: Channel) -> HiddenStateRing:
    connection.settimeout(None)
    try:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise ChannelClosedError(f"cannot receive: {error}") from error
    if not fds:
        raise ChannelClosedError("the target did not take this drafter")
    try:
        target_handshake = unpack_target_handshake(channel.recv())
        return HiddenStateRing(
            fds[0], target_handshake.region_tokens, target_handshake.width, torch_dtype(target_handshake.dtype)
        )
    finally:
        os.close(fds[0])
