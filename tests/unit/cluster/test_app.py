"""The application's deployments and configuration, without a cluster: bundles, limits, names, invalid options."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private import constants

from cluster.app import build
from cluster.config import AppConfig
from cluster.engine.executor import rank_environment
from cluster.engine.placement import bundles, draft_resources, rank_resources
from cluster.process_settings import LARGE_MESSAGES, ONE_LOOP
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from tests.support.heads import write_random_head
from tests.support.toy import write_toy


def test_the_router_shares_bundle_0_with_rank_0() -> None:
    config = AppConfig(tp_size=3, server={"router_cpus": 0.25, "rank_cpus": 0.5})
    assert bundles(config, with_gpus=False) == [{"CPU": 0.75}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert bundles(config, with_gpus=True)[2] == {"CPU": 0.5, "GPU": 1.0}


def test_only_bundle_0_reserves_a_drafter() -> None:
    config = AppConfig(tp_size=2, speculative={"algorithm": "NGRAM"}, draft={"cpus": 0.5, "gpu_share": 0.25})
    plain = config.model_copy(update={"speculative": SpeculativeConfig()})
    drafting, without = bundles(config, with_gpus=True), bundles(plain, with_gpus=True)
    assert drafting[0]["CPU"] == without[0]["CPU"] + 0.5
    assert drafting[1] == without[1]
    assert [rank_resources(config, True, rank)["GPU"] for rank in range(2)] == [0.75, 1.0]
    assert draft_resources(config, with_gpus=True) == {"CPU": 0.5, "GPU": 0.25}


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_two_replaceable_drafters_share_the_resources_of_one(algorithm: str | None) -> None:
    config = AppConfig(
        speculative={"algorithm": algorithm}, draft={"cpus": 0.5, "gpu_share": 0.25}, server={"admin_key_file": "keys"}
    )
    one = draft_resources(config, with_gpus=True)
    assert one == {"CPU": 0.25, "GPU": 0.125}
    rank, (bundle,) = rank_resources(config, True, 0), bundles(config, with_gpus=True)
    assert rank["GPU"] + 2 * one["GPU"] == bundle["GPU"] == 1.0
    assert rank["CPU"] + 2 * one["CPU"] + config.server.router_cpus == pytest.approx(bundle["CPU"])


def test_an_inline_drafter_reserves_nothing() -> None:
    options = {"speculative": {"algorithm": "NGRAM"}, "server": {"admin_key_file": "keys"}}
    inline = AppConfig.model_validate(options | {"draft": {"placement": "inline"}})
    assert not inline.has_draft_actor
    assert bundles(inline, with_gpus=True) == bundles(AppConfig(), with_gpus=True)


def test_the_defaults_fit_one_core() -> None:
    config = AppConfig()
    cpus = sum(bundle["CPU"] for bundle in bundles(config, with_gpus=False))
    assert cpus + config.server.num_ingress_replicas * config.server.ingress_cpus <= 1.0


def test_ingress_and_router_have_one_event_loop_and_take_large_messages() -> None:
    """Serve still knows the variables: it reads them by these names when it is imported."""
    variables = ONE_LOOP | LARGE_MESSAGES
    ingress = build(AppConfig())._bound_deployment
    _, router = ingress.init_args
    for deployment in (ingress, router._bound_deployment):
        assert variables.items() <= deployment.ray_actor_options["runtime_env"]["env_vars"].items()
    assert all(hasattr(constants, name) for name in variables)


def test_ranks_divide_the_compute_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.engine.executor.num_cores", lambda: 8)
    assert rank_environment(AppConfig(tp_size=2), has_gpu=False)["OMP_NUM_THREADS"] == "3"
    assert rank_environment(AppConfig(tp_size=16), has_gpu=False)["OMP_NUM_THREADS"] == "1"
    assert rank_environment(AppConfig(num_threads=3), has_gpu=False)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "args",
    [{"modle": "x"}, {"server": {"prot": 1}}, {"server": {"request_timeout_s": 0}}, {"server": {"lease_s": 0.5}}],
)
def test_invalid_arguments_are_rejected(args: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AppConfig.model_validate(args)


def test_files_that_do_not_fit_are_rejected_at_build(tmp_path: Path) -> None:
    """Serve would report an error of a replica only after three tries."""
    head = write_random_head(tmp_path / "head", write_toy(tmp_path), 3)
    options = {"model": str(tmp_path), "speculative": {"algorithm": "EAGLE", "draft_model_path": str(head)}}
    with pytest.raises(ConfigError, match="holds an EAGLE-3 head"):
        build(AppConfig.model_validate(options))
    elsewhere = AppConfig.model_validate(options | {"model": "/only/on/other/machines"})
    assert build(elsewhere)._bound_deployment.name == "OpenAIIngress"


@pytest.mark.parametrize("access_log", [False, True])
def test_the_access_log_is_an_option(access_log: bool) -> None:
    deployment = build(AppConfig.model_validate({"server": {"access_log": access_log}}))._bound_deployment
    assert deployment._deployment_config.logging_config["enable_access_log"] is access_log


def test_an_unknown_drafter_is_rejected_at_build() -> None:
    with pytest.raises(ConfigError, match="NGRAM"):
        build(AppConfig(speculative={"algorithm": "MAGIC"}))


@pytest.mark.parametrize(
    "several",
    [
        {"server": {"num_replicas": 100}},
        {"autoscaling": {"enabled": True, "max_replicas": 100, "target_running": 2}},
    ],
)
def test_the_ingress_allows_more_open_requests_than_the_engines_admit(several: dict[str, Any]) -> None:
    config = AppConfig.model_validate({"max_running_requests": 3, "max_queued_requests": 5, **several})
    deployment = build(config)._bound_deployment
    assert deployment.max_ongoing_requests > 100 * (3 + 5)
    assert deployment.max_queued_requests > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model": "smollm2-135m-instruct"}, "smollm2-135m-instruct"),
        ({"model": "owner/name"}, "owner/name"),
        ({"model": "/srv/models/mine/"}, "mine"),
        ({"model": "/srv/mine", "server": {"served_model_name": "yours"}}, "yours"),
        ({"model": "/srv/mine", "server": {"served_model_name": ["yours", "ours"]}}, "yours"),
    ],
)
def test_the_served_name_contains_no_path(options: dict[str, object], name: str) -> None:
    assert AppConfig.model_validate(options).model_name == name


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"])
def test_llama_3_is_known_by_both_of_its_names_on_the_hub(model: str) -> None:
    names = AppConfig(model=model).model_names
    assert {"meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"} <= set(names)
    assert names[0] == model


def test_the_engine_receives_engine_options_only() -> None:
    engine = AppConfig(page_size=8, speculative={"algorithm": "NGRAM"}).engine
    assert type(engine) is EngineConfig
    assert (engine.page_size, engine.speculative.algorithm) == (8, "NGRAM")
