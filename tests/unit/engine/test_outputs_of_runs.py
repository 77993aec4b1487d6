"""Outputs of a request do not depend on how many drafts are accepted: token ids, text, logprobs, usage, end."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from tests.support.ranks import SimulatedRanks
from tests.support.toy import VOCAB_SIZE, toy_tokenizer

TOKENIZER = toy_tokenizer().backend_tokenizer
STOPS = ["a", "the", "on", "é", "0 ", "!\n", "😀a", "b1"]


def run(script: list[int], params: SamplingParams, max_draft_tokens: int, seed: int) -> list[RequestOutput]:
    """The outputs of one request whose target generates `script`."""
    capacity = Capacity(40, max_draft_tokens, 100, VOCAB_SIZE, [1])
    config = EngineConfig(page_size=4)
    ranks = SimulatedRanks(config, capacity, lambda tokens: script[len(tokens) - 2], Random(seed))
    engine = Engine(config, ranks, TOKENIZER)
    engine.add_request(EngineRequest("x", [7, 8], params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def summary(outputs: list[RequestOutput]) -> tuple[object, ...]:
    """The parts of outputs that must not depend on drafts: all but counts of steps and drafts."""
    last = outputs[-1]
    return (
        [token for output in outputs for token in output.token_ids],
        "".join(output.text for output in outputs),
        [entry for output in outputs for entry in output.logprobs or []],
        (last.finish_reason, last.stop_reason, last.usage.num_completion_tokens, last.usage.num_prompt_tokens),
    )


@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=98, max_size=98),
    st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
    st.integers(1, 12),
    st.integers(0, 99),
)
@settings(max_examples=120)
def test_accepted_drafts_do_not_change_outputs(
    script: list[int],
    stop: list[str],
    min_tokens: int,
    max_tokens: int | None,
    ignore_eos: bool,
    drafts: int,
    seed: int,
) -> None:
    params = SamplingParams(
        seed=1,
        stop=stop,
        stop_token_ids=[9],
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=0,
    )
    plain, speculative = run(script, params, 0, 0), run(script, params, drafts, seed)
    assert summary(speculative) == summary(plain)
    ids, _, logprobs, (_, _, num_completion, _) = summary(speculative)
    assert [entry.token_id for entry in logprobs] == ids
    assert num_completion == len(ids)
