"""Questions with their expected answers, from plain decoding in this process in float32."""

import random
from pathlib import Path
from typing import Any, NamedTuple

from specray.llm import LLM
from specray.sampling_params import SamplingParams

NUM_QUESTIONS = 12


class Question(NamedTuple):
    """A body for /v1/completions and the expected text."""

    body: dict[str, Any]
    text: str


def make_questions(folder: Path, max_tokens: int, seed: int = 0) -> list[Question]:
    """Greedy and sampled questions alternate."""
    with LLM(model=str(folder), dtype="float32", num_threads=1, max_total_tokens=8192) as llm:
        draw, vocab_size = random.Random(seed), len(llm.tokenizer)
        prompts = [[draw.randrange(3, vocab_size) for _ in range(4 + index)] for index in range(NUM_QUESTIONS)]
        temperatures = [0.9 * (index % 2) for index in range(NUM_QUESTIONS)]
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index, ignore_eos=True)
            for index, temperature in enumerate(temperatures)
        ]
        answers = llm.generate(prompts, params)
    return [
        Question(
            {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": index, "ignore_eos": True},
            answer.choices[0].text,
        )
        for index, (prompt, temperature, answer) in enumerate(zip(prompts, temperatures, answers, strict=True))
    ]
