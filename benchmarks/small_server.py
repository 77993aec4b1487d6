"""A server of the small story model, for benchmarks of everything but the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.local_server import LocalServer
from specray.cli.local_server import free_port


@contextmanager
def small_server(folder: Path, model: Path, **options: Any) -> Iterator[int]:
    """The port of a server of `model` with one thread and these application options, which ends with the block.

    Its configuration is written into `folder`.
    """
    args = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1, **options}
    app = {"name": "specray", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [app]}))
    port = free_port()
    with LocalServer(config, port) as server:
        server.wait_until_ready()
        yield port
