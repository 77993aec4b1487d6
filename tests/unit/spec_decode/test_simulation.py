"""Acceptance by lot: the rates that were asked for, nothing on by accident, and a word of it wherever one looks."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.sampling_params import SamplingParams
from specray.spec_decode.node_sampler import coupled
from specray.spec_decode.samplers import make_sampler
from specray.spec_decode.simulation import rates_of
from tests.support.engine import make_llm
from tests.support.methods import METHODS

MEANT = {"simulate_output_is_meaningless": True}


@pytest.mark.parametrize(("length", "rates"), [(1.0, [0.0]), (2.25, [1.0, 0.25]), (3.0, [1.0, 1.0, 0.0]), (1.5, [0.5])])
def test_a_length_is_reached_by_whole_tokens_and_one_lot(length: float, rates: list[float]) -> None:
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
def test_drafts_are_accepted_as_often_as_asked(
    options: dict[str, Any], expected: list[float], toy: Path, tmp_path: Path
) -> None:
    """Of random weights, which hardly ever agree, and in trees of more levels than are to be accepted."""
    speculative = SpeculativeConfig(**METHODS["EAGLE3"](toy, tmp_path).model_dump() | options | MEANT)
    params = [SamplingParams(temperature=0.0, seed=seed, max_tokens=100, ignore_eos=True) for seed in range(8)]
    with make_llm(toy, speculative=speculative) as llm:
        usages = [g.choices[0].usage for g in llm.generate([[0, 5 + i, 6] for i in range(8)], params)]
    reached = [0] * 5
    for usage in usages:
        assert usage is not None
        assert usage.is_lossy
        for depth, count in enumerate(usage.accept_histogram):
            for above in range(depth + 1):
                reached[above] += count
    for depth, rate in enumerate(expected):
        assert reached[depth] > 100
        assert reached[depth + 1] / reached[depth] == pytest.approx(rate, abs=0.12)
    assert not any(reached[len(expected) + 1 :])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulate_accept_length": 3.0}, "set simulate_output_is_meaningless: true as well"),
        ({"simulate_accept_rates": [0.5]}, "set simulate_output_is_meaningless: true as well"),
        (MEANT, "has nothing to confirm"),
        (MEANT | {"simulate_accept_length": 3.0, "simulate_accept_rates": [0.5]}, "set one of them"),
        (MEANT | {"simulate_accept_length": 3.0, "verification": "rejection"}, "replaces verification"),
        (MEANT | {"simulate_accept_length": 3.0, "accept_threshold_acc": 0.5}, "replaces verification"),
        (MEANT | {"simulate_accept_length": 3.0, "algorithm": None}, "has no effect while speculative.algorithm"),
    ],
)
def test_nothing_is_simulated_by_accident(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**{"algorithm": "NGRAM"} | options)
    assert make_sampler(SpeculativeConfig(algorithm="NGRAM")) is coupled


@pytest.mark.parametrize("simulated", [{"simulate_accept_length": 3.0}, {"simulate_accept_rates": [0.5]}])
def test_a_running_server_cannot_slip_into_it(simulated: dict[str, Any]) -> None:
    honest = SpeculativeConfig(algorithm="NGRAM")
    with pytest.raises(ConfigError, match="cannot replace"):
        honest.check_successor(SpeculativeConfig(**{"algorithm": "NGRAM"} | MEANT | simulated))


def test_logs_and_metrics_say_so(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    speculative = SpeculativeConfig(**{"algorithm": "NGRAM", "simulate_accept_length": 2.0} | MEANT)
    with caplog.at_level(logging.WARNING), make_llm(toy, speculative=speculative) as llm:
        assert llm.engine.stats.values["specray_acceptance_is_simulated"] == 1
        assert llm.engine.stats.labelled["specray_drafter_info"] == {"SIMULATED NGRAM": 1}
    assert "the output is MEANINGLESS" in caplog.text
