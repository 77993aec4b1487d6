"""The draft model in engine runs, compared at each call with a reference that has no KV cache and no batching.

All trees and all draft KV are compared, also after steps that the drafter missed or deferred.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.spec_decode import DRAFTERS, draft_model
from specray.spec_decode.draft_model import PrefixHashes, StandaloneDrafter, split_budget
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, DraftFaultError, TargetView
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape
from specray.step import DraftFault
from tests.support.checked_runs import CLOSE, PROMPTS, RUNS, assert_checked, is_grown_to, run, total
from tests.support.colocated import worker_of
from tests.support.decoders import write_decoder
from tests.support.drafters import Tokens, make_context
from tests.support.engine import make_llm
from tests.support.methods import Make, standalone
from tests.support.naive_eagle import NaiveStandalone
from tests.support.toy import VOCAB_SIZE, toy_tokenizer, write_toy

MODELS: dict[str, Make] = {
    "chain": standalone(),
    "tree": standalone(shape=(4, 2, 9)),
    "map": standalone(shape=(3, 3, 8), token_map=range(2, 60, 3), variant="qwen3"),
    "flat": standalone(shape=(1, 6, 5), variant="tied"),
}


class CheckedDrafter:
    """A drafter whose calls are compared with the reference. Calls for which `is_called` returns False are skipped."""

    def __init__(self, drafter: StandaloneDrafter, shape: TreeShape) -> None:
        self.max_draft_tokens, self.aux_hidden_state_layers = drafter.max_draft_tokens, drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.is_called: Callable[[], bool] = lambda: True
        self.num_checked = self.num_without_draft = self.num_close_calls = 0
        self.drafter = drafter
        self._shape = shape

    def propose(self, context: ProposeContext) -> DraftTree:
        if not self.is_called():
            raise DraftFaultError(DraftFault.LATE)
        proposed = self.drafter.propose(context)
        with torch.inference_mode():
            for request, tree in zip(context.requests, proposed.to_lists(), strict=True):
                if len(tree.tokens) == 1:
                    self.num_without_draft += 1
                    continue
                expected = NaiveStandalone(context, request, self.drafter._model, self._shape)
                torch.testing.assert_close(self._kv(context, request), expected.kv, atol=1e-4, rtol=1e-3)
                self.num_checked += 1
                is_same = is_grown_to(tree, expected.tree, context, self._shape.num_steps)
                self.num_close_calls += not is_same
                assert is_same or expected.has_near_tie(CLOSE), request
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self.drafter.release(slots)

    def _kv(self, context: ProposeContext, request: DraftRequest) -> torch.Tensor:
        kv_slots = context.table.kv_slots[request.slot, : request.end].long()
        return self.drafter._kv.attention.pool[:, kv_slots]  # type: ignore[attr-defined]


Start = Callable[..., tuple[LLM, CheckedDrafter]]


@pytest.fixture
def start(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function (name in MODELS, engine options) -> (engine, its checked drafter)."""
    drafters: list[CheckedDrafter] = []
    method = DRAFTERS["STANDALONE"]

    def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
        drafter = method.make(config, target)
        assert isinstance(drafter, StandaloneDrafter)
        drafters.append(CheckedDrafter(drafter, configured_shape(config, "")))
        return drafters[-1]

    monkeypatch.setitem(DRAFTERS, "STANDALONE", method._replace(make=make))

    def start(name: str, **options: Any) -> tuple[LLM, CheckedDrafter]:
        llm = make_llm(toy, speculative=MODELS[name](toy, tmp_path), **options)
        return llm, drafters[-1]

    return start


@pytest.mark.parametrize("name", MODELS)
def test_trees_equal_the_reference_with_and_without_a_cached_prefix(name: str, start: Start) -> None:
    llm, drafter = start(name, page_size=4)
    with llm:
        cold, warm = run(llm), run(llm)
    assert [choice.token_ids for choice in warm] == [choice.token_ids for choice in cold]
    assert total(warm, "num_cached_tokens") >= 40
    assert total(warm, "num_accepted") > 0
    assert_checked(drafter, at_least=40)
    assert drafter.num_without_draft == 0


@pytest.mark.parametrize("name", RUNS)
def test_trees_equal_the_reference_with_any_pages_chunks_and_preemption(name: str, start: Start) -> None:
    llm, drafter = start("tree", **RUNS[name])
    with llm:
        choices = run(llm) + run(llm, PROMPTS[::-1])
        assert (total(choices, "num_preemptions") > 0) == (name == "preemption")
        llm.engine.step()
        assert not drafter.drafter._hashes._known  # no entry for freed slots
    assert_checked(drafter, at_least=40)
    assert drafter.num_without_draft == 0


def test_missed_steps_are_read_later(start: Start) -> None:
    llm, drafter = start("tree", page_size=4)
    with llm:
        called = iter([False, False, True, False, False, True, True] * 20)
        drafter.is_called = lambda: next(called)
        run(llm)
        run(llm, PROMPTS[::-1], max_tokens=12)
    assert_checked(drafter, at_least=20)
    assert drafter.num_without_draft == 0


def test_a_prefix_cached_before_the_drafter_started_is_read(start: Start) -> None:
    llm, drafter = start("tree", page_size=4)
    with llm:
        drafter.is_called = lambda: False
        run(llm)
        drafter.is_called = lambda: True
        warm = run(llm)
    assert total(warm, "num_cached_tokens") >= 40
    assert_checked(drafter, at_least=20)
    assert drafter.num_without_draft == 0


def test_a_long_prefix_is_read_in_parts_while_others_draft(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)
    llm, drafter = start("tree", page_size=4)
    long: list[int] = [0, *range(4, 60)]
    num_read: list[int] = []
    record = drafter.drafter._record

    def count_and_record(context: ProposeContext, parts: Sequence[DraftRequest]) -> None:
        num_read.append(sum(part.end - part.start for part in parts))
        record(context, parts)

    drafter.drafter._record = count_and_record  # type: ignore[method-assign]
    with llm:
        drafter.is_called = lambda: False
        run(llm, [long])
        drafter.is_called = lambda: True
        choices = run(llm, [long, [5]], max_tokens=30)
    assert choices[0].usage is not None
    assert choices[0].usage.num_cached_tokens == 56
    assert 2 <= drafter.num_without_draft <= 56 // 8  # of the long prompt only
    assert 8 < max(num_read) <= 8 + 2 * (4 + 1)  # one part, and the new tokens of two requests
    assert_checked(drafter, at_least=10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [None, (3, 2, 7)])
def test_drafts_of_the_target_itself_are_accepted(
    shape: tuple[int, int, int] | None, temperature: float, toy: Path
) -> None:
    steps, topk, nodes = shape or (None, None, None)
    speculative = SpeculativeConfig(
        algorithm="STANDALONE", draft_model_path=str(toy), num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes
    )
    with make_llm(toy, speculative=speculative, page_size=4) as llm:
        choices = run(llm, max_tokens=41, temperatures=[temperature] * len(PROMPTS))
    for choice in choices:
        assert choice.usage is not None
        if shape is None:
            assert choice.usage.num_accepted == choice.usage.num_draft_tokens == 30
        else:  # a branch may be cut for another with higher scores
            assert choice.usage.num_accepted >= 1.5 * choice.usage.num_verify_steps


def test_nothing_is_drafted_beyond_the_draft_models_context(toy: Path, tmp_path: Path) -> None:
    speculative = MODELS["tree"](toy, tmp_path)
    change_config(tmp_path / "draft", max_position_embeddings=20)
    prompts = [[0, 9, 8, 7], [0, *range(4, 40)]]
    with make_llm(toy, page_size=4) as llm:
        expected = [choice.token_ids for choice in run(llm, prompts, max_tokens=40)]
    with make_llm(toy, speculative=speculative, page_size=4, chunked_prefill_size=16) as llm:
        short, long = run(llm, prompts, max_tokens=40)
    assert [short.token_ids, long.token_ids] == expected
    assert short.usage is not None
    assert long.usage is not None
    assert 0 < short.usage.num_draft_tokens <= 8 * 16  # the last tree starts at position 16
    assert long.usage.num_draft_tokens == 0


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_draft_dtype_does_not_change_output(dtype: str, toy: Path, tmp_path: Path) -> None:
    speculative = MODELS["tree"](toy, tmp_path).model_copy(update={"draft_dtype": dtype})
    with make_llm(toy) as llm:
        expected = [choice.token_ids for choice in run(llm)]
    with make_llm(toy, speculative=speculative) as llm:
        pool = drafter_of(llm)._kv.attention.pool  # type: ignore[attr-defined]
        assert pool.dtype is (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert [choice.token_ids for choice in run(llm)] == expected


def test_no_requests_give_no_trees(toy: Path, tmp_path: Path) -> None:
    with make_llm(toy, speculative=MODELS["chain"](toy, tmp_path)) as llm:
        assert drafter_of(llm).propose(make_context([])).to_lists() == []


def test_nan_logits_are_a_draft_fault(toy: Path, tmp_path: Path) -> None:
    speculative = MODELS["chain"](toy, tmp_path)
    path = tmp_path / "draft" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, path)
    with make_llm(toy, speculative=speculative) as llm:
        run(llm)
        counts = llm.engine.stats.labelled["specray_draft_faults_total"]
        assert {kind for kind, count in counts.items() if count} == {"nan"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize(("target_size", "draft_size"), [(80, 64), (64, 80), (72, 96), (96, 72)])
def test_vocabularies_may_differ_in_padding(
    target_size: int,
    draft_size: int,
    verification: Literal["coupled", "rejection"],
    temperature: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output may contain padding ids, as with plain decoding, but drafts do not."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_toy(tmp_path / "target", vocab_size=target_size)
    draft = resized_copy(target, tmp_path / "draft", draft_size)
    speculative = SpeculativeConfig(
        algorithm="STANDALONE",
        draft_model_path=str(draft),
        num_steps=3,
        eagle_topk=1,
        num_draft_tokens=4,
        verification=verification,
    )
    options: dict[str, Any] = {"max_tokens": 40, "temperatures": [temperature] * len(PROMPTS)}
    with make_llm(target, page_size=4) as llm:
        expected = [choice.token_ids for choice in run(llm, **options)]
    drafted: list[int] = []
    propose = StandaloneDrafter.propose

    def record(drafter: StandaloneDrafter, context: ProposeContext) -> DraftTree:
        tree = propose(drafter, context)
        drafted.extend(token for lists in tree.to_lists() for token in lists.tokens[1:])
        return tree

    monkeypatch.setattr(StandaloneDrafter, "propose", record)
    with make_llm(target, speculative=speculative, page_size=4) as llm:
        choices = run(llm, **options)
    if temperature == 0.0 or verification == "coupled":
        assert [choice.token_ids for choice in choices] == expected
    emitted = {token for choice in choices for token in choice.token_ids}
    assert any(token >= VOCAB_SIZE for token in emitted) == (target_size > VOCAB_SIZE)
    assert total(choices, "num_accepted") > 0
    assert max(drafted) < VOCAB_SIZE


def test_a_token_map_may_contain_ids_beyond_the_draft_models_vocabulary(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_toy(tmp_path / "target", vocab_size=80)
    path = tmp_path / "map.json"
    path.write_text(json.dumps([70, *range(2, 64), 79]))
    speculative = SpeculativeConfig(
        algorithm="STANDALONE",
        draft_model_path=str(resized_copy(target, tmp_path / "draft", 72)),
        token_map=str(path),
    )
    with make_llm(target, page_size=4) as llm:
        expected = [choice.token_ids for choice in run(llm)]
    with make_llm(target, speculative=speculative, page_size=4) as llm:
        assert [choice.token_ids for choice in run(llm)] == expected
        ids = drafter_of(llm)._model.draft_token_ids
        assert ids is not None
        assert sorted(ids.tolist()) == list(range(1, 64))  # with the end token and without padding


def test_a_token_of_the_draft_model_only_is_refused(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    draft = resized_copy(toy, tmp_path / "draft", 72)
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["☂"] = VOCAB_SIZE
    path.write_text(json.dumps(content))
    speculative = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(draft))
    with pytest.raises(ConfigError, match=r"token 64 is '☂' in the draft model's vocabulary, but None in the target's"):
        make_llm(toy, speculative=speculative)


def test_a_different_vocabulary_of_the_same_size_is_refused(toy: Path, tmp_path: Path) -> None:
    speculative = MODELS["chain"](toy, tmp_path)
    token = toy_tokenizer().convert_ids_to_tokens(30)
    path = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["☂"] = content["model"]["vocab"].pop(token)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"token 30 is '☂' in the draft model's vocabulary, but '{token}' in the"):
        make_llm(toy, speculative=speculative)


def test_a_draft_model_with_states_is_refused(toy: Path, tmp_path: Path) -> None:
    write_decoder("lfm2", tmp_path)
    speculative = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(tmp_path))
    with pytest.raises(ConfigError, match="layers of this draft model keep states, which a draft tree would change"):
        make_llm(toy, speculative=speculative)


@pytest.mark.parametrize("has_equal_weights", [True, False])
def test_equal_embeddings_are_shared_with_the_target(has_equal_weights: bool, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_toy(tmp_path / "target", "tied")
    draft = write_toy(tmp_path / "draft", "tied", seed=0 if has_equal_weights else 1)
    speculative = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(draft))
    with make_llm(target, speculative=speculative) as llm:
        model, target_model = drafter_of(llm)._model, worker_of(llm).model
        assert (model._model.embedding is target_model.embedding) == has_equal_weights
        assert (model.vocab_head is target_model.head) == has_equal_weights


@pytest.mark.parametrize(
    ("sizes", "budget", "counts"),
    [([], 4, []), ([3, 0, 2], 9, [3, 0, 2]), ([700, 2, 3], 10, [5, 2, 3]), ([9, 9], 10, [9, 1]), ([1, 1], 0, [0, 0])],
)
def test_the_token_budget_is_shared_smallest_first(sizes: list[int], budget: int, counts: list[int]) -> None:
    assert split_budget(sizes, budget) == counts


def test_hashes_are_equal_for_equal_prefixes_only() -> None:
    hashes = PrefixHashes(max_tokens=100)

    def hashes_of(slot: int, token_ids: list[int]) -> np.ndarray:
        context = make_context([Tokens(slot, token_ids)])
        return hashes.of(context, context.requests[0])

    tokens = np.random.default_rng(0).integers(60, size=41).tolist()
    whole = hashes_of(0, tokens).copy()
    assert len(set(whole.tolist())) == 40
    for length in (3, 11, 41):  # a growing request
        assert np.array_equal(hashes_of(1, tokens[:length]), whole[: length - 1])
    changed = hashes_of(2, [*tokens[:20], tokens[20] + 1, *tokens[21:]])
    assert np.array_equal(changed[:20], whole[:20])
    assert not np.any(changed[20:] == whole[20:])
    hashes.forget([0, 7])
    assert np.array_equal(hashes_of(0, tokens[::-1]), hashes_of(3, tokens[::-1]))


def resized_copy(model: Path, folder: Path, vocab_size: int) -> Path:
    """A copy with the vocabulary padded or cut to `vocab_size` rows. Padding tokens are likely to be sampled."""
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name][:vocab_size]
        padding = torch.randn(vocab_size - len(rows), rows.shape[1], generator=torch.Generator().manual_seed(7))
        weights[name] = torch.cat((rows, padding))
    save_file(weights, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    toy_tokenizer().save_pretrained(folder)
    return folder


def drafter_of(llm: LLM) -> StandaloneDrafter:
    drafter = worker_of(llm).drafts.drafter.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, StandaloneDrafter)
    return drafter


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
