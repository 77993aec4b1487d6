"""Rejection sampling gives the target's distribution at every position, by chi-square against float64.

Chains of four drafts and a bonus token over 64 tokens, with different distributions at each position. The target gives
one token a large probability and the drafter a larger one, which makes a small bias of acceptance visible. Wrong
verifiers fail the same test.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from specray.sampling_params import SamplingParams
from specray.spec_decode import rejection
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.rejection import accept_or_resample, sample_by_rejection
from tests.support.distributions import MAX_Z, OPTIONS, processed_probs, worst_z
from tests.support.engine import generate
from tests.support.methods import METHODS
from tests.support.sampling import noise_of, state_of, verify_rows

V, K, CHUNK = 64, 4, 5_000  # what a cache holds
FEW, MANY, ALL = 100_000, 400_000, 2_000_000
Sampler = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]


def make_probs() -> tuple[np.ndarray, np.ndarray]:
    """(target's, drafter's), float64 [K + 1, V]."""
    rng = np.random.default_rng(5)
    target = rng.dirichlet(np.full(V, 0.7), K + 1)
    draft = target * np.exp(0.4 * rng.normal(size=target.shape))
    target[:, 7] = 0.0
    target *= 0.7 / target.sum(1, keepdims=True)
    draft[:, 7] = 0.0
    draft *= 0.6 / draft.sum(1, keepdims=True)
    target[:, 7], draft[:, 7] = 0.3, 0.4
    return target, draft


P, Q = make_probs()


class Variant(NamedTuple):
    """A verifier under test: sampler, uniforms, and how drafts are drawn."""

    sample: Sampler = accept_or_resample
    uniforms: Callable[[int, Tensor], Tensor] = lambda position, uniforms: uniforms  # noqa: ARG005
    bonus_probs: np.ndarray = P[K]
    greedy_drafts: bool = False


def emitted(variant: Variant, num_chains: int) -> np.ndarray:
    """Counts [K + 1, V] of the tokens at each position, over the chains that reach it."""
    generator, counts = torch.Generator().manual_seed(11), np.zeros((K + 1, V))
    for start in range(0, num_chains, CHUNK):
        alive = min(CHUNK, num_chains - start)
        for position in range(K + 1):
            probs = P[position] if position < K else variant.bonus_probs
            draft_probs = torch.from_numpy(Q[position]).float()
            drafts = torch.multinomial(draft_probs, alive, True, generator=generator)[:, None]
            if variant.greedy_drafts:
                drafts = draft_probs.argmax().expand(alive, 1)
            drafts = drafts[:, : int(position < K)]
            uniforms = variant.uniforms(position, torch.rand(drafts.shape, generator=generator, dtype=torch.float64))
            noise = gumbel((alive, V), generator)
            target = torch.from_numpy(probs).float().expand(alive, V)
            tokens = variant.sample(target, drafts, draft_probs.expand(alive, V), uniforms, noise)
            counts[position] += np.bincount(tokens.numpy(), minlength=V)
            alive = int((tokens[:, None] == drafts).sum())
    return counts


def gumbel(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise, by two logarithms: three times as fast as torch's exponential distribution."""
    return torch.rand(shape, generator=generator).log_().neg_().log_().neg_()


def worst(counts: np.ndarray) -> float:
    return max(worst_z(counts[position], P[position]) for position in range(K + 1))


def from_the_target_again(
    probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, uniforms: Tensor, noise: Tensor
) -> Tensor:
    """After a rejection, draws the token from p instead of the residual distribution."""
    correct = accept_or_resample(probs, drafts, draft_probs, uniforms, noise)
    rejected = correct != drafts[:, 0] if drafts.shape[1] else torch.zeros(len(probs), dtype=torch.bool)
    return torch.where(rejected, (probs.log() + noise).argmax(-1), correct)


MUTANTS = {
    "resampled from p": (Variant(sample=from_the_target_again), FEW),
    "arg-max drafts with soft q": (Variant(greedy_drafts=True), FEW),
    "bonus from the drafter": (Variant(bonus_probs=Q[K]), FEW),
    "second always accepted": (
        Variant(uniforms=lambda position, uniforms: uniforms * 0 if position == 1 else uniforms),
        FEW,
    ),
    "2 % more accepted": (Variant(uniforms=lambda position, uniforms: uniforms / 1.02), MANY),  # noqa: ARG005
}


def test_every_position_has_the_targets_distribution_in_two_million_draws() -> None:
    assert worst(emitted(Variant(), ALL)) < MAX_Z


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_verifier_is_detected(name: str) -> None:
    variant, num_chains = MUTANTS[name]
    assert worst(emitted(variant, num_chains)) > MAX_Z


@pytest.mark.parametrize("drawn", [False, True], ids=["certain", "drawn"])
def test_siblings_give_the_targets_distribution(drawn: bool) -> None:
    """Three siblings: the drafter's three best tokens with one-hot q, or three draws from one q."""
    generator = torch.Generator().manual_seed(2)
    draft_probs = torch.from_numpy(Q[0]).float()
    best = draft_probs.topk(3).indices.expand(FEW, 3)
    drafts = torch.multinomial(draft_probs, 3 * FEW, True, generator=generator).view(FEW, 3) if drawn else best
    uniforms = torch.rand(drafts.shape, generator=generator, dtype=torch.float64)
    noise = gumbel((FEW, V), generator)
    target = torch.from_numpy(P[0]).float().expand(FEW, V)
    tokens = accept_or_resample(target, drafts, draft_probs.expand(FEW, V) if drawn else None, uniforms, noise)
    assert worst_z(np.bincount(tokens.numpy(), minlength=V), P[0]) < MAX_Z
    assert (tokens[:, None] == drafts).any(1).float().mean() > 0.3


# ---- with the noise of real requests: drafts use a request's noise, uniforms and the last draw do not ---------------

MARKOV = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
GUESS = MARKOV + 1.5 * torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
NUM_SEEDS, FIRST = 4_000, 5


def chains(seeds: range, lasts: list[int], lengths: list[int]) -> Iterator[tuple[TreeLists, Tensor]]:
    """A chain of two drafts, drawn with each seed's own noise, and the distributions [3, 8] of its nodes."""
    for seed, last, length in zip(seeds, lasts, lengths, strict=True):
        tokens = [last]
        for position in (length, length + 1):
            tokens.append(int((GUESS[tokens[-1]] + noise_of([seed], [position], 8)[0]).argmax()))
        yield TreeLists(tokens, [NONE, 0, 1]), GUESS[tokens].softmax(-1)


def pairs(with_probs: bool) -> np.ndarray:
    """Counts [8, 8] of the first two tokens of texts whose next token depends on the last one."""
    counts, texts = np.zeros((8, 8)), [[FIRST] for _ in range(NUM_SEEDS)]
    states = [state_of(OPTIONS._replace(seed=s), [FIRST], 1) for s in range(NUM_SEEDS)]
    while active := [i for i in range(NUM_SEEDS) if len(texts[i]) < 3]:
        lengths = [len(texts[i]) for i in active]
        rows, probs = zip(*chains(active, [texts[i][-1] for i in active], lengths), strict=True)  # type: ignore[arg-type]
        logits = MARKOV[torch.tensor([token for row in rows for token in row.tokens])]
        draft_probs = torch.stack(probs) if with_probs else None
        active_states = [states[i] for i in active]
        verified = verify_rows(logits, rows, active_states, lengths, sample_by_rejection, draft_probs)
        for i, output in zip(active, verified, strict=True):
            texts[i] += output.token_ids
    for text in texts:
        counts[text[1], text[2]] += 1
    return counts


def true_pairs() -> np.ndarray:
    step = np.stack([processed_probs(row.numpy(), OPTIONS) for row in MARKOV])
    return step[FIRST][:, None] * step


@pytest.mark.parametrize("with_probs", [False, True], ids=["certain", "drawn"])
def test_two_tokens_of_a_request_have_the_targets_joint_distribution(with_probs: bool) -> None:
    assert worst_z(pairs(with_probs), true_pairs()) < MAX_Z


def test_a_last_draw_with_the_drafters_noise_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "salted", lambda seed: seed)
    assert worst_z(pairs(with_probs=False), true_pairs()) > MAX_Z


# ---- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EAGLE3-chain", "EAGLE3", "STANDALONE", "NGRAM"])
def test_greedy_output_equals_plain_decoding(name: str, toy: Path, tmp_path: Path) -> None:
    prompts, params = [[0, 9, 8, 7, 9, 8, 7], [0, 33, 2, 5]], SamplingParams(temperature=0.0, max_tokens=20)
    speculative = METHODS[name](toy, tmp_path).model_copy(update={"verification": "rejection"})
    plain, drafted = generate(toy, prompts, params), generate(toy, prompts, params, speculative=speculative)
    assert [choice.token_ids for choice in drafted] == [choice.token_ids for choice in plain]


def test_draft_probs_raise_the_acceptance_of_chains(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft with its distribution is accepted more often than one without."""
    speculative = METHODS["EAGLE3-chain"](toy, tmp_path).model_copy(update={"verification": "rejection"})
    params = [SamplingParams(seed=seed, max_tokens=40, ignore_eos=True) for seed in range(20)]

    def num_accepted() -> int:
        choices = generate(toy, [[0, 9, 8, 7]] * 20, params, speculative=speculative)
        return sum(choice.usage.num_accepted for choice in choices if choice.usage)

    drawn = num_accepted()
    true_probs_of = rejection._probs_of
    monkeypatch.setattr(rejection, "_probs_of", lambda token, drawn, size: true_probs_of(token, None, size))  # noqa: ARG005
    assert drawn > 1.5 * num_accepted() > 0
