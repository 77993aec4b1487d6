"""A rank in its own process, without Ray: `python -m benchmarks.gpu.rank_process SIZE CONFIG ADDRESS DRAFTS`.

It connects to the unix socket ADDRESS as a rank behind a router does, sends its capacity, and ends with the router.
Drafters connect at the unix socket DRAFTS; with an empty one the rank has its own.
"""

import socket
import sys
from pathlib import Path

import msgpack
import torch

from benchmarks.gpu.random_model import LLAMA_8B, TINY, make_target
from specray.channel import Channel
from specray.config import EngineConfig
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.served_loop import MAX_STARTED, ServedLoop
from specray.worker.startup import start_worker
from specray.worker.warm_up import warm_up

EPOCH = 1
LOADING_S = 600.0


def main(size: str, config_file: str, address: str, drafts: str) -> None:
    config = EngineConfig.model_validate_json(Path(config_file).read_text(encoding="utf-8"))
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = make_target(Path(config.model), {each.name: each for each in (LLAMA_8B, TINY)}[size], dtype, device)
    endpoint = DraftEndpoint(drafts, EPOCH, "colocated", device.type == "cuda") if drafts else None
    worker = start_worker(config, model=model, colocate=endpoint)
    print(worker.capacity.num_blocks * config.page_size, flush=True)
    if isinstance(worker.drafts, RemoteDrafts):
        worker.drafts.await_drafter(LOADING_S)
    warm_up(worker, config)
    sizes = {"max_draft_tokens": worker.drafts.max_draft_tokens, "max_plans": MAX_STARTED}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        channel = Channel(connection, EPOCH)
        channel.send(msgpack.packb(worker.capacity._asdict() | sizes))
        ServedLoop(worker).serve(channel)


if __name__ == "__main__":
    main(*sys.argv[1:])
