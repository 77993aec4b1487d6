"""A predicted output changes the speed and never the text, with every kind of drafter and in a process of its own."""

from pathlib import Path

import pytest

from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.testing.conformance import PROMPTS, SAMPLED, require_equal
from tests.support.colocated import Colocated
from tests.support.engine import make_llm
from tests.support.methods import METHODS, SOME_METHODS

PARAMS = [
    SamplingParams(temperature=[0.0, 1.0, 4.0][i % 3], seed=i, max_tokens=30, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[Completion]:
    with make_llm(toy) as llm:
        return run(llm, PARAMS)


def run(llm: LLM, params: list[SamplingParams], predictions: list[list[int]] | None = None) -> list[Completion]:
    return [generation.choices[0] for generation in llm.generate(PROMPTS, params, predictions=predictions)]


def steps(choices: list[Completion]) -> int:
    return sum(choice.usage.num_verify_steps for choice in choices if choice.usage)


def edited(choices: list[Completion]) -> list[list[int]]:
    """The outputs with a token changed, one left out and one added."""
    return [[*o[:6], 40, *o[7:15], *o[16:22], 41, *o[22:]] for o in (choice.token_ids for choice in choices)]


@pytest.mark.parametrize("method", [*SOME_METHODS, "EAGLE3-merged"])
def test_predictions_do_not_change_the_text_and_right_ones_save_steps(
    method: str, toy: Path, tmp_path: Path, plain: list[Completion]
) -> None:
    right, wrong = [choice.token_ids for choice in plain], [[50, 51, 52]] * len(plain)
    num_steps = []
    for predictions in (right, edited(plain), wrong):
        with make_llm(toy, speculative=METHODS[method](toy, tmp_path)) as llm:
            choices = run(llm, PARAMS, predictions)
        require_equal(choices, plain)
        num_steps.append(steps(choices))
    assert num_steps[0] < num_steps[1] < num_steps[2]


def test_predictions_are_exact_under_all_sampling_options(toy: Path, tmp_path: Path) -> None:
    with make_llm(toy) as llm:
        expected = run(llm, SAMPLED)
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path), page_size=4, max_total_tokens=96) as llm:
        require_equal(run(llm, SAMPLED, edited(expected)), expected)


def test_a_drafter_in_its_own_process_receives_them(toy: Path, tmp_path: Path, plain: list[Completion]) -> None:
    right = [choice.token_ids for choice in plain]
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        inline = run(llm, PARAMS, right)
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        choices = run(llm, PARAMS, right)
        colocated.close()
    require_equal(choices, plain)
    assert steps(choices) == steps(inline) < steps(plain)
