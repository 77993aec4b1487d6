"""A real Ray cluster with an application over a tiny random model, shared by all tests of this folder."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli.serve import RAY_OPTIONS
from specray.cli.local_server import free_port

os.environ.update(RAY_OPTIONS | {"RAY_USAGE_STATS_ENABLED": "0"})  # as `specray serve` does
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
KEY = "k" * 40
LARGE_APP = {"speculative": {"algorithm": "examples.custom_drafter:LastSeen"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of `large_app` come last: beside the others its processes would take time, and start again with theirs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: "large_app" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama in float32 with the embedded model's tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from specray.models.files import resolve_model

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    embedded = resolve_model("smollm2-135m-instruct", None, "auto", progress=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (embedded / name).is_file():
            shutil.copy(embedded / name, folder)
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """The HTTP port of a started Serve instance."""
    import ray
    from ray import serve

    paths = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{paths}"  # so that workers import this checkout
    port = free_port()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _system_config={"metrics_report_interval_ms": 1000},  # the default of ten seconds would delay test_dashboard
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()
    os.environ["PYTHONPATH"] = paths


class App:
    """A deployed application."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120.0)

    def wait_until_ready(self) -> float:
        """Seconds until /health returns 200."""
        start = time.monotonic()
        while time.monotonic() - start < START_TIMEOUT_S:
            if self._status() == 200:
                return time.monotonic() - start
            time.sleep(0.2)
        raise TimeoutError(f"{self.url} was not ready after {START_TIMEOUT_S:g} s")

    def complete(self, prompt: str, **options: Any) -> Any:
        reply = self.http.post("/v1/completions", json={"prompt": prompt, **options})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _status(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0


class Deployer:
    """Starts applications."""

    def __init__(self, port: int, model: Path) -> None:
        self._port = port
        self._model = model

    def deploy(self, name: str, prefix: str, **options: Any) -> App:
        from ray import serve

        from cluster.app import build
        from cluster.config import AppConfig

        small = {"max_total_tokens": 8192, "num_threads": 1, "dtype": "float32", "device": "cpu"}
        config = AppConfig.model_validate({"model": str(self._model), **small, **options})
        run = threading.Thread(
            target=serve.run, args=(build(config),), kwargs={"name": name, "route_prefix": prefix}, daemon=True
        )
        run.start()
        app = App(f"http://127.0.0.1:{self._port}{prefix.rstrip('/')}")
        app.wait_until_ready()
        run.join()
        return app


@pytest.fixture(scope="session")
def deployer(ray_cluster: int, tiny_model: Path) -> Deployer:
    return Deployer(ray_cluster, tiny_model)


@pytest.fixture(scope="session")
def app(deployer: Deployer) -> App:
    """One rank with n-gram drafts, for two running and two waiting requests."""
    return deployer.deploy(
        "one",
        "/",
        speculative={"algorithm": "NGRAM"},
        max_running_requests=2,
        max_queued_requests=2,
        server={"served_model_name": "tiny", "failover_s": 90.0},
    )


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"alice {KEY}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="session")
def large_app(deployer: Deployer, key_file: str) -> App:
    """Queues for many requests, API keys, and a drafter of a user's own; test_overload redeploys it."""
    app = deployer.deploy("large_app", "/large_app", **LARGE_APP, server={"api_key_file": key_file})
    app.http.headers["authorization"] = f"Bearer {KEY}"
    return app
