"""A drafter in its own process, without Ray: `python -m benchmarks.gpu.draft_process CONFIG SLOTS ADDRESS EPOCH`.

Prints a line when it is connected, and ends with the target.
"""

import sys
from pathlib import Path

import torch

from specray.config import EngineConfig
from specray.worker.remote_drafter.server import make_draft_server, remote_target_view


def main(config_file: str, num_slots: str, address: str, epoch: str) -> None:
    config = EngineConfig.model_validate_json(Path(config_file).read_text(encoding="utf-8"))
    server = make_draft_server(config, remote_target_view(config), int(num_slots))
    with torch.inference_mode():
        server.serve(address, int(epoch), on_connect=lambda: print("connected", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
