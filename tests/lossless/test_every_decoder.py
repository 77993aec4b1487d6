"""transformers' decoders in the engine: the logits of transformers' own attention, and one text with any drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.models import transformers_rows
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from tests.support.decoder_table import COMMAND, PAGE, filled
from tests.support.decoders import (
    IMAGE_MODELS,
    QUICK,
    REFUSED,
    SERVED,
    logits_in_chunks,
    logits_of,
    write_decoder,
)
from tests.support.engine import make_llm
from tests.support.heads import write_random_head
from tests.support.recipes import RECIPES

TOKENS = [0, *(7 * place % 64 for place in range(40))]  # longer than the windows, which are of 16 tokens
PROMPTS = [[0, *range(63, 30, -1)], [5], [0, *range(4, 40)], [7] * 7]  # NGRAM finds most tokens in the long ones
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)  # past the windows and a block of keys
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True)
    for seed, temperature in enumerate([0.0, 1.0, 1.0, 0.0])
]
EXACT = "float32" if kernels() is None else "bfloat16"  # a type with one text, where rounding would show another one
# One of each kind; test_conformance has all methods with Llama.
NATIVE = ["mistral", "qwen2-window", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SERVED | IMAGE_MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_gives_transformers_logits_and_one_text_with_any_drafts(name: str, tmp_path: Path) -> None:
    reference = write_decoder(name, tmp_path)
    with make_llm(tmp_path, model_impl="transformers") as llm:
        model = llm._executor.worker.model
        expected = logits_of(reference, TOKENS)
        assert expected.std() > 0.3
        for size in (len(TOKENS), 7):
            torch.testing.assert_close(logits_in_chunks(model, TOKENS, size), expected, atol=1e-4, rtol=0.0)
        texts = texts_of(llm, GREEDY)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert logits_of(reference, [*prompt, *text])[len(prompt) - 1 : -1].argmax(-1).tolist() == text
        assert llm.generate([PROMPTS[2]], SHORT)[0].choices[0].token_ids == texts[2][:4], "with the cached prefix"
    with make_llm(tmp_path, model_impl="transformers", dtype=EXACT) as llm:
        assert llm._executor.worker.capacity.has_one_text
        if kernels() is not None:
            assert_same_bits_in_any_batch(llm._executor.worker.model)
        # States follow what is accepted, and of an n-gram's drafts that is most.
        has_both = name in QUICK or llm._executor.worker.model.shape.state_bytes > 0
        assert_same_with_drafts(llm, tmp_path, ("NGRAM", "EAGLE3") if has_both else ("EAGLE3",))


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_class_gives_transformers_logits_and_one_text_with_any_drafts(name: str, tmp_path: Path) -> None:
    reference = write_decoder(name, tmp_path)
    with make_llm(tmp_path, model_impl="native") as llm:
        logits = logits_in_chunks(llm._executor.worker.model, TOKENS, 7)
        torch.testing.assert_close(logits, logits_of(reference, TOKENS), atol=1e-4, rtol=0.0)
        assert_same_with_drafts(llm, tmp_path, ("NGRAM", "EAGLE3"))


def test_a_type_in_which_texts_would_depend_on_the_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_decoder("gpt2", tmp_path, dtype="bfloat16")
    monkeypatch.setattr(transformers_rows, "_ROW_WISE", transformers_rows._ROW_WISE - {"tanh"})
    with make_llm(tmp_path) as llm:
        assert not llm._executor.worker.model.is_row_wise
    for dtype, shown in () if kernels() is None else (("bfloat16", "bfloat16"), ("auto", r"bfloat16 \(auto\)")):
        with pytest.raises(ConfigError, match=rf"dtype={shown}: GPT2LMHeadModel .*; set dtype: float32"):
            make_llm(tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_that_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    write_decoder(name, tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[name][2]):
        make_llm(tmp_path)


def assert_same_with_drafts(llm: LLM, folder: Path, methods: Sequence[str]) -> None:
    """A request alone, NGRAM and a random EAGLE-3 head give the texts of a batch without drafts, at T = 0 and 1.

    The head finds a token now and then, so it alone has trees that are accepted in part.
    """
    texts = texts_of(llm, SAMPLED)
    assert llm.generate([PROMPTS[2]], SAMPLED[2])[0].choices[0].token_ids == texts[2]
    for method in methods:
        options: dict[str, Any] = {"num_draft_tokens": 8}
        if method == "EAGLE3":
            head = write_random_head(folder / "head", folder, 3)
            options = {"draft_model_path": str(head), "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
        drafts = SpeculativeConfig(algorithm=method, budget="static", **options)
        with llm.with_speculative(drafts) as drafting:
            drafted = [generation.choices[0] for generation in drafting.generate(PROMPTS, SAMPLED)]
            assert [choice.token_ids for choice in drafted] == texts
            assert drafted[0].usage.num_draft_tokens > 0, "greedy"
            assert drafted[2].usage.num_draft_tokens > 0, "at T = 1"


def assert_same_bits_in_any_batch(model: Any) -> None:
    """Of a row whose attention sees nothing but itself."""
    tokens, positions = TOKENS, [5 * place % 64 for place in range(len(TOKENS))]

    def logits(part: slice) -> torch.Tensor:
        states = model._states_apart(len(tokens[part]))
        rows: torch.Tensor = model.logits(model._without_attention(tokens[part], positions[part], states)[1])
        return rows

    together = logits(slice(None))
    for start, count in [(0, 1), (17, 1), (3, 2), (8, 5), (1, 16), (7, 33)]:
        part = slice(start, start + count)
        assert torch.equal(logits(part), together[part]), (start, count)


def texts_of(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    return [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, params)]


def test_each_of_the_recipes_models_is_counted_once() -> None:
    names = [name for recipe in RECIPES for name in recipe.names]
    assert len(names) == len(set(names)) == 57
    assert all(recipe.is_served or recipe.limit for recipe in RECIPES), "the reason why a model is not served"


def test_the_tables_of_models_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), f"run: {COMMAND}"
