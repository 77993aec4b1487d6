"""Kinds of text, shares of a step's time, and usual times."""

import pytest

from specray.engine.drafter_selection.selector import StepRow, step_shares
from specray.engine.drafter_selection.text_kind import LONG_PROMPT, TextKind, repeated_share, text_kind
from specray.engine.step_times import UsualTimes

PROSE = "Tell me about the rivers of Europe, please, and which of them is the longest."
INDENTED = "for river in rivers:" + "\n    print the name of the river" * 8
# Templates without their special tokens.
LLAMA = "system\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nuser\n\n{}assistant\n\n"
CHATML = "system\nYou are a helpful assistant\nuser\n{}\nassistant\n"
BRACKETS = "rivers[0] = length(sea);\n" * 10


@pytest.mark.parametrize(
    ("text", "token_ids", "kind"),
    [
        (PROSE, range(20), TextKind.CHAT),
        (f"Fix this:\n```python\nx = 1\n```\n{PROSE}", range(30), TextKind.CODE),
        ("def add(a, b):\n    return {a: b}[a];", range(20), TextKind.CODE),
        (PROSE, [*range(20), *range(20)], TextKind.COPY),
        (PROSE, range(LONG_PROMPT), TextKind.COPY),
        (f"Repeat this text:\n\n{PROSE * 3}", range(60), TextKind.COPY),
        (f"{PROSE}\n\nThank you!", range(25), TextKind.CHAT),
        (f"{PROSE}\n\n{INDENTED}", range(60), TextKind.CODE),
        (f"{PROSE * 20}\n\n{BRACKETS}", range(90), TextKind.CODE),
        (f"{INDENTED}\n\n{PROSE * 3}", range(90), TextKind.COPY),
        (LLAMA.format(PROSE * 3), range(90), TextKind.CHAT),
        (LLAMA.format(f"Repeat this text:\n\n{PROSE * 3}"), range(90), TextKind.COPY),
        (LLAMA.format(f"{PROSE}assistant\n\nTwo.\n\n{PROSE * 3}user\n\nAnd the shortest?"), range(90), TextKind.CHAT),
        (CHATML.format(PROSE * 3), range(90), TextKind.CHAT),
        ("", [], TextKind.CHAT),
        ("x", [3], TextKind.CHAT),
    ],
)
def test_the_kind_of_a_prompt(text: str, token_ids: list[int], kind: TextKind) -> None:
    assert text_kind(list(token_ids), text) is kind


def test_the_repeated_share_counts_ngrams_that_occurred_before() -> None:
    assert repeated_share([1, 2, 3, 4, 5]) == 0.0
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([1] * 7) == pytest.approx(3 / 4)


def test_a_drafters_time_is_shared_by_its_rows_and_the_rest_by_tokens() -> None:
    rows = [StepRow("head", 6), StepRow("lookup", 2), StepRow("head", 2)]
    assert step_shares(rows, 13.0, {"head": 2.0, "lookup": 1.0}) == pytest.approx([1 + 6, 1 + 2, 1 + 2])
    assert sum(step_shares(rows, 13.0, {"head": 2.0})) == pytest.approx(13.0)
    assert step_shares(rows, 1.0, {"head": 2.0}) == pytest.approx([1.0, 0.0, 1.0]), "drafting overlapped with the rest"


def test_times_of_large_and_small_batches_become_comparable() -> None:
    usual = UsualTimes()
    assert usual.of(1) is None
    for _ in range(50):
        usual.observe(1, 2, 0.02)
        usual.observe(8, 16, 0.04)
    assert usual.of(1) == pytest.approx(0.01)
    assert usual.of(8) == usual.of(5) == pytest.approx(0.0025)
    usual.observe(8, 16, 40.0)  # a step that was disturbed
    assert usual.of(8) == pytest.approx(0.0025, rel=0.1)
