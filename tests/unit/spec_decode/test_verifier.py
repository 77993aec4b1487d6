"""The walk takes the target's own token at every node; a Python oracle walks beside it."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specray.ops.noise import gumbel
from specray.ops.sampling import SamplerRow, sample
from specray.spec_decode import choice
from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.verifier import VerifyOutput, verify
from specray.step import SamplingOptions
from tests.support.distributions import MAX_Z, OPTIONS, processed_probs, worst_z

CPU = torch.device("cpu")
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
def trees(draw: st.DrawFn) -> RowTree:
    size = draw(st.integers(0, 14))
    parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size + 1, max_size=size + 1))
    return RowTree(tokens, parents)


rows_of = st.lists(st.tuples(trees(), st.sampled_from(CHOICES), st.integers(0, 99)), min_size=1, max_size=4)


def node_logits(tree: RowTree, seed: int) -> Tensor:
    return torch.randn(len(tree.tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def oracle(tree: RowTree, logits: Tensor, options: SamplingOptions, known: list[int]) -> list[int]:
    """Tokens emitted: sample from the float64 law with the noise's own values, descend where a child has the token."""
    node, known, emitted = 0, list(known), []
    while node is not None:
        probs = processed_probs(
            logits[node].numpy(), options._replace(temperature=options.temperature or 1.0), known, 2
        )
        scores = np.log(probs, out=np.full(VOCAB_SIZE, -np.inf), where=probs > 0)
        if options.temperature:
            scores = scores + gumbel([options.seed], [len(known)], VOCAB_SIZE, CPU)[0].double().numpy()
        token = int(scores.argmax())
        emitted.append(token)
        known.append(token)
        children = [n for n in range(1, len(tree.tokens)) if tree.parents[n] == node and tree.tokens[n] == token]
        node = children[0] if children else None
    return emitted


def verify_all(rows: list[tuple[RowTree, dict[str, Any], int]]) -> tuple[list[VerifyOutput], list[list[int]]]:
    """Verdicts of all rows in one batch, and the oracle's tokens."""
    logits = [node_logits(tree, seed) for tree, _, seed in rows]
    options = [OPTIONS._replace(seed=seed, **choice) for _, choice, seed in rows]
    known = [[3, 4, *range(seed % 3), tree.tokens[0]] for tree, _, seed in rows]
    samplers = [SamplerRow.start(o, k, 2, VOCAB_SIZE, CPU) for o, k in zip(options, known, strict=True)]
    verify_outputs = verify(torch.cat(logits), DraftTree.of([r[0] for r in rows]), samplers, [len(k) for k in known])
    truth = [oracle(row[0], *rest) for row, *rest in zip(rows, logits, options, known, strict=True)]
    return verify_outputs, truth


@given(rows_of)
def test_the_walk_emits_what_the_oracle_emits(rows: list[tuple[RowTree, dict[str, Any], int]]) -> None:
    verify_outputs, truth = verify_all(rows)
    assert [output.token_ids for output in verify_outputs] == truth


@given(rows_of)
def test_the_path_spells_the_accepted_tokens(rows: list[tuple[RowTree, dict[str, Any], int]]) -> None:
    for (tree, _, _), output in zip(rows, verify_all(rows)[0], strict=True):
        assert output.path[0] == 0
        assert [tree.parents[node] for node in output.path[1:]] == output.path[:-1]
        assert [tree.tokens[node] for node in output.path[1:]] == output.token_ids[:-1]


def test_a_tree_of_one_node_emits_one_token() -> None:
    verify_outputs, truth = verify_all([(RowTree([5], [NONE]), {"temperature": 1.0}, 3)])
    assert verify_outputs[0].token_ids == truth[0]
    assert len(truth[0]) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_says_so_and_its_neighbours_do_not_notice(bad: float) -> None:
    rows = [(RowTree([1, 2, 3], [NONE, 0, 1]), {"temperature": 1.0}, seed) for seed in range(3)]
    logits = torch.cat([node_logits(tree, seed) for tree, _, seed in rows])
    samplers = [SamplerRow.start(OPTIONS._replace(seed=s), [4, 1], 1, VOCAB_SIZE, CPU) for s in range(3)]
    tree = DraftTree.of([row[0] for row in rows])
    sound = verify(logits, tree, samplers, [2, 2, 2])
    logits[3:6] = bad
    samplers = [SamplerRow.start(OPTIONS._replace(seed=s), [4, 1], 1, VOCAB_SIZE, CPU) for s in range(3)]
    broken = verify(logits, tree, samplers, [2, 2, 2])
    assert [output.is_broken for output in broken] == [False, True, False]
    assert [broken[0], broken[2]] == [sound[0], sound[2]]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_those_of_the_unprocessed_logits_along_the_path(num_top: int) -> None:
    tree, options = RowTree([1, 2, 3], [NONE, 0, 0]), OPTIONS._replace(seed=4, temperature=0.5, logprobs=num_top)
    logits = node_logits(tree, 9)
    [output] = verify(logits, DraftTree.of([tree]), [SamplerRow.start(options, [1], 1, VOCAB_SIZE, CPU)], [1])
    assert output.logprobs is not None
    for node, token, reported in zip(output.path, output.token_ids, output.logprobs, strict=True):
        probs = processed_probs(logits[node].numpy(), OPTIONS)
        best = np.argsort(-probs)[:num_top].tolist()
        assert reported.token_id == token
        assert reported.logprob == pytest.approx(np.log(probs[token]), abs=1e-5)
        assert [t for t, _ in reported.top] == best
        assert [p for _, p in reported.top] == pytest.approx(np.log(probs[best]).tolist(), abs=1e-5)


# ---- the joint law of several tokens, whatever was drafted ----------------------------------------------------------

MARKOV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
NUM_TEXTS = 15_000
FIRST = 5


def random_tree(root: int, rng: np.random.Generator, seed: int, length: int) -> RowTree:  # noqa: ARG001
    size = int(rng.integers(0, 6))
    tokens = [root, *rng.integers(0, VOCAB_SIZE, size).tolist()]
    return RowTree(tokens, [NONE, *(int(rng.integers(0, n + 1)) for n in range(size))])


def coupled_chain(root: int, rng: np.random.Generator, seed: int, length: int) -> RowTree:
    """A good drafter: nearly the target's law, and the target's own noise."""
    tokens = [root]
    for position in range(length, length + 3):
        guess = MARKOV[tokens[-1]] + 0.3 * torch.from_numpy(rng.normal(size=VOCAB_SIZE)).float()
        tokens.append(int((guess + gumbel([seed], [position], VOCAB_SIZE, CPU)[0]).argmax()))
    return RowTree(tokens, [NONE, 0, 1, 2])


def triples(draw: Any, num_texts: int) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens of texts whose next token depends on the last one."""
    rng, counts = np.random.default_rng(0), np.zeros((VOCAB_SIZE,) * 3)
    texts = [[FIRST] for _ in range(num_texts)]
    samplers = [SamplerRow.start(OPTIONS._replace(seed=s), [FIRST], 1, VOCAB_SIZE, CPU) for s in range(num_texts)]
    while active := [i for i in range(num_texts) if len(texts[i]) < 4][:2_000]:
        rows = [draw(texts[i][-1], rng, i, len(texts[i])) for i in active]
        logits = MARKOV[torch.tensor([token for row in rows for token in row.tokens])]
        lengths = [len(texts[i]) for i in active]
        verify_outputs = verify(logits, DraftTree.of(rows), [samplers[i] for i in active], lengths)
        for i, output in zip(active, verify_outputs, strict=True):
            texts[i] += output.token_ids
    for triple, number in Counter(tuple(text[1:4]) for text in texts).items():
        counts[triple] = number
    return counts


def true_triples() -> np.ndarray:
    step = np.stack([processed_probs(row.numpy(), OPTIONS) for row in MARKOV])
    return step[FIRST][:, None, None] * step[:, :, None] * step[None, :, :]


@pytest.mark.parametrize("draw", [random_tree, coupled_chain])
def test_three_tokens_have_the_targets_joint_probs_whatever_is_drafted(draw: Any) -> None:
    assert worst_z(triples(draw, NUM_TEXTS if draw is random_tree else 6_000), true_triples()) < MAX_Z


def test_noise_shared_by_neighbouring_depths_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "sample", lambda logits, rows, at: sample(logits, rows, [p // 2 for p in at]))
    assert worst_z(triples(random_tree, NUM_TEXTS), true_triples()) > MAX_Z


def test_noise_that_depends_on_the_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyed by how much the step has emitted instead of by position: texts then depend on what was drafted."""
    calls = [0]

    def by_call(logits: Tensor, rows: list[SamplerRow], at: list[int]) -> Tensor:
        calls[0] += 1
        return sample(logits, rows, [calls[0]] * len(at))

    tree = DraftTree.of([RowTree([1, 2], [NONE, 0])])
    plain = [verify(MARKOV[:1], DraftTree.of([RowTree([1], [NONE])]), [_row(s)], [9])[0].token_ids for s in range(50)]
    monkeypatch.setattr(choice, "sample", by_call)
    drafted = [verify(MARKOV[:2], tree, [_row(s)], [9])[0].token_ids[:1] for s in range(50)]
    assert drafted != plain


def _row(seed: int) -> SamplerRow:
    return SamplerRow.start(OPTIONS._replace(seed=seed), [1], 1, VOCAB_SIZE, CPU)
