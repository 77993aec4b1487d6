"""Which budget a configuration gets that names none."""

from typing import Any

import pytest

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.draft_budget import make_budget
from specray.engine.executor import Capacity

SERVER = Capacity(40, 6, 100, 50, [1], learns_budget=True)
NGRAM = {"algorithm": "NGRAM"}
LOSSY = {"accept_threshold_single": 0.5}
SIMULATED = {"simulate_accept_length": 2.0, "simulate_output_is_meaningless": True}


@pytest.mark.parametrize(
    ("options", "changes", "learns"),
    [
        (NGRAM, {}, True),
        ({}, {}, False),
        (NGRAM, {"learns_budget": False}, False),
        (NGRAM, {"has_one_text": False}, False),
        (NGRAM | {"verification": "rejection"}, {}, False),
        (NGRAM | LOSSY, {}, False),
        (NGRAM | SIMULATED, {}, False),
        (NGRAM | {"budget": "static"}, {}, False),
        (NGRAM | {"budget": "auto"}, {"learns_budget": False}, True),
    ],
)
def test_a_server_learns_its_budget_where_drafts_do_not_change_the_text(
    options: dict[str, Any], changes: dict[str, Any], learns: bool
) -> None:
    config = EngineConfig(speculative=SpeculativeConfig(**options))
    assert make_budget(config, config.speculative, SERVER._replace(**changes)).learns is learns
