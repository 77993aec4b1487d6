"""Sizes of n-gram drafting, from the configuration. Imports no torch, so that configurations are checked quickly."""

from dataclasses import dataclass, replace

from specray.config import SpeculativeConfig
from specray.errors import ConfigError

NGRAM_OPTIONS = frozenset(name for name in SpeculativeConfig.model_fields if name.startswith("ngram_")) | {"corpora"}
# Of n-grams that are merged with other trees: sizes of matches and of the store.
MERGED_OPTIONS = {
    "corpora",
    "ngram_branch_length",
    "ngram_capacity",
    "ngram_max_match_window_size",
    "ngram_max_trie_depth",
    "ngram_min_match_window_size",
}
_NUM_DRAFT_TOKENS = 12  # with ngram_max_trie_depth; SGLang's default, root included
_READ_BY = {
    "ngram_min_bfs_breadth": {"BFS"},
    "ngram_max_bfs_breadth": {"BFS", "PROB"},
    "ngram_min_token_prob": {"SUFFIX"},
}


@dataclass(frozen=True, slots=True)
class NgramRules:
    """Sizes of matches, trees and the trie, in tokens; the options of the same names describe them."""

    match_type: str
    max_draft_tokens: int
    min_window: int
    max_window: int
    min_breadth: int
    max_breadth: int
    depth: int  # depth of the trie: matched and drafted tokens
    capacity: int  # tokens of finished requests
    max_spec_factor: float | None
    min_token_prob: float

    @property
    def reach(self) -> int:
        """Maximum depth of a tree."""
        return min(self.max_draft_tokens, self.depth - self.min_window)

    def breadth(self, window: int, depth: int) -> int:
        """BFS: children of a node at `depth` below a match of `window` tokens; fewer the longer and deeper."""
        wider = (self.max_window - window - depth) * (self.max_breadth - self.min_breadth)
        return max(1, self.min_breadth + wider // (self.max_window - self.min_window + 1))

    def max_draft_tokens_of(self, match_length: int) -> int:
        """Maximum number of draft tokens for a match of this length."""
        if self.max_spec_factor is None:
            return self.max_draft_tokens
        return min(self.max_draft_tokens, int(match_length * self.max_spec_factor))


def check_ngram(config: SpeculativeConfig) -> None:
    """ConfigError for options that are invalid for every target."""
    ngram_rules(config)


def ngram_rules(config: SpeculativeConfig) -> NgramRules:
    """The sizes. ConfigError if the options contradict each other."""
    depth, max_window = config.ngram_branch_length, config.ngram_max_match_window_size
    num_draft_tokens = max(2, max_window)  # as SGLang documents it
    if config.ngram_max_trie_depth is not None:
        _refuse_older_names(config)
        depth, max_window = config.ngram_max_trie_depth, config.ngram_max_trie_depth - 1
        num_draft_tokens = min(depth, _NUM_DRAFT_TOKENS)
    _check_sizes(config)
    _check_is_read(config)
    return NgramRules(
        match_type=config.ngram_match_type,
        max_draft_tokens=(config.num_draft_tokens or num_draft_tokens) - 1,
        min_window=config.ngram_min_match_window_size,
        max_window=max_window,
        min_breadth=config.ngram_min_bfs_breadth,
        max_breadth=config.ngram_max_bfs_breadth,
        depth=depth,
        capacity=config.ngram_capacity // depth,
        max_spec_factor=config.ngram_max_spec_factor,
        min_token_prob=config.ngram_min_token_prob,
    )


def check_merged(config: SpeculativeConfig) -> None:
    """ConfigError if n-grams cannot be merged as configured, or corpora are named alike."""
    names = [corpus.name for corpus in config.corpora]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ConfigError(f"speculative.corpora: two of them are named {twice[0]!r}; give each its own name")
    if config.merged_draft_tokens is not None:
        ngram_rules(config)


def merged_rules(config: SpeculativeConfig) -> NgramRules:
    """The sizes of n-grams to be merged with a drafter's trees."""
    assert config.merged_draft_tokens is not None
    return replace(ngram_rules(config), max_draft_tokens=config.merged_draft_tokens - 1)


def _refuse_older_names(config: SpeculativeConfig) -> None:
    older = {"ngram_branch_length", "ngram_min_match_window_size", "ngram_max_match_window_size"}
    for name in sorted(older & config.changed()):
        raise ConfigError(
            f"speculative.{name}={getattr(config, name)} and ngram_max_trie_depth={config.ngram_max_trie_depth} "
            "exclude each other: a trie of depth d has branches of d tokens and matches of 1 to d - 1; remove one"
        )


def _check_sizes(config: SpeculativeConfig) -> None:
    least, most = config.ngram_min_match_window_size, config.ngram_max_match_window_size
    if least > most:
        raise ConfigError(
            f"speculative.ngram_min_match_window_size={least} is more than ngram_max_match_window_size={most}; "
            "no match has such a length; lower the first or raise the second"
        )
    if config.ngram_min_bfs_breadth > config.ngram_max_bfs_breadth:
        raise ConfigError(
            f"speculative.ngram_min_bfs_breadth={config.ngram_min_bfs_breadth} is more than ngram_max_bfs_breadth="
            f"{config.ngram_max_bfs_breadth}; lower the first or raise the second"
        )
    if config.ngram_max_trie_depth is None and most >= config.ngram_branch_length:
        raise ConfigError(
            f"speculative.ngram_max_match_window_size={most} leaves no draft tokens in branches of "
            f"ngram_branch_length={config.ngram_branch_length} tokens; set a branch length of at least {most + 1}"
        )


def _check_is_read(config: SpeculativeConfig) -> None:
    for name, match_types in _READ_BY.items():
        if name in config.changed() and config.ngram_match_type not in match_types:
            raise ConfigError(
                f"speculative.{name}={getattr(config, name)} has no effect with ngram_match_type="
                f"{config.ngram_match_type}; remove it, or choose {' or '.join(sorted(match_types))}"
            )
