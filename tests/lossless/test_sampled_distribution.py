"""The engine's first three tokens have the model's joint distribution with any drafter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specray.sampling_params import SamplingParams
from tests.support.distributions import MAX_Z, OPTIONS, processed_probs, worst_z
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import make_llm
from tests.support.toy import oracle_logits

PROMPT = [0, 12, 33, 8]
NUM_TEXTS = 2_000
FILTERS: list[dict[str, Any]] = [
    {"top_k": 4},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.3},
]


def true_probs(folder: Path, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probabilities of all triples of tokens."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in probs.items():
            tokens = [*PROMPT, *text]
            step = processed_probs(oracle_logits(folder, tokens)[-1], OPTIONS._replace(**options), tokens, len(PROMPT))
            longer |= {(*text, int(token)): probability * step[token] for token in np.flatnonzero(step)}
        probs = longer
    return probs


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("name", ["random", "right-last", "duplicates"])
def test_first_three_tokens_have_the_joint_distribution(name: str, options: dict[str, Any], toy: Path) -> None:
    probs = true_probs(toy, options)
    likely = max(probs, key=lambda text: probs[text])
    drafter = ScriptedDrafter(DRAWS[name], [[*PROMPT, *likely[:cut], *[7] * 9] for cut in (3, 2, 1)])
    params = [SamplingParams(seed=seed, max_tokens=3, ignore_eos=True, **options) for seed in range(NUM_TEXTS)]
    with make_llm(toy, drafter, max_running_requests=100) as llm:
        seen = [tuple(g.choices[0].token_ids) for g in llm.generate([PROMPT] * NUM_TEXTS, params)]
    assert drafter.num_proposed > NUM_TEXTS
    cells = {text: index for index, text in enumerate(probs)}
    assert set(seen) <= set(cells)
    counts = np.bincount([cells[text] for text in seen], minlength=len(cells))
    assert worst_z(counts, np.array(list(probs.values()))) < MAX_Z
