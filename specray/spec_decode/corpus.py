"""Corpora as sources of n-grams: `specray corpus build` writes a file, drafters look up a request's last tokens.

The file has the token ids and a suffix array of the reversed text: all positions, sorted by the tokens before them, the
nearest token first. A binary search for a request's last tokens ends next to the positions with the longest matches.
Both arrays are mapped into memory, once for all processes of a machine.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specray.config import CorpusOptions, SpeculativeConfig
from specray.errors import ConfigError
from specray.models.tokenizer import load_tokenizer
from specray.spec_decode.ngram_index import MOST_PLACES, Match

GAP = -1  # between texts, and at both ends
SORTED_BY = 16  # tokens; places with longer common matches are neighbours in any order
FORMAT = "specray-corpus-1"


class Corpus:
    """An open file. Raises ConfigError naming `options` if it is no corpus of this tokenizer, or too large."""

    def __init__(self, options: CorpusOptions, tokenizer: str, number: int = 0) -> None:
        """`tokenizer` is its `tokenizer_digest`; `number` tells places of several corpora apart."""
        where = f"speculative.corpora, {options.name}: {options.path}"
        path = Path(options.path).expanduser()
        if not path.is_file():
            raise ConfigError(f"{where} is no file; make one with `specray corpus build FILES --out {options.path}`")
        if (size := path.stat().st_size) > options.max_mb * 2**20:
            raise ConfigError(f"{where} has {size / 2**20:.0f} MB, more than max_mb={options.max_mb}; raise that")
        self._tokens, self._order, made_for = _read(path, where)
        if made_for != tokenizer:
            raise ConfigError(f"{where} was made with the tokenizer of another model; build it again with --model")
        self._tenants, self._number = options.tenants, number

    def serves(self, tenant: str) -> bool:
        """Whether a tenant's requests may be drafted from it."""
        return not self._tenants or tenant in self._tenants

    def _before(self, end: int) -> list[int]:
        """The tokens by which a position is sorted."""
        sorted_by: list[int] = self._tokens[max(0, end - SORTED_BY) : end][::-1].tolist()
        return sorted_by

    def find(self, last: Sequence[int], window: int, reach: int) -> dict[int, Match]:
        """The MOST_PLACES places with the longest matches of a request's last tokens; see `SuffixIndex.find`."""
        suffix = list(last[: -window - 1 : -1])
        low = bisect_left(self._order, suffix[:SORTED_BY], key=self._before)
        places = np.array(self._order[max(0, low - MOST_PLACES) : low + MOST_PLACES], dtype=np.int64)
        before = self._tokens.take(places[:, None] - 1 - np.arange(len(suffix)), mode="clip")
        lengths = np.logical_and.accumulate(before == suffix, axis=1).sum(1)
        best = np.argsort(-lengths, kind="stable")[:MOST_PLACES]
        best = best[lengths[best] > 0]
        follows = self._tokens.take(places[best][:, None] + np.arange(reach), mode="clip").tolist()
        found = zip(places[best].tolist(), lengths[best].tolist(), follows, strict=True)
        first = self._number << 40
        return {first + place: Match(length, row[: [*row, GAP].index(GAP)]) for place, length, row in found}


def open_corpora(config: SpeculativeConfig, folder: Path) -> list[Corpus]:
    """A drafter's corpora; `folder` has the target's tokenizer. ConfigError for one that cannot be used."""
    if not config.corpora:
        return []
    tokenizer = tokenizer_digest(load_tokenizer(folder))
    return [Corpus(options, tokenizer, number) for number, options in enumerate(config.corpora)]


def write_corpus(path: Path, texts: Iterable[Sequence[int]], tokenizer: str) -> int:
    """Write the file of these texts, as token ids; returns their number of tokens. ConfigError if it cannot."""
    parts = [np.array([GAP], dtype=np.int32)]
    for text in texts:
        parts += [np.array(text, dtype=np.int32), parts[0]]
    tokens = np.concatenate(parts)
    order = sorted_places(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({"tokens": tokens, "order": order}, path, {"format": FORMAT, "tokenizer": tokenizer})
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    return int((tokens != GAP).sum())


def sorted_places(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The positions of `tokens` with a token before and behind them, int32, sorted by the tokens before them.

    `tokens` is int32 [T] and begins and ends with GAP.
    """
    padded = np.concatenate((np.full(SORTED_BY - 1, GAP, dtype=np.int32), tokens))
    before = [padded[SORTED_BY - 1 - back : SORTED_BY - 1 - back + len(tokens)] for back in range(SORTED_BY)]
    ends = np.lexsort(before[::-1]).astype(np.int32) + 1
    ends = ends[ends < len(tokens)]
    places: NDArray[np.int32] = ends[(tokens[ends - 1] != GAP) & (tokens[ends] != GAP)]
    return places


def tokenizer_digest(tokenizer: Any) -> str:
    """What distinguishes a tokenizer's ids from those of others."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _read(path: Path, where: str) -> tuple[NDArray[np.int32], NDArray[np.int32], str]:
    """(tokens, order, digest of the tokenizer)."""
    opener: Any = safe_open  # untyped in its package
    try:
        with opener(path, "pt") as file:  # maps tensors, which "np" would copy
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ConfigError(f"{where} is not a file that `specray corpus build` wrote")
            tokens, order = (file.get_tensor(name).numpy() for name in ("tokens", "order"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; make one with `specray corpus build FILES`") from None
    if len(tokens) < 3 or tokens[0] != GAP or tokens[-1] != GAP:
        raise ConfigError(f"{where} is damaged; build it again")
    return tokens, order, metadata["tokenizer"]
