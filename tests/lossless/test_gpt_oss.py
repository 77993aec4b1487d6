"""gpt-oss with MXFP4 experts: one text with every published layout of EAGLE-3 heads, and its channels over HTTP."""

import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from cluster.config import AppConfig
from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm
from tests.support.gpt_oss import harmony_tokenizer, write_gpt_oss
from tests.support.local_server import local_server, served
from tests.support.public_heads import NUM_LAYERS, PUBLISHED, small_head

HEADS = [name for name in PUBLISHED if "gpt-oss" in name]
IN_BFLOAT16 = pytest.mark.skipif(kernels() is None, reason="torch's operations promise this in float32 only")
PROMPTS = [[0, *range(4, 40)], [5, 6, 7], [9] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(len(PROMPTS))]


def texts_of(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    return [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("dtype", "heads"), [("float32", HEADS), pytest.param("bfloat16", HEADS[:2], marks=IN_BFLOAT16)]
)
def test_heads_of_every_published_layout_change_no_text(dtype: str, heads: list[str], tmp_path: Path) -> None:
    """With windows, YaRN and sinks."""
    assert len(HEADS) == 6
    write_gpt_oss(tmp_path, num_layers=NUM_LAYERS, hidden_size=32)
    with make_llm(tmp_path, dtype=dtype) as llm:
        assert llm._executor.worker.capacity.has_one_text
        greedy, sampled = texts_of(llm, GREEDY), texts_of(llm, SAMPLED)
        assert greedy != sampled
        for number, name in enumerate(heads):
            head = small_head(name)
            if "v3" in name:  # as published: also what leaves the last layer
                head.config["eagle_aux_hidden_state_layer_ids"] = [2, 4, NUM_LAYERS]
            folder = head.write(tmp_path / f"head{number}")
            drafts = SpeculativeConfig(
                algorithm="EAGLE3", draft_model_path=str(folder), num_steps=3, eagle_topk=2, num_draft_tokens=6
            )
            with llm.with_speculative(drafts) as drafting:
                assert texts_of(drafting, GREEDY) == greedy, name
                assert texts_of(drafting, SAMPLED) == sampled, name
                assert drafting._executor.worker.capacity.max_draft_tokens > 0


def test_a_served_checkpoint_streams_a_call_and_answers_in_json(tmp_path: Path) -> None:
    """The bias makes random weights choose a channel by its first letter, and end."""
    tokenizer = harmony_tokenizer()
    end, call, final, commentary = map(tokenizer.convert_tokens_to_ids, ("<|end|>", "<|call|>", "f", "c"))
    vocabulary = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    write_gpt_oss(tmp_path, max_position_embeddings=2048, **vocabulary)
    tokenizer.save_pretrained(tmp_path)
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}]
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1}
    calling = {"tools": tools, "tool_choice": "required", "logit_bias": {end: 2, call: 100, commentary: 60}}
    config = AppConfig(model=str(tmp_path), speculative={"algorithm": "NGRAM", "num_draft_tokens": 4})
    with served(lambda: local_server(config)) as (url, _), httpx.Client(base_url=url, timeout=120.0) as http:
        formatted = {"response_format": {"type": "json_object"}, "logit_bias": {end: 60, final: 60}}
        choice = http.post("/v1/chat/completions", json=asked | formatted).json()["choices"][0]
        lines = http.post("/v1/chat/completions", json=asked | calling | {"stream": True}).text.splitlines()
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["message"]["content"].startswith("{")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "f"
    assert set(json.loads("".join(call["function"]["arguments"] for call in calls))) == {"x"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
