"""`LLM` from a user's side: one prompt or several, options in any form, conversations, and errors of one line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specray
from specray import LLM, SamplingParams
from specray.config import EngineConfig
from specray.errors import ConfigError, InvalidRequestError
from specray.grammar import make_grammar
from specray.outputs import Generation
from tests.support.toy import write_toy

GREEDY = {"temperature": 0, "max_tokens": 4}
ONE, TWO = [{"role": "user", "content": "on"}], [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_toy(tmp_path_factory.mktemp("toy"))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 1}))
    with LLM(str(folder), dtype="float32", device="cpu", max_total_tokens=512) as loaded:
        yield loaded


def ids(generations: list[Generation]) -> list[list[int]]:
    return [generation.prompt_token_ids + generation.choices[0].token_ids for generation in generations]


def test_one_prompt_in_any_form_is_a_list_of_one(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("the on")
    expected = ids(llm.generate(["the on"], SamplingParams(temperature=0, max_tokens=4)))
    assert len(expected) == 1
    for prompt in ("the on", tokens, [tokens], tuple(tokens)):
        assert ids(llm.generate(prompt, sampling_params=GREEDY)) == expected
    assert ids(llm.generate(["the on", tokens], [GREEDY, SamplingParams(**GREEDY)])) == expected * 2
    assert ids(llm.generate("the on", GREEDY, predictions="the")) == expected
    assert llm.generate([]) == []


def test_conversations_are_rendered_by_the_template(llm: LLM) -> None:
    rendered = [llm.tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in (ONE, TWO)]
    answers = llm.chat([ONE, TWO], GREEDY)
    assert [answer.prompt_token_ids for answer in answers] == rendered
    assert ids(llm.chat(ONE, GREEDY)) == ids(answers)[:1]
    assert ids(llm.generate(rendered, GREEDY)) == ids(answers)
    with_answer = [*ONE, {"role": "assistant", "content": "a"}]
    [open_turn] = llm.chat(with_answer, GREEDY, add_generation_prompt=False)
    assert open_turn.prompt_token_ids == rendered[0] + llm.tokenizer.encode("a")


def test_the_models_sampling_defaults_apply_without_params_only(llm: LLM) -> None:
    assert (llm.default_params.temperature, llm.default_params.top_k) == (0.5, 1)
    short = {"max_tokens": 4}
    assert {tuple(each) for each in ids(llm.generate(["the"] * 6, llm.default_params))} == {
        tuple(ids(llm.generate("the"))[0])
    }
    assert len({tuple(each) for each in ids(llm.generate(["the"] * 6, short))}) > 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(3), "prompts is int 3; pass a text"),
        (lambda llm: llm.generate(b"the"), "prompts is bytes b'the'; pass a text"),
        (lambda llm: llm.generate({"prompt": "a"}), "prompts is dict"),
        (lambda llm: llm.generate(["a", None]), "a prompt is NoneType None; pass a text or a list of token ids"),
        (lambda llm: llm.generate([[1.5]]), "a prompt is list"),
        (lambda llm: llm.generate("a", 3), "sampling_params is int 3; pass SamplingParams, a dict"),
        (lambda llm: llm.generate("a", "greedy"), "sampling_params is str 'greedy'; pass SamplingParams"),
        (lambda llm: llm.generate(["a"], [None]), "sampling_params is NoneType None"),
        (lambda llm: llm.generate(["a", "b"], [{}]), "2 prompts have 1 sampling_params; pass one for each"),
        (
            lambda llm: llm.generate("a", {"max_new_tokens": 3}),
            "sampling_params has no option 'max_new_tokens'; did you mean max",
        ),
        (lambda llm: llm.generate("a", {"temperature": -1}), "temperature=-1: Input should be greater"),
        (lambda llm: llm.generate("a", predictions=["b", "c"]), "1 prompts have 2 predictions"),
        (lambda llm: llm.chat("Hi"), "messages is str 'H'; pass a list of messages"),
        (lambda llm: llm.chat([["Hi"]]), r"messages is list \['Hi'\]; pass a list of messages"),
    ],
)
def test_a_wrong_type_is_one_clear_error(llm: LLM, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call(llm)


def test_options_beside_a_configuration_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_toy(tmp_path)), device="cpu")
    with pytest.raises(ConfigError, match="dtype is given beside an EngineConfig"):
        LLM(config, dtype="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_lenght": 9}, "context_lenght=9: Extra inputs are not permitted; did you mean context_length"),
        ({"dtype": "float8"}, "dtype='float8': Input should be"),
        ({"speculative": {"algorithm": "EAGLE9"}}, "speculative.algorithm='EAGLE9' is not known"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        LLM("smollm2-135m-instruct", **options)
    assert "\n" not in str(raised.value)


def test_the_package_has_only_its_public_names() -> None:
    assert specray.LLM is LLM
    with pytest.raises(AttributeError, match="'specray' has no attribute 'LLm'"):
        specray.LLm  # noqa: B018


def test_a_request_that_fails_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests beside it went on running, and every later call of `generate` failed with a KeyError."""
    with monkeypatch.context() as patch:
        patch.setattr("specray.structured_output.matchers._MAX_SPENT_S", -1.0)
        options = [{"max_tokens": 5, "grammar": make_grammar("regex", "[^x]*")}, {"max_tokens": 50, "ignore_eos": True}]
        with pytest.raises(InvalidRequestError, match="more work for one token"):
            llm.generate([[5, 6], [5, 6]], options)
    assert not llm.engine.has_work
    assert len(llm.generate([[5, 6]], {"max_tokens": 5, "ignore_eos": True})[0].choices[0].token_ids) == 5
