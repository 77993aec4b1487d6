"""`--log-level` reaches every process of an application."""

import logging
from collections.abc import Iterator

import pytest

from cluster.app import build
from cluster.config import AppConfig
from cluster.engine.executor import rank_environment
from cluster.process_settings import most_verbose, set_log_level, set_log_level_from_environment

LOGGERS = ("ray.serve", "cluster", "specray")


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def levels() -> set[str]:
    return {logging.getLevelName(logging.getLogger(name).level) for name in LOGGERS}


def test_deployments_log_at_the_configured_level() -> None:
    ingress = build(AppConfig.model_validate({"server": {"log_level": "error"}}))
    router = ingress._bound_deployment.init_args[1]
    for deployment in (ingress._bound_deployment, router._bound_deployment):
        assert deployment._deployment_config.logging_config["log_level"] == "ERROR"


def test_ranks_and_drafters_log_at_the_configured_level(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = rank_environment(AppConfig.model_validate({"server": {"log_level": "error"}}), has_gpu=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    set_log_level_from_environment()
    assert levels() == {"ERROR"}


def test_a_process_without_a_level_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRAY_LOG_LEVEL", raising=False)
    set_log_level("critical")
    set_log_level_from_environment()
    assert levels() == {"CRITICAL"}


def test_processes_of_several_applications_take_the_most_verbose_level() -> None:
    assert most_verbose(["error", "debug", "warning"]) == "debug"


def test_messages_that_show_objects_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    set_log_level("info")
    logger = logging.getLogger("ray.serve")
    logger.info("Started %s.", object())
    logger.info("connected")
    assert [record.getMessage() for record in caplog.records if record.name == "ray.serve"] == ["connected"]
