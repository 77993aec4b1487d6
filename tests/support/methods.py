"""Every drafting method as the tests run it, in one place: a new method is covered by its line in `METHODS`.

Names are those of DRAFTERS, with a word behind them where a method is run in more than one shape.
"""

import json
from collections.abc import Callable
from pathlib import Path

from specray.config import SpeculativeConfig
from tests.support.heads import write_random_head

# (target's folder, an empty folder to write heads to) -> the method's configuration
Make = Callable[[Path, Path], SpeculativeConfig]


def eagle(
    version: int, shape: tuple[int, int, int] | None = None, draft_vocab_size: int | None = None,
    token_map: range | None = None,
) -> Make:  # fmt: skip
    """EAGLE-`version` with a random head; `shape` is (num_steps, eagle_topk, num_draft_tokens), None automatic."""

    def make(target: Path, folder: Path) -> SpeculativeConfig:
        head = write_random_head(folder / "head", target, version, draft_vocab_size)
        steps, topk, nodes = shape or (None, None, None)
        path = folder / "map.json"
        if token_map:
            path.write_text(json.dumps(list(token_map)))
        return SpeculativeConfig(
            algorithm="EAGLE3" if version == 3 else "EAGLE", draft_model_path=str(head), num_steps=steps,
            eagle_topk=topk, num_draft_tokens=nodes, token_map=str(path) if token_map else None,
        )  # fmt: skip

    return make


def ngram(num_draft_tokens: int | None = None) -> Make:
    return lambda target, folder: SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=num_draft_tokens)  # noqa: ARG005


METHODS: dict[str, Make] = {
    "EAGLE3": eagle(3, draft_vocab_size=40),
    "EAGLE3-chain": eagle(3, shape=(4, 1, 5)),
    "EAGLE3-wide": eagle(3, shape=(2, 8, 30), draft_vocab_size=16),
    "EAGLE": eagle(2),
    "EAGLE-chain": eagle(2, shape=(3, 1, 4)),
    "EAGLE-deep": eagle(2, shape=(6, 2, 23)),
    "EAGLE-map": eagle(2, shape=(3, 3, 10), token_map=range(2, 60, 3)),
    "NGRAM": ngram(),
    "NGRAM-short": ngram(5),
}
# Where each further run costs more than it can show.
SOME_METHODS = ["EAGLE3", "EAGLE-map", "NGRAM"]
