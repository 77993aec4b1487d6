"""The demo's report on two rounds of answers; serving is tested in tests/cluster."""

import pytest

from specray.cli.chat import Answer
from specray.cli.demo import QUESTIONS, Round, report


def make_round(name: str, text: str, seconds: float) -> Round:
    usage = {"completion_tokens": 60, "speculative": {"accept_length": 2.5}}
    return Round(name, [Answer(f"{text} {title}", usage, seconds) for title in QUESTIONS])


def test_both_speeds_and_their_ratio_are_reported() -> None:
    shown = report([make_round("on", "same", 1.0), make_round("off", "same", 2.0)])
    assert "open question: 60.0 tokens/s with speculation, 30.0 without: 2.00 times plain decoding." in shown
    assert "Both servers gave identical texts." in shown


def test_different_texts_are_reported() -> None:
    second = make_round("off", "same", 2.0)
    second.answers[0].text += "!"
    shown = report([make_round("on", "same", 1.0), second])
    assert "The texts differ (open question)" in shown
    assert "identical texts" not in shown


@pytest.mark.parametrize("length", [None, 1.0])
def test_the_accept_length_without_speculation_is_1(length: float | None) -> None:
    second = make_round("off", "same", 2.0)
    for answer in second.answers:
        answer.usage["speculative"] = {"accept_length": length}
    assert " 1.00 " in report([make_round("on", "same", 1.0), second])
