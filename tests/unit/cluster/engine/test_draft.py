"""The actor of a colocated drafter."""

from concurrent.futures import wait
from pathlib import Path

import pytest

from cluster.engine.draft import DraftActor
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from tests.support.methods import METHODS


def test_a_drafter_process_loads_the_target_view_before_start(toy: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(toy), speculative=METHODS["EAGLE3"](toy, tmp_path), device="cpu", dtype="float32")
    actor = DraftActor(config, str(tmp_path / "heartbeat"))
    assert wait([actor._target], 60).done
    assert actor.start(64).max_draft_tokens > 0


def test_start_raises_the_error_of_a_missing_target(tmp_path: Path) -> None:
    actor = DraftActor(
        EngineConfig(model=str(tmp_path / "gone"), speculative=SpeculativeConfig(algorithm="NGRAM")),
        str(tmp_path / "heartbeat"),
    )
    with pytest.raises(ConfigError, match="nothing is there"):
        actor.start(64)
