"""A real Ray cluster with an application over a tiny random model, shared by all tests of this folder."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from cluster.cli.serve import RAY_OPTIONS
from specray.cli.local_server import free_port
from tests.support.stories import stories_tokenizer

os.environ.update(RAY_OPTIONS | {"RAY_USAGE_STATS_ENABLED": "0"})  # as `specray serve` does
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
NUM_GPUS = 2  # that Ray believes to be there; applications set `device: cpu`
DRAIN_S = 600.0  # the default can cut streams on a busy machine: another engine starts beside them
KEY, ADMIN_KEY = "k" * 40, "the-operators-key"
LONG = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0, "seed": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests come in the order in which they change the only application: as it is, redeployed, with another drafter."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: len({"redeployment", "drafted"}.intersection(getattr(item, "fixturenames", ()))))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama in float32 with a small tokenizer, which every process of an engine loads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
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
    stories_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
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
        num_gpus=NUM_GPUS,
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

    def deploy(self, **options: Any) -> App:
        """Deploy the application, or replace it."""
        from ray import serve

        from cluster.app import build
        from cluster.config import AppConfig

        small = {"max_total_tokens": 8192, "num_threads": 1, "dtype": "float32", "device": "cpu"}
        config = AppConfig.model_validate({"model": str(self._model), **small, **options})
        run = threading.Thread(target=serve.run, args=(build(config),), kwargs={"name": "app"}, daemon=True)
        run.start()
        app = App(f"http://127.0.0.1:{self._port}")
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
        speculative={"algorithm": "NGRAM"},
        max_running_requests=2,
        max_queued_requests=2,
        server={"served_model_name": "tiny", "failover_s": 90.0, "drain_s": DRAIN_S, "audit": 1.0},
    )


class Redeployment(NamedTuple):
    """What clients saw while the application was redeployed."""

    app: App
    expected: str  # the text of LONG before
    replies: list[httpx.Response]  # to streams of LONG, of which two were open at any time


@pytest.fixture(scope="session")
def redeployment(app: App, deployer: Deployer, tmp_path_factory: pytest.TempPathFactory) -> Redeployment:
    """From now on the application has queues for many requests, API keys, and a drafter of a user's own."""
    folder = tmp_path_factory.mktemp("keys")
    server: dict[str, Any] = {"served_model_name": "tiny", "request_timeout_s": 500.0, "drain_s": DRAIN_S}
    for option, line in {"api_key_file": f"alice {KEY}\n", "admin_key_file": f"operator {ADMIN_KEY}\n"}.items():
        (folder / option).write_text(line)
        (folder / option).chmod(0o600)
        server[option] = str(folder / option)
    expected = app.complete(**LONG)["choices"][0]["text"]
    app.http.headers["authorization"] = f"Bearer {KEY}"

    def stream_until(update: Future[App]) -> list[httpx.Response]:
        replies = []
        while not update.done():
            replies.append(app.http.post("/v1/completions", json=LONG | {"stream": True}))
            time.sleep(0.0 if replies[-1].status_code == 200 else 0.2)
        return replies

    with ThreadPoolExecutor(3) as pool:
        drafter = {"algorithm": "examples.custom_drafter:LastSeen"}
        update = pool.submit(deployer.deploy, speculative=drafter, server=server)
        senders = [pool.submit(stream_until, update) for _ in range(2)]
        update.result()
        return Redeployment(app, expected, [reply for sender in senders for reply in sender.result()])


@pytest.fixture(scope="session")
def large_app(redeployment: Redeployment) -> App:
    return redeployment.app
