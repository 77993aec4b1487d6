"""The figures of replays and audits, with a small model: what is compared, not how fast it is."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import production
from benchmarks.figure import QUICK
from specray.bench.measure import Record
from specray.bench.prompts import Prompt
from specray.config import SpeculativeConfig
from specray.llm import LLM

NGRAM = SpeculativeConfig(algorithm="NGRAM")
TEXTS = ("Once upon a time there was a cat. Once upon", "The dog and the cat saw the dog and the", "One day")


@pytest.fixture(autouse=True)
def small(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(production, "_plain", lambda: LLM(model=str(stories), dtype="float32", max_total_tokens=1024))
    monkeypatch.setattr(production, "_methods", lambda: {"ngram": NGRAM})
    monkeypatch.setattr(production, "served", lambda _: NGRAM)
    prompts = [("chat", Prompt(category="all", turns=(text,))) for text in TEXTS]
    monkeypatch.setattr(production, "mixed", lambda *_: prompts)
    monkeypatch.setattr(production, "LOADS", (1, 2))


def test_predicted_speeds_are_compared_with_those_of_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are scripted, because a busy machine may be ten times as slow a moment later."""
    monkeypatch.setattr(production, "predicted_speeds", lambda *given: dict.fromkeys(given[2], 100.0))
    measured = {"plain": 110.0, "ngram": 80.0}
    seen: list[set[int]] = []

    def decode_speed(records: Sequence[Record], variant: str) -> float:
        seen.append({len(reply.token_ids) for record in records for reply in record.run.replies})
        assert sum(record.run.decode_tokens for record in records if record.variant == variant) > 0
        return measured[variant]

    monkeypatch.setattr(production, "_decode_speed", decode_speed)
    *ratios, error = production.predictions(QUICK, {"replay"})
    cells = {row.cell: row.measured for row in ratios}
    names = [(production.REPLAY, name, f"{load} at once") for load in (1, 2) for name in measured]
    assert cells == {cell: pytest.approx(100 / measured[cell[1]]) for cell in names}
    assert error.measured == pytest.approx(0.25)
    assert seen == [{QUICK.max_tokens}] * len(names)


def test_the_cost_of_audits_is_their_cpu_time_at_a_share_of_the_requests() -> None:
    requests, whole, mismatches = production.audits(QUICK, {"audits"})
    num_audits = QUICK.rounds * (len(TEXTS) + 1)  # with the request that warms up
    assert mismatches.what == f"mismatches of {num_audits} audits"
    assert mismatches.measured == 0
    assert whole.measured > requests.measured, "idle steps of audits count in the second one only"


def test_accept_lengths_are_replayed_for_each_tree_kind_of_text_and_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(production, "TREES", ())
    rows = list(production.accept_lengths(QUICK, {"accept-lengths"}))
    cells = [row.cell for row in rows if row.cell is not None]
    assert len(set(cells)) == len(rows) == 2 * 2 * 2, "two methods, kinds of text and temperatures"
    assert {title for title, *_ in cells} == {production.LENGTHS}
    assert all(1 <= row.measured < QUICK.max_tokens for row in rows)
    assert any(row.measured > 1 for row in rows)
