"""Order, seeds and turns of a comparison, with variants that record their requests."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from specray.bench import measure
from specray.bench.measure import Settings, compare
from specray.bench.prompts import Prompt
from specray.bench.variants import BenchRequest, Run, TimedReply

PROMPTS = [Prompt(id=i, category="ab"[i % 2], turns=(f"question {i}", f"more {i}")) for i in range(6)]


class Tokenizer(PreTrainedTokenizerFast):
    """One token per character."""

    chat_template = "any"

    def __init__(self) -> None:
        pass

    def decode(self, token_ids: object, **_: object) -> str:
        assert isinstance(token_ids, list)
        return "".join(map(chr, token_ids))


class NotingVariant:
    def __init__(self, name: str, log: list[tuple[str, list[str], str]]) -> None:
        self.name = name
        self._log = log
        self.requests: list[BenchRequest] = []

    def run(self, requests: Sequence[BenchRequest], concurrency: int, cache_salt: str) -> Run:
        assert 1 <= len(requests) <= 4 * concurrency
        self._log.append((self.name, ["".join(map(chr, request.token_ids)) for request in requests], cache_salt))
        self.requests += requests
        return Run([TimedReply([ord("!")], 0.1, 0.2) for _ in requests], 0.2, [])


@pytest.fixture(autouse=True)
def readable_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(_: object, talk: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for letter in "/".join(message["content"] for message in talk)]

    monkeypatch.setattr(measure, "render_chat", render)


def test_every_variant_answers_every_prompt_and_the_order_rotates() -> None:
    log: list[tuple[str, list[str], str]] = []
    records = compare([NotingVariant("x", log), NotingVariant("y", log)], PROMPTS, Tokenizer(), Settings())
    assert len(records) == 2 * len(PROMPTS)
    measured = log[2:]  # after the warm-up of both
    assert [questions for _, questions, _ in measured[::2]] == [questions for _, questions, _ in measured[1::2]]
    firsts = [name for name, _, _ in measured[::2]]
    assert all(one != next_ for one, next_ in pairwise(firsts))


def test_runs_of_the_same_prompts_have_equal_keys() -> None:
    records = compare(
        [NotingVariant("x", []), NotingVariant("y", [])], PROMPTS, Tokenizer(), Settings(repeats=2, turns=2)
    )
    keys = {variant: {record.key for record in records if record.variant == variant} for variant in "xy"}
    assert keys["x"] == keys["y"]
    assert len(keys["x"]) == len(PROMPTS) * 2 * 2


def test_turn_two_follows_the_models_own_answer() -> None:
    log: list[tuple[str, list[str], str]] = []
    compare([NotingVariant("x", log)], PROMPTS[:1], Tokenizer(), Settings(turns=3))
    assert [questions for _, questions, _ in log[1:]] == [["question 0"], ["question 0/!/more 0"]]


def test_repeats_never_share_a_cache() -> None:
    log: list[tuple[str, list[str], str]] = []
    compare([NotingVariant("x", log)], PROMPTS[:1], Tokenizer(), Settings(repeats=3))
    salts = [salt for _, _, salt in log]
    compare([NotingVariant("x", log)], PROMPTS[:1], Tokenizer(), Settings(cache_salt="other-"))
    salts = [salt for _, _, salt in log]
    assert len(set(salts)) == len(salts) == 6


def test_variants_get_the_same_seeds() -> None:
    variants = [NotingVariant("x", []), NotingVariant("y", [])]
    compare(variants, PROMPTS, Tokenizer(), Settings(concurrency=2, temperature=0.7, seed=5))
    assert [request.params.seed for request in variants[0].requests] == [
        request.params.seed for request in variants[1].requests
    ]
    assert {request.params.seed for request in variants[0].requests} == set(range(5, 11))


def test_a_prompts_seed_does_not_depend_on_concurrency() -> None:
    def seeds(concurrency: int) -> dict[tuple[int, ...], int | None]:
        variant = NotingVariant("x", [])
        compare([variant], PROMPTS, Tokenizer(), Settings(concurrency=concurrency, turns=2))
        return {tuple(request.token_ids): request.params.seed for request in variant.requests}

    assert seeds(1) == seeds(3)


def test_lengths_spread_around_the_mean_and_are_those_of_the_prompt() -> None:
    variants = [NotingVariant("x", []), NotingVariant("y", [])]
    compare(variants, PROMPTS, Tokenizer(), Settings(max_tokens=100, length_spread=0.5, repeats=2))
    requests = [request for variant in variants for request in variant.requests[1:]]  # after the warm-up
    by_seed: dict[int | None, set[int]] = {}
    for request in requests:
        by_seed.setdefault(request.params.seed, set()).add(request.params.max_tokens)
    assert all(len(lengths) == 1 for lengths in by_seed.values()), "equal in every variant and repeat"
    lengths = [length for [length] in by_seed.values()]
    assert len(set(lengths)) == len(lengths) == len(PROMPTS)
    assert all(50 <= length <= 150 for length in lengths)
