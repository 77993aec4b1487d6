"""The demo's report on pairs of answers; serving is tested in tests/cluster."""

import pytest

from benchmarks.demo import QUESTIONS, Pair, report
from specray.cli.chat import StreamedAnswer


def make_answers(text: str, seconds: float) -> list[StreamedAnswer]:
    usage = {"completion_tokens": 60, "speculative": {"accept_length": 2.5}}
    return [StreamedAnswer(f"{text} {title}", usage, seconds) for title in QUESTIONS]


def pairs(speculative: list[StreamedAnswer], plain: list[StreamedAnswer]) -> list[Pair]:
    return [Pair(*both) for both in zip(speculative, plain, strict=True)]


def test_speeds_and_their_ratio_are_reported() -> None:
    shown = report(pairs(make_answers("same", 1.0), make_answers("same", 2.0)))
    row = next(line for line in shown.splitlines() if "capitals" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["capitals", "60", "30.0", "60.0", "2.00", "2.50", "yes"]
    last = f"Speculative decoding gave the same {len(QUESTIONS)} answers, character for character, 2.00 times as fast."
    assert shown.splitlines()[-1] == last


def test_different_texts_are_reported() -> None:
    plain = make_answers("same", 2.0)
    plain[0].text += "!"
    shown = report(pairs(make_answers("same", 1.0), plain))
    assert "other texts (capitals)" in shown
    assert "the same" not in shown
    assert " no " in next(line for line in shown.splitlines() if line.startswith("| capitals"))


@pytest.mark.parametrize("length", [None, 1.0])
def test_the_accept_length_without_drafts_is_1(length: float | None) -> None:
    speculative = make_answers("same", 1.0)
    for answer in speculative:
        answer.usage["speculative"] = {"accept_length": length}
    assert " 1.00 " in report(pairs(speculative, make_answers("same", 1.5)))
