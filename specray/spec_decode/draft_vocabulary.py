"""The choice of draft tokens from a draft model's logits, of which a tensor-parallel rank may have some columns.

Ranks exchange what they have found, a few numbers for each node, and all choose the same.
"""

import torch
from torch import Tensor

from specray.layers.linear import VocabHead
from specray.ops.device_ops import ops_on
from specray.ops.shard_sampling import none_of, top_in_shard, top_of_shards
from specray.spec_decode.shard_verifier import exchanged
from specray.spec_decode.tree_noise import TreeNoise


class DraftVocabulary:
    """The tokens that a draft model predicts: column c of its logits is the target's token `ids[c]`."""

    def __init__(self, size: int, ids: Tensor | None, head: VocabHead | None, device: torch.device) -> None:
        """`ids` int64 [size]; None: c itself. `head` makes the logits; None: one that has all columns."""
        self._size = size
        self._ids = self._column_ids = ids  # of all columns, and of this rank's
        self._ops = ops_on(device)
        self._split = head if head is not None and head.group.size > 1 else None
        if self._split is not None:
            first = min(self._split.first_id, size)
            columns = torch.arange(first, min(first + self._split.num_columns, size), device=device)
            self._column_ids = columns if ids is None else ids[columns]

    def best(self, logits: Tensor, noise: TreeNoise | None, level: int) -> tuple[Tensor, Tensor]:
        """(the most likely token of each row of `logits` [B, columns], whether its logit is finite)."""
        temperature, keys = (None, None) if noise is None else (noise.temperature, noise.keys[level])
        if logits.shape[1]:
            found = self._ops.choose_drafts(logits, temperature, keys, self._column_ids)
        else:  # the last ranks may have no column
            found = none_of(len(logits), logits.device)
        if self._split is not None:
            found = exchanged(found, self._split.group)
        return found.tokens, found.is_finite

    def candidates(
        self, logits: Tensor, noise: TreeNoise | None, level: int, level_probs: list[Tensor] | None, topk: int
    ) -> tuple[Tensor, Tensor]:
        """(probabilities, tokens) of the most likely tokens below a level's nodes, [B, nodes, topk], best first.

        `logits` is [B, nodes, columns]. The distribution that sampled children are drawn from is appended to
        `level_probs`, for which ranks gather the logits.
        """
        split, ids = self._split, self._column_ids
        if split is not None and level_probs is not None:
            shape = logits.shape[:2]
            logits = split.gathered(logits.flatten(0, 1))[:, : self._size].view(*shape, -1)
            split, ids = None, self._ids
        if noise is not None and logits.shape[-1]:
            if level_probs is not None:
                level_probs.append(noise.probs(logits[:, 0], ids))
            logits = noise.added(logits, level, ids)
        logits = logits.float()
        if split is None:
            probs, columns = self._ops.top_probs(logits, topk)
        else:
            tops = split.group.gather(top_in_shard(logits, topk, split.first_id))
            probs, columns = top_of_shards(tops.view(*tops.shape[:-1], split.group.size, -1), topk)
        columns = columns.to(torch.int64)
        return probs, columns if self._ids is None else self._ids[columns]
