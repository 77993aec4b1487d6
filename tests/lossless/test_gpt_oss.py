"""gpt-oss with MXFP4 experts: one text with every published layout of EAGLE-3 heads for it."""

from collections.abc import Sequence
from pathlib import Path

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm
from tests.support.gpt_oss import write_gpt_oss
from tests.support.public_heads import NUM_LAYERS, PUBLISHED, small_head

HEADS = [name for name in PUBLISHED if "gpt-oss" in name]
PROMPTS = [[0, *range(4, 40)], [5, 6, 7], [9] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(len(PROMPTS))]


def texts_of(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    return [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, params)]


def test_heads_of_every_published_layout_change_no_text(tmp_path: Path) -> None:
    """With windows, YaRN and sinks."""
    assert len(HEADS) == 6
    write_gpt_oss(tmp_path, num_layers=NUM_LAYERS, hidden_size=32)
    with make_llm(tmp_path) as llm:
        greedy, sampled = texts_of(llm, GREEDY), texts_of(llm, SAMPLED)
        assert greedy != sampled
        for number, name in enumerate(HEADS):
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
