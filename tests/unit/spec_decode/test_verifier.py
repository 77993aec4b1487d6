"""Verification emits the target's tokens along the tree, as does a Python reference."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specray.ops.noise import noise_keys
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.spec_decode import depth_walk, node_sampler
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.node_sampler import coupled
from specray.spec_decode.rejection import sample_by_rejection
from specray.spec_decode.step_ops import step_ops
from specray.step import SamplingOptions
from tests.support.distributions import MAX_Z, OPTIONS, processed_probs, worst_z
from tests.support.sampling import Verified, mask_of, noise_of, state_of, verify_rows

VOCAB_SIZE = 8
CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    {"temperature": 1.0, "min_tokens": 3, "eos_token_ids": [0, 1]},
    {"temperature": 0.0, "logit_bias": [(2, 2.0)], "frequency_penalty": 2.0},
]


@st.composite
def trees(draw: st.DrawFn) -> TreeLists:
    size = draw(st.integers(0, 14))
    parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size + 1, max_size=size + 1))
    return TreeLists(tokens, parents)


rows_of = st.lists(st.tuples(trees(), st.sampled_from(CHOICES), st.integers(0, 99)), min_size=1, max_size=4)


def node_logits(tree: TreeLists, seed: int) -> Tensor:
    return torch.randn(len(tree.tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def reference(tree: TreeLists, logits: Tensor, options: SamplingOptions, known: list[int]) -> list[int]:
    """The expected tokens: sample in float64 with the same noise, and continue at the child with that token."""
    node, known, emitted = 0, list(known), []
    while node is not None:
        probs = processed_probs(
            logits[node].numpy(), options._replace(temperature=options.temperature or 1.0), known, 2
        )
        scores = np.log(probs, out=np.full(VOCAB_SIZE, -np.inf), where=probs > 0)
        if options.temperature:
            scores = scores + noise_of([options.seed], [len(known)], VOCAB_SIZE)[0].double().numpy()
        token = int(scores.argmax())
        emitted.append(token)
        known.append(token)
        children = [n for n in range(1, len(tree.tokens)) if tree.parents[n] == node and tree.tokens[n] == token]
        node = children[0] if children else None
    return emitted


def verify_all(rows: list[tuple[TreeLists, dict[str, Any], int]]) -> tuple[list[Verified], list[list[int]]]:
    """The outcome of all rows in one batch, and the reference's tokens."""
    logits = [node_logits(tree, seed) for tree, _, seed in rows]
    options = [OPTIONS._replace(seed=seed, **choice) for _, choice, seed in rows]
    known = [[3, 4, *range(seed % 3), tree.tokens[0]] for tree, _, seed in rows]
    states = [state_of(o, k, 2) for o, k in zip(options, known, strict=True)]
    verified = verify_rows(torch.cat(logits), [row[0] for row in rows], states, [len(k) for k in known])
    expected = [reference(row[0], *rest) for row, *rest in zip(rows, logits, options, known, strict=True)]
    return verified, expected


@given(rows_of)
def test_emitted_tokens_equal_the_reference(rows: list[tuple[TreeLists, dict[str, Any], int]]) -> None:
    verified, expected = verify_all(rows)
    assert [output.token_ids for output in verified] == expected


@given(rows_of)
def test_the_path_has_the_accepted_tokens(rows: list[tuple[TreeLists, dict[str, Any], int]]) -> None:
    for (tree, _, _), output in zip(rows, verify_all(rows)[0], strict=True):
        assert output.path[0] == 0
        assert [tree.parents[node] for node in output.path[1:]] == output.path[:-1]
        assert [tree.tokens[node] for node in output.path[1:]] == output.token_ids[:-1]


def test_a_tree_of_one_node_emits_one_token() -> None:
    verified, expected = verify_all([(TreeLists([5], [NONE]), {"temperature": 1.0}, 3)])
    assert verified[0].token_ids == expected[0]
    assert len(expected[0]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_row_emits_nothing_and_others_are_unchanged(value: float, temperature: float) -> None:
    rows = [(TreeLists([1, 2, 3], [NONE, 0, 1]), {"temperature": 1.0}, seed) for seed in range(3)]
    logits = torch.cat([node_logits(tree, seed) for tree, _, seed in rows])
    trees, options = [row[0] for row in rows], [OPTIONS._replace(seed=s, temperature=temperature) for s in range(3)]
    clean = verify_rows(logits, trees, [state_of(o, [4, 1], 1) for o in options], [2, 2, 2])
    logits[3:6] = value
    broken = verify_rows(logits, trees, [state_of(o, [4, 1], 1) for o in options], [2, 2, 2])
    assert [output.is_broken for output in broken] == [False, True, False]
    assert [broken[0], broken[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_those_of_unprocessed_logits_along_the_path(num_top: int) -> None:
    tree, options = TreeLists([1, 2, 3], [NONE, 0, 0]), OPTIONS._replace(seed=4, temperature=0.5, logprobs=num_top)
    logits = node_logits(tree, 9)
    [output] = verify_rows(logits, [tree], [state_of(options, [1], 1)], [1])
    assert output.logprobs is not None
    for node, token, reported in zip(output.path, output.token_ids, output.logprobs, strict=True):
        probs = processed_probs(logits[node].numpy(), OPTIONS)
        best = np.argsort(-probs)[:num_top].tolist()
        assert reported.token_id == token
        assert reported.logprob == pytest.approx(np.log(probs[token]), abs=1e-5)
        assert [t for t, _ in reported.top] == best
        assert [p for _, p in reported.top] == pytest.approx(np.log(probs[best]).tolist(), abs=1e-5)


# ---- joint distribution of several tokens ---------------------------------------------------------------------------

MARKOV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
NUM_TEXTS = 15_000
FIRST = 5


def random_tree(root: int, rng: np.random.Generator, seed: int, length: int) -> TreeLists:  # noqa: ARG001
    size = int(rng.integers(0, 6))
    tokens = [root, *rng.integers(0, VOCAB_SIZE, size).tolist()]
    return TreeLists(tokens, [NONE, *(int(rng.integers(0, n + 1)) for n in range(size))])


def coupled_chain(root: int, rng: np.random.Generator, seed: int, length: int) -> TreeLists:
    """A good drafter: nearly the target's distribution, and the target's noise."""
    tokens = [root]
    errors = 0.3 * rng.normal(size=(3, VOCAB_SIZE))
    for change in errors + noise_of([seed] * 3, [length, length + 1, length + 2], VOCAB_SIZE).numpy():
        tokens.append(int((MARKOV[tokens[-1]].numpy() + change).argmax()))
    return TreeLists(tokens, [NONE, 0, 1, 2])


def triples(draw: Any, num_texts: int) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens of texts from a Markov chain."""
    rng, counts = np.random.default_rng(0), np.zeros((VOCAB_SIZE,) * 3)
    texts = [[FIRST] for _ in range(num_texts)]
    states = [state_of(OPTIONS._replace(seed=s), [FIRST], 1) for s in range(num_texts)]
    while active := [i for i in range(num_texts) if len(texts[i]) < 4][:2_000]:
        rows = [draw(texts[i][-1], rng, i, len(texts[i])) for i in active]
        logits = MARKOV[torch.tensor([token for row in rows for token in row.tokens])]
        lengths = [len(texts[i]) for i in active]
        verified = verify_rows(logits, rows, [states[i] for i in active], lengths)
        for i, output in zip(active, verified, strict=True):
            texts[i] += output.token_ids
    for triple, number in Counter(tuple(text[1:4]) for text in texts).items():
        counts[triple] = number
    return counts


def true_triples() -> np.ndarray:
    step = np.stack([processed_probs(row.numpy(), OPTIONS) for row in MARKOV])
    return step[FIRST][:, None, None] * step[:, :, None] * step[None, :, :]


@pytest.mark.parametrize("draw", [random_tree, coupled_chain])
def test_three_tokens_have_the_targets_joint_distribution(draw: Any) -> None:
    assert worst_z(triples(draw, NUM_TEXTS if draw is random_tree else 6_000), true_triples()) < MAX_Z


def test_noise_shared_by_adjacent_depths_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    true_keys = depth_walk.noise_keys
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    monkeypatch.setattr(depth_walk, "noise_keys", lambda seeds, positions: true_keys(seeds, positions // 2))
    assert worst_z(triples(random_tree, NUM_TEXTS), true_triples()) > MAX_Z


def test_noise_that_depends_on_drafts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here noise depends on the number of calls instead of the position, so output depends on the drafts."""
    calls, true_sample = [0], node_sampler.sample

    def by_call(logits: Tensor, batch: SamplingBatch, _keys: Tensor) -> Tensor:
        calls[0] += 1
        return true_sample(logits, batch, noise_keys(batch.seeds, torch.full_like(batch.seeds, calls[0])))

    tree, root = TreeLists([1, 2], [NONE, 0]), TreeLists([1], [NONE])
    plain = [verify_rows(MARKOV[:1], [root], [_state(s)], [9])[0].token_ids for s in range(50)]
    monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    monkeypatch.setattr(node_sampler, "sample", by_call)
    drafted = [verify_rows(MARKOV[:2], [tree], [_state(s)], [9])[0].token_ids[:1] for s in range(50)]
    assert drafted != plain


def _state(seed: int) -> SamplingState:
    return state_of(OPTIONS._replace(seed=seed), [1], 1)


# ---- verification of all nodes at once, and by depth ----------------------------------------------------------------


@given(rows_of)
def test_verification_at_once_and_by_depth_agree(rows: list[tuple[TreeLists, dict[str, Any], int]]) -> None:
    """The kernels, torch at once, and torch depth by depth, for all requests."""
    rows = [row for row in rows if set(row[1]) <= {"temperature", "top_p", "min_p"}]
    if not rows:
        return
    logits = torch.cat([node_logits(tree, seed) for tree, _, seed in rows])
    states = [state_of(OPTIONS._replace(seed=seed, **choice), [3], 1) for _, choice, seed in rows]
    outputs = []
    for uses_kernels, needs_walk in ((True, False), (False, False), (False, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SamplingState, "needs_walk", needs_walk)
            if not uses_kernels:
                patch.setenv("SPECRAY_KERNELS", "torch")
            patch.setattr(step_ops(torch.device("cpu")), "walks_sampled", False)
            outputs.append(verify_rows(logits, [row[0] for row in rows], states, [4] * len(rows)))
    assert outputs[0] == outputs[1] == outputs[2]


@given(rows_of)
def test_logits_of_a_half_type_give_the_outcome_of_their_float32_copies(
    rows: list[tuple[TreeLists, dict[str, Any], int]],
) -> None:
    """At once, and by depth with penalties, logprobs and samplers that read probabilities."""
    logits = torch.cat([node_logits(tree, seed) for tree, _, seed in rows]).bfloat16()
    lists, lengths = [row[0] for row in rows], [4] * len(rows)
    for sampler, logprobs in ((coupled, None), (coupled, 2), (sample_by_rejection, None)):
        options = [OPTIONS._replace(seed=seed, logprobs=logprobs, **choice) for _, choice, seed in rows]
        outputs = []
        for given_logits in (logits, logits.float()):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPECRAY_KERNELS", "torch")  # the kernels' logits are float32
                states = [state_of(option, [3], 1) for option in options]
                outputs.append(verify_rows(given_logits, lists, states, lengths, sampler))
        assert outputs[0] == outputs[1]


@given(rows_of, st.randoms(use_true_random=False))
def test_a_grammar_mask_applies_to_its_node(rows: list[tuple[TreeLists, dict[str, Any], int]], random: Random) -> None:
    """Masked tokens are never emitted. The result is that of masked logits."""
    logits = torch.cat([node_logits(tree, seed) for tree, _, seed in rows])
    allowed = torch.tensor([[random.random() < 0.7 for _ in range(VOCAB_SIZE)] for _ in logits])
    allowed[:, random.randrange(VOCAB_SIZE)] = True
    allowed[:, 5] = True  # not an end token, which min_tokens may mask

    def verified(node_logits: Tensor, mask: Tensor | None) -> list[Verified]:
        states = [state_of(OPTIONS._replace(seed=seed, **choice), [3, 4], 2) for _, choice, seed in rows]
        packed = None if mask is None else mask_of(mask)
        return verify_rows(node_logits.clone(), [row[0] for row in rows], states, [2] * len(rows), mask=packed)

    masked = verified(logits, allowed)
    assert masked == verified(logits.masked_fill(~allowed, -torch.inf), None)
    start = 0
    for (tree, *_), output in zip(rows, masked, strict=True):
        for node, token in zip(output.path, output.token_ids, strict=True):
            assert allowed[start + node, token]
        start += len(tree.tokens)


def test_logprobs_are_those_before_the_mask() -> None:
    """Also of a request whose mask is another request's."""
    tree, logits = TreeLists([1, 2], [NONE, 0]), torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    allowed = torch.zeros(2, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, 2] = allowed[1, 5] = True
    states = [state_of(OPTIONS._replace(seed=seed, logprobs=VOCAB_SIZE), [3], 1) for seed in range(2)]
    first, second = verify_rows(logits.clone(), [tree, tree], states, [1, 1], mask=mask_of(allowed, rows=[2, 3]))
    assert second.token_ids == [2, 5]
    for output, rows in ((first, logits[:2]), (second, logits[2:])):
        assert output.logprobs is not None
        for node, logprob in zip(output.path, output.logprobs, strict=True):
            expected = rows[node].log_softmax(-1)
            assert logprob.logprob == expected[logprob.token_id]
            assert len(logprob.top) == VOCAB_SIZE
            assert all(value > -30 for _, value in logprob.top)
