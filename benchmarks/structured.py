"""Structured output: validity, equality with plain decoding, and speed with speculation."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jsonschema

from benchmarks import eagle
from benchmarks.figure import Effort, Figure, Section
from benchmarks.schemas import Schema, schemas
from specray.bench.command import engine_config
from specray.grammar import make_grammar
from specray.llm import LLM
from specray.models.tokenizer import render_chat
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams

NUM_SEEDS = 5
MAX_TOKENS = 256
BATCH_SIZE = 8


class Outputs(NamedTuple):
    """Of one engine for all requests."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(completion.token_ids) for completion in self.completions) / self.seconds


def structured(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    plain = LLM(engine_config(None, BATCH_SIZE, dtype="bfloat16"))
    drafting = plain.with_speculative(eagle.served(eagle.EAGLE3))
    if "structured-speed" in wanted:
        yield _speed(plain, drafting, schemas()[: 2 * effort.num_chat])
    if "structured-valid" in wanted:
        yield from _validity(plain, drafting, schemas()[: 200 if effort.num_exact > 2 else 4])


def _speed(plain: LLM, drafting: LLM, chosen: Sequence[Schema]) -> Figure:
    """One request at a time, alternately, greedy. Grammars are compiled before."""
    seconds, num_tokens = [0.0, 0.0], [0, 0]
    for schema in chosen:
        params = _params(schema, seed=0, temperature=0.0)
        for engine in (plain, drafting):
            engine.generate([_prompt(plain, schema)], params)
        for index, engine in enumerate((plain, drafting)):
            outputs = _outputs(engine, [_prompt(plain, schema)], [params])
            seconds[index] += outputs.seconds
            num_tokens[index] += len(outputs.completions[0].token_ids)
    rates = [count / spent for count, spent in zip(num_tokens, seconds, strict=True)]
    what = f"structured output, EAGLE-3 / plain, {len(chosen)} schemas ({rates[1]:.0f} and {rates[0]:.0f} tokens/s)"
    return Figure(what, rates[1] / rates[0], 1.3)


def _validity(plain: LLM, drafting: LLM, chosen: Sequence[Schema]) -> Iterator[Figure]:
    """Several seeds of each schema, in batches."""
    cases = [(schema, seed) for schema in chosen for seed in range(NUM_SEEDS)]
    prompts = [_prompt(plain, schema) for schema, _ in cases]
    params = [_params(schema, seed, temperature=1.0 if seed else 0.0) for schema, seed in cases]
    expected, found = (_outputs(engine, prompts, params).completions for engine in (plain, drafting))
    ended = [
        (schema, completion)
        for (schema, _), completion in zip(cases, found, strict=True)
        if completion.finish_reason is FinishReason.STOP
    ]
    title = f"structured output, {len(chosen)} schemas x {NUM_SEEDS} seeds, EAGLE-3"
    are_valid = [_is_valid(completion.text, schema) for schema, completion in ended]
    are_equal = [a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True)]
    yield Figure(f"{title}: ended within {MAX_TOKENS} tokens", len(ended) / len(cases), None, "{:.1%}")
    yield Figure(f"{title}: valid, of those that ended", sum(are_valid) / len(ended), 1.0, "{:.1%}")
    yield Figure(f"{title}: equal to plain decoding", sum(are_equal) / len(cases), 1.0, "{:.1%}")


def _prompt(llm: LLM, schema: Schema) -> list[int]:
    content = f"Answer with one JSON value that matches this JSON schema, and nothing else: {json.dumps(schema)}"
    return render_chat(llm.tokenizer, [{"role": "user", "content": content}])


def _params(schema: Schema, seed: int, temperature: float) -> SamplingParams:
    grammar = make_grammar("json_schema", schema)
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, grammar=grammar)


def _outputs(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Outputs:
    start = time.perf_counter()
    completions = [generation.choices[0] for generation in llm.generate(prompts, params)]
    return Outputs(completions, time.perf_counter() - start)


def _is_valid(text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


SECTIONS = (Section(("structured-speed", "structured-valid"), structured),)
