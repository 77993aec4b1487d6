"""Simulated acceptance: rates, required confirmation, and how it is reported."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.sampling_params import SamplingParams
from specray.spec_decode.node_sampler import coupled
from specray.spec_decode.simulation import rates_of
from specray.spec_decode.verifier import make_sampler
from tests.support.engine import make_llm
from tests.support.graph_stand_in import recorded_graphs
from tests.support.methods import METHODS

CONFIRMED = {"simulate_output_is_meaningless": True}


@pytest.mark.parametrize(("length", "rates"), [(1.0, [0.0]), (2.25, [1.0, 0.25]), (3.0, [1.0, 1.0, 0.0]), (1.5, [0.5])])
def test_rates_of_an_accept_length(length: float, rates: list[float]) -> None:
    assert rates_of(length) == rates
    assert 1 + sum(rates) == length


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"simulate_accept_length": 1.0}, [0.0]),
        ({"simulate_accept_length": 2.5}, [1.0, 0.5]),
        ({"simulate_accept_rates": [0.8, 0.25]}, [0.8, 0.25]),
    ],
)
def test_drafts_are_accepted_at_the_configured_rates(
    options: dict[str, Any], expected: list[float], toy: Path, tmp_path: Path
) -> None:
    """With a head of random weights, and trees that are deeper than the configured rates."""
    check_rates(options, expected, toy, tmp_path)


def test_rates_are_the_same_in_graphs(toy: Path, tmp_path: Path) -> None:
    with recorded_graphs() as graphs:
        check_rates({"simulate_accept_rates": [0.8, 0.25]}, [0.8, 0.25], toy, tmp_path, max_running_requests=2)
    assert graphs[0].replayed


def check_rates(
    options: dict[str, Any], expected: list[float], toy: Path, tmp_path: Path, **engine_options: Any
) -> None:
    speculative = SpeculativeConfig(**METHODS["EAGLE3"](toy, tmp_path).model_dump() | options | CONFIRMED)
    params = [SamplingParams(temperature=0.0, seed=seed, max_tokens=100, ignore_eos=True) for seed in range(8)]
    with make_llm(toy, speculative=speculative, **engine_options) as llm:
        usages = [g.choices[0].usage for g in llm.generate([[0, 5 + i, 6] for i in range(8)], params)]
    reached = [0] * 5
    for usage in usages:
        assert usage is not None
        assert usage.is_lossy
        for depth, count in enumerate(usage.accept_histogram):
            for reached_depth in range(depth + 1):
                reached[reached_depth] += count
    for depth, rate in enumerate(expected):
        assert reached[depth] > 100
        assert reached[depth + 1] / reached[depth] == pytest.approx(rate, abs=0.12)
    assert not any(reached[len(expected) + 1 :])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulate_accept_length": 3.0}, "set simulate_output_is_meaningless: true as well"),
        ({"simulate_accept_rates": [0.5]}, "set simulate_output_is_meaningless: true as well"),
        (CONFIRMED, "has nothing to confirm"),
        (CONFIRMED | {"simulate_accept_length": 3.0, "simulate_accept_rates": [0.5]}, "set one of them"),
        (CONFIRMED | {"simulate_accept_length": 3.0, "verification": "rejection"}, "replaces verification"),
        (CONFIRMED | {"simulate_accept_length": 3.0, "accept_threshold_acc": 0.5}, "replaces verification"),
        (CONFIRMED | {"simulate_accept_length": 3.0, "algorithm": None}, "has no effect while speculative.algorithm"),
    ],
)
def test_simulation_requires_confirmation_and_excludes_other_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**{"algorithm": "NGRAM"} | options)
    assert make_sampler(SpeculativeConfig(algorithm="NGRAM")) is coupled


@pytest.mark.parametrize("options", [{"simulate_accept_length": 3.0}, {"simulate_accept_rates": [0.5]}])
def test_simulation_cannot_be_enabled_in_a_running_server(options: dict[str, Any]) -> None:
    current = SpeculativeConfig(algorithm="NGRAM")
    with pytest.raises(ConfigError, match="cannot replace"):
        current.check_successor(SpeculativeConfig(**{"algorithm": "NGRAM"} | CONFIRMED | options))


def test_simulation_is_reported_in_logs_and_metrics(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    speculative = SpeculativeConfig(**{"algorithm": "NGRAM", "simulate_accept_length": 2.0} | CONFIRMED)
    with caplog.at_level(logging.WARNING), make_llm(toy, speculative=speculative) as llm:
        assert llm.engine.stats.values["specray_acceptance_is_simulated"] == 1
        assert llm.engine.stats.labelled["specray_drafter_info"] == {"SIMULATED NGRAM": 1}
    assert "the output is MEANINGLESS" in caplog.text
