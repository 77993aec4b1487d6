"""`python -m benchmarks.ngram_store`: time of an NGRAM step per request, with a million nodes in the store.

The store holds tokens drawn from a Zipf distribution. Eight requests grow by two tokens a step, half of them by copying
from the store. Printed are the median and 99th percentile of a step's time per request (read its tokens, look them up,
make the tree), and the time per token of reading a finished request.
"""

import time

import numpy as np

from specray.config import SpeculativeConfig
from specray.spec_decode.ngram import NgramDrafter
from tests.chaos.ledger import quantile
from tests.support.drafters import Tokens, make_context

NUM_NODES, VOCAB_SIZE, NUM_ROWS, NUM_STEPS = 1_000_000, 49_152, 8, 300
TEXT_TOKENS = 500  # of a finished request


def main() -> None:
    for match_type in ("BFS", "PROB", "SUFFIX"):
        options = {"algorithm": "NGRAM", "ngram_match_type": match_type, "ngram_capacity": NUM_NODES}
        drafter = NgramDrafter.of(SpeculativeConfig.model_validate(options))
        random = np.random.default_rng(0)
        read = fill(drafter, random)
        steps = draft(drafter, random)
        shown = ", ".join(f"p{share * 100:g} {1000 * (quantile(steps, share) or 0):.3f} ms" for share in (0.5, 0.99))
        print(
            f"{match_type}: a request's step {shown}; a finished request's tokens {1e6 * read:.1f} us a token",
            flush=True,
        )


def fill(drafter: NgramDrafter, random: np.random.Generator) -> float:
    """Seconds per token."""
    branch = SpeculativeConfig().ngram_branch_length
    count = NUM_NODES // branch // TEXT_TOKENS + 1
    start = time.perf_counter()
    for _ in range(count):
        drafter.draft(make_context([Tokens(0, tokens(random, TEXT_TOKENS))]))
        drafter.release([0])
    drafter.draft(make_context([]))
    return (time.perf_counter() - start) / (count * TEXT_TOKENS)


def draft(drafter: NgramDrafter, random: np.random.Generator) -> list[float]:
    """Seconds of each step per request."""
    known = tokens(np.random.default_rng(0), TEXT_TOKENS)
    texts = [known[: 20 + slot] if slot % 2 else tokens(random, 20) for slot in range(NUM_ROWS)]
    context = make_context([Tokens(slot, text) for slot, text in enumerate(texts)])
    drafter.draft(context)
    seconds = []
    for _ in range(NUM_STEPS):
        for slot, state in context.table.states.items():
            at = len(state.token_ids)
            state.token_ids += known[at % 400 : at % 400 + 2] if slot % 2 else tokens(random, 2)
        start = time.perf_counter()
        drafter.draft(context)
        seconds.append((time.perf_counter() - start) / NUM_ROWS)
    return seconds


def tokens(random: np.random.Generator, count: int) -> list[int]:
    return [int(word) for word in np.minimum(random.zipf(1.3, count), VOCAB_SIZE - 1)]


if __name__ == "__main__":
    main()
