"""The demo's report on two rounds of answers; serving is tested in tests/cluster."""

import pytest

from specray.cli.chat import Answer
from specray.cli.demo import QUESTIONS, Round, report


def make_round(name: str, text: str, seconds: float) -> Round:
    usage = {"completion_tokens": 60, "speculative": {"accept_length": 2.5}}
    return Round(name, [Answer(f"{text} {title}", usage, seconds) for title in QUESTIONS])


def test_speeds_and_their_ratio_are_reported() -> None:
    shown = report([make_round("on", "same", 1.0), make_round("off", "same", 2.0)])
    row = next(line for line in shown.splitlines() if "capitals" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["capitals", "60", "30.0", "60.0", "2.00", "2.50", "yes"]
    last = f"Speculative decoding gave the same {len(QUESTIONS)} answers, character for character, 2.00 times as fast."
    assert shown.splitlines()[-1] == last


def test_different_texts_are_reported() -> None:
    second = make_round("off", "same", 2.0)
    second.answers[0].text += "!"
    shown = report([make_round("on", "same", 1.0), second])
    assert "other texts (capitals)" in shown
    assert "the same" not in shown
    assert " no " in next(line for line in shown.splitlines() if line.startswith("| capitals"))


@pytest.mark.parametrize("length", [None, 1.0])
def test_the_accept_length_without_drafts_is_1(length: float | None) -> None:
    first = make_round("on", "same", 1.0)
    for answer in first.answers:
        answer.usage["speculative"] = {"accept_length": length}
    assert " 1.00 " in report([first, make_round("off", "same", 1.5)])
