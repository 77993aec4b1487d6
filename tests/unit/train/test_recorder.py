"""Recorded training data: every request's tokens with the target's hidden states, once."""

from pathlib import Path

import pytest
import torch

from specray.sampling_params import SamplingParams
from specray.train.hidden_states import HiddenStateRecorder, Recording
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm
from tests.support.naive_eagle import attend_to_the_past

LAYERS = (0, 1, 2)
PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 9, 8], [5], [0, *range(10, 40)], [0, 9, 8, 7]]
PARAMS = [SamplingParams(temperature=0.9, seed=11 * i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(4)]


def assert_close_to_a_plain_forward(recording: Recording, llm_folder: Path) -> None:
    with make_llm(llm_folder) as llm, torch.inference_mode():
        tokens = torch.tensor(recording.token_ids)
        model = llm._executor.worker.model
        _, aux_hidden_states = model(tokens, torch.arange(len(tokens)), attend_to_the_past, LAYERS)
    expected = torch.cat(aux_hidden_states, -1)
    expected[-1] = 0  # the last token was sampled and never computed
    assert recording.aux_hidden_states.dtype is torch.bfloat16
    torch.testing.assert_close(recording.aux_hidden_states.float(), expected, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_running_requests": 1}, {"chunked_prefill_size": 4, "max_prefill_tokens": 6}, {"page_size": 1}],
    ids=["together", "alone", "chunks", "pages-of-1"],
)
def test_recorded_aux_hidden_states_equal_a_plain_forward(options: dict[str, int], toy: Path) -> None:
    taken: list[Recording] = []
    choices = generate(
        toy, PROMPTS, PARAMS, HiddenStateRecorder(LAYERS, taken.append), disable_radix_cache=True, **options
    )
    by_seed = {recording.seed: recording for recording in taken}
    assert sorted(by_seed) == [11 * i for i in range(4)]
    assert len(taken) == 4
    for prompt, params, choice in zip(PROMPTS, PARAMS, choices, strict=True):
        recording = by_seed[params.seed]
        assert recording.token_ids == prompt + choice.token_ids
        assert_close_to_a_plain_forward(recording, toy)


def test_recording_does_not_change_output(toy: Path) -> None:
    seen = generate(toy, PROMPTS, PARAMS, HiddenStateRecorder(LAYERS, lambda _: None), disable_radix_cache=True)
    plain = generate(toy, PROMPTS, PARAMS, ScriptedDrafter(DRAWS["empty"]))
    assert [choice.token_ids for choice in seen] == [choice.token_ids for choice in plain]


def test_requests_in_one_slot_are_recorded_separately(toy: Path) -> None:
    taken: list[Recording] = []
    with make_llm(
        toy, HiddenStateRecorder((2,), taken.append), disable_radix_cache=True, max_running_requests=1
    ) as llm:
        for seed in range(3):
            llm.generate([[5, 6]], SamplingParams(seed=seed, max_tokens=4, ignore_eos=True))
    assert [recording.seed for recording in taken] == [0, 1, 2]
    assert [tuple(recording.aux_hidden_states.shape) for recording in taken] == [(6, 32)] * 3
