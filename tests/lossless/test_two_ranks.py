"""Output with tensor-parallel ranks in several processes equals that of one rank."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.ops.cpu.library import kernels
from specray.sampling_params import make_sampling_params
from tests.support.decoders import write_decoder
from tests.support.engine import generate
from tests.support.methods import METHODS
from tests.support.mtp import write_deepseek
from tests.support.published_mtp import write_published
from tests.support.quantised import METHODS as METHODS_OF_CHECKPOINTS
from tests.support.quantised import quantise_model
from tests.support.toy import write_toy
from tests.support.two_ranks import run_methods, run_ranks

PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [5], [0, *range(10, 50)], [0, 20, 21, 22, 20, 21], [0, 11, 12], [7, 8, 9]]
PARAMS = [
    {"seed": 1, "temperature": 0.0, "max_tokens": 16},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 16},
    {"seed": 3, "temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5, "prompt_logprobs": 1, "max_tokens": 16},
    {"seed": 4, "temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "stop": ["a"], "max_tokens": 16},
    {"seed": 5, "temperature": 1.0, "grammar": ("regex", "the [a-z]{3,9}, [0-9]{2}"), "max_tokens": 30},
    {"seed": 6, "temperature": 0.9, "max_tokens": 16},  # like the first one, chosen without gathering the logits
]


@pytest.mark.parametrize("name", ["EAGLE-map", "NGRAM"])
def test_two_ranks_with_drafts_equal_one(name: str, toy: Path, tmp_path: Path) -> None:
    """Each rank has a part of the target and of the head."""
    alone = generate(toy, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    speculative = METHODS[name](toy, tmp_path)
    together = run_ranks(toy, 2, speculative, PROMPTS, PARAMS, page_size=4, chunked_prefill_size=16)
    assert [choice["token_ids"] for choice in together] == [choice.token_ids for choice in alone]
    assert [choice["text"] for choice in together] == [choice.text for choice in alone]
    assert [choice["finish_reason"] for choice in together] == [choice.finish_reason for choice in alone]
    scores = [entry.logprob for entry in alone[2].prompt_logprobs or []]
    assert [entry.logprob for entry in together[2]["prompt_logprobs"]] == pytest.approx(scores, abs=2e-4)
    assert len(scores) == len(PROMPTS[2]) - 1


@pytest.mark.parametrize("name", ["EAGLE3", "DFLASH-jetspec", "NGRAM", None])
def test_two_ranks_in_graphs_equal_one(name: str | None, toy: Path, tmp_path: Path) -> None:
    """The collectives are in the graphs, and both ranks choose the same ones. Neither reads anything between an outcome
    and the launch of a step that begins early.
    """
    order = [0, 1, 5, 2, 3, 4]  # greedy and sampled requests with and without filters first; the third one ends last
    prompts, params = ([part[place] for place in order] for part in (PROMPTS, PARAMS))
    params[2] = params[2] | {"max_tokens": 100, "ignore_eos": True}
    alone = generate(toy, prompts, [make_sampling_params(**each) for each in params])
    speculative = SpeculativeConfig() if name is None else METHODS[name](toy, tmp_path)
    [run] = run_methods(toy, 2, [speculative], prompts, params, in_graphs=True, max_running_requests=3)
    assert [choice["token_ids"] for choice in run.choices] == [choice.token_ids for choice in alone]
    for launches in run.launches:  # of both ranks
        assert launches.early_without_reads == launches.early
        assert launches.early > 5 or name == "NGRAM"  # whose drafts the host makes


@pytest.mark.slow
@pytest.mark.parametrize(("size", "method", "in_graphs"), [(2, "EAGLE3", False), (2, None, True), (4, None, False)])
def test_ranks_with_one_shot_sums_equal_those_of_the_library(
    size: int, method: str | None, in_graphs: bool, toy: Path, stories: Path, tmp_path: Path
) -> None:
    """In the layers of the target and of a head, and in graphs that repeat calls. Long prompts are left to gloo."""
    pytest.importorskip("triton")
    from tests.support.one_shot import one_shot_workers

    folder, speculative = (toy, METHODS[method](toy, tmp_path)) if method else (stories, SpeculativeConfig())
    params = [PARAMS[place] | {"max_tokens": 5} for place in (0, 5)]
    with_library, one_shot = (
        run_methods(folder, size, [speculative], PROMPTS[:2], params, within=within, max_running_requests=2)
        for within in (nullcontext, partial(one_shot_workers, in_graphs))
    )
    assert [choice["token_ids"] for choice in one_shot[0].choices] == [
        choice["token_ids"] for choice in with_library[0].choices
    ]


@pytest.mark.skipif(kernels() is None, reason="torch's operations promise this in float32 only")
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
    ],
    ids=["bfloat16", "int8", "int4", "KV in fp8"],
)
def test_two_ranks_with_drafts_equal_two_without_in_every_type(
    options: dict[str, Any], toy: Path, tmp_path: Path
) -> None:
    """Sums over ranks are rounded, so two ranks equal two, not one."""
    plain = run_ranks(toy, 2, SpeculativeConfig(), PROMPTS, PARAMS, **options)
    drafted = run_ranks(toy, 2, METHODS["EAGLE-map"](toy, tmp_path), PROMPTS, PARAMS, page_size=4, **options)
    assert [choice["token_ids"] for choice in drafted] == [choice["token_ids"] for choice in plain]


@pytest.mark.parametrize("write", [write_deepseek, partial(write_published, "glm4_moe")], ids=["deepseek", "glm4_moe"])
def test_two_ranks_of_a_target_with_mtp_layers_equal_one(write: Callable[[Path], object], tmp_path: Path) -> None:
    """Each rank has a part of every expert, and DeepSeek's the whole latent; Glm4Moe's MTP layer is whole on each."""
    write(tmp_path)
    alone = generate(tmp_path, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    together = run_ranks(tmp_path, 2, SpeculativeConfig(algorithm="MTP"), PROMPTS, PARAMS)
    assert [choice["token_ids"] for choice in together] == [choice.token_ids for choice in alone]


def test_two_ranks_with_states_and_a_head_equal_one(tmp_path: Path) -> None:
    """The second half of the prompts starts from states that the first half stored, on both ranks."""
    write_decoder("qwen3_5", tmp_path)
    prompts, params = [PROMPTS[place] for place in (0, 2, 3)], [PARAMS[place] for place in (0, 1, 5)]
    alone = generate(tmp_path, prompts, [make_sampling_params(**each) for each in params])
    options = {"page_size": 4, "max_running_requests": 3}
    together = run_ranks(tmp_path, 2, METHODS["EAGLE3"](tmp_path, tmp_path), prompts * 2, params * 2, **options)
    assert [choice["token_ids"] for choice in together] == [choice.token_ids for choice in alone] * 2
    assert all(choice["num_cached_tokens"] > 0 for choice in together[3:])


def test_two_ranks_of_a_quantised_checkpoint_equal_one(tmp_path: Path) -> None:
    """The second rank's feed-forward units begin inside a group, whose inputs are not neighbours."""
    method = METHODS_OF_CHECKPOINTS["gptq by activation"]
    quantised = quantise_model(write_toy(tmp_path), tmp_path / "quantised", method)
    alone = generate(quantised, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    together = run_ranks(quantised, 2, SpeculativeConfig(), PROMPTS, PARAMS)
    assert [choice["token_ids"] for choice in together] == [choice.token_ids for choice in alone]


def test_ranks_may_have_different_numbers_of_heads(stories: Path) -> None:
    """stories260K has four KV heads; of three ranks the first has two of them."""
    params = [{"temperature": 0.0, "seed": 0, "max_tokens": 16, "ignore_eos": True}]
    [alone] = generate(stories, [[1]], make_sampling_params(**params[0]))
    [together] = run_ranks(stories, 3, SpeculativeConfig(), [[1]], params)
    assert together["token_ids"] == alone.token_ids


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("phi3", 2), ("gpt_oss", 4), ("gemma4", 4)]
    + [("qwen3_5", 2), ("lfm2", 2)]
    + [
        pytest.param(name, 2, marks=pytest.mark.slow)
        for name in ("mixtral", "gemma4-moe", "qwen3_next", "olmo_hybrid", "lfm2_moe")
    ],
)
def test_transformers_modules_on_several_ranks_equal_one(name: str, size: int, tmp_path: Path) -> None:
    """Linears, experts and sinks are split by the configuration's plan; Phi-3's says that attention is not.

    Two of four ranks have the same KV head, or read another layer's. States are split by heads or channels.
    """
    write_decoder(name, tmp_path)
    alone = generate(
        tmp_path, PROMPTS, [make_sampling_params(**params) for params in PARAMS], model_impl="transformers"
    )
    drafts = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=8)
    together = run_ranks(tmp_path, size, drafts, PROMPTS, PARAMS, model_impl="transformers")
    assert [choice["token_ids"] for choice in together] == [choice.token_ids for choice in alone]
