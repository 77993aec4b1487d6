"""The application's shape: bundles, limits, names and refusals, all without a cluster."""

import pytest
from pydantic import ValidationError

from cluster.app import build
from cluster.config import AppConfig
from cluster.executor import rank_environment
from cluster.placement import bundles
from specray.config import EngineConfig
from specray.errors import ConfigError


def test_the_router_shares_bundle_0_with_rank_0() -> None:
    config = AppConfig(tp_size=3, server={"router_cpus": 0.25, "rank_cpus": 0.5})
    assert bundles(config, with_gpus=False) == [{"CPU": 0.75}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert bundles(config, with_gpus=True)[2] == {"CPU": 0.5, "GPU": 1.0}


def test_the_defaults_fit_one_core() -> None:
    config = AppConfig()
    cpus = sum(bundle["CPU"] for bundle in bundles(config, with_gpus=False))
    assert cpus + config.server.num_ingress_replicas * config.server.ingress_cpus <= 1.0


def test_ranks_start_with_their_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert rank_environment(AppConfig(tp_size=2))["OMP_NUM_THREADS"] == "3"
    assert rank_environment(AppConfig(tp_size=16))["OMP_NUM_THREADS"] == "1"
    assert rank_environment(AppConfig(num_threads=3))["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "args",
    [{"modle": "x"}, {"server": {"prot": 1}}, {"server": {"request_timeout_s": 0}}, {"server": {"lease_s": 0.5}}],
)
def test_impossible_arguments_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AppConfig.model_validate(args)


def test_an_unknown_drafter_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="NGRAM"):
        build(AppConfig(speculative={"algorithm": "MAGIC"}))


def test_more_requests_may_be_open_than_the_engine_takes() -> None:
    deployment = build(AppConfig(max_running_requests=3, max_queued_requests=5))._bound_deployment
    assert deployment.max_ongoing_requests > 3 + 5
    assert deployment.max_queued_requests > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model": "smollm2-135m-instruct"}, "smollm2-135m-instruct"),
        ({"model": "owner/name"}, "owner/name"),
        ({"model": "/srv/models/mine/"}, "mine"),
        ({"model": "/srv/mine", "server": {"served_model_name": "yours"}}, "yours"),
    ],
)
def test_the_served_name_shows_no_path(options: dict[str, object], name: str) -> None:
    assert AppConfig.model_validate(options).model_name == name


def test_the_engine_gets_its_own_options_only() -> None:
    engine = AppConfig(page_size=8, speculative={"algorithm": "NGRAM"}).engine
    assert type(engine) is EngineConfig
    assert (engine.page_size, engine.speculative.algorithm) == (8, "NGRAM")
