"""Trees that grow level by level: on a drafter's own outputs, for EAGLE heads, MTP layers and draft models
(`TreeGrower`), or on what one pass predicted (`grow_tree`).

For sampled requests the noise that the target will sample with is added to every node's logits, which raises
acceptance and cannot change the output. The KV of nodes lies in scratch slots behind the KV slots of the target's pool
and is discarded (`DraftKV`). `eagle_tree` selects the nodes.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.layers.linear import VocabHead
from specray.ops.attention import Attend
from specray.ops.cpu.trees import TreeNetwork
from specray.spec_decode.draft_rows import AttendLevel, DraftKV, DraftRows
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.draft_vocabulary import DraftVocabulary
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.fused_growth import FusedDrafts
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import check_width


class TreeModel(Protocol):
    """The model that predicts tokens. A state is what a node receives from its parent, beside KV."""

    vocab_size: int  # columns of the logits, of which a tensor-parallel rank may have a part
    draft_token_ids: Tensor | None  # int64 [vocab_size]: target id of each column; None: the same id
    network: TreeNetwork | None  # the same model as a function that grows trees, where the kernels have one

    @property
    def vocab_head(self) -> VocabHead | None:
        """What makes the logits; None: something else does, and on one rank."""

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H]; token_ids (of the target) and positions are int64 [T], states [T, H]."""

    def recur(self, output: Tensor) -> Tensor:
        """The states to go with the tokens that are drafted from `output`."""

    def logits(self, output: Tensor) -> Tensor:
        """[n, columns] of any type of floats, those of this rank."""


class TreeGrower:
    """Grows trees below the last known tokens: in one call of the CPU kernels where it can, else level by level."""

    def __init__(self, model: TreeModel, kv: DraftKV, device: torch.device, stays_in_place: bool = False) -> None:
        """`stays_in_place`: the model computes all levels at the position of the first."""
        check_width(kv.shape, model.vocab_size)
        self._model = model
        self._kv = kv
        self._shape, self._last_position = kv.shape, kv.last_position
        self._device = device
        assert kv.nodes is not None
        self.fused = FusedDrafts(model.network, kv, kv.nodes)
        sizes = model.vocab_size, model.draft_token_ids, model.vocab_head
        self._vocabulary = DraftVocabulary(*sizes, device)
        self._steps = torch.arange(kv.shape.num_steps, device=device) * (not stays_in_place)
        self._all_ancestors = torch.ones(1, 1, kv.shape.num_steps, dtype=torch.bool, device=device)  # in a chain

    def grow(self, rows: DraftRows, output: Tensor, positions: Tensor) -> DraftTree:
        """Trees of the requests; `output` [B, H] predicts the roots' children.

        `positions` int64 [B] are those of the children, as the model counts.
        """
        if (tree := self.fused.grow(rows, output, positions)) is not None:
            return tree
        shape = rows.limited(self._shape)
        attend_at, noise = rows.levels(self._kv, shape), rows.noise(shape.num_steps)
        return self._grow(rows.roots, positions, output, shape, noise, attend_at)

    def _grow(
        self,
        roots: Tensor,
        positions: Tensor,
        output: Tensor,
        shape: TreeShape,
        noise: TreeNoise | None,
        attend_at: AttendLevel,
    ) -> DraftTree:
        """Trees of `shape` below `roots` int64 [B], whose children have `positions`."""
        if shape.topk == 1 and not shape.returns_draft_probs:
            return self._grow_chain(roots, positions, output, shape, noise, attend_at)
        num_rows, rows = len(roots), torch.arange(len(roots), device=self._device)[:, None]
        eye = torch.eye(shape.topk, dtype=torch.bool, device=self._device).expand(num_rows, shape.topk, shape.topk)
        sees = eye[:, :, :0]  # which of the earlier nodes are ancestors

        def predict(level: int, tokens: Tensor, parents: Tensor) -> LevelPrediction:
            nonlocal output, sees
            if level:
                states = self._model.recur(output).index_select(0, (parents + len(output) // num_rows * rows).flatten())
                sees = torch.cat((sees.gather(1, parents[:, :, None].expand(-1, -1, sees.shape[2])), eye), 2)
                # A node past the last position has no rotary angle, but is never verified.
                at_level = (positions + self._steps[level - 1]).clamp(max=self._last_position)
                at_nodes = at_level.repeat_interleave(shape.topk)
                output = self._model(tokens.flatten(), states, at_nodes, attend_at(level, sees))
            logits = self._model.logits(output)
            return LevelPrediction(logits.view(num_rows, len(logits) // num_rows, logits.shape[1]))

        return grow_tree(roots, shape, noise, self._vocabulary, predict)

    def _grow_chain(
        self,
        roots: Tensor,
        positions: Tensor,
        output: Tensor,
        shape: TreeShape,
        noise: TreeNoise | None,
        attend_at: AttendLevel,
    ) -> DraftTree:
        """Grow trees of one branch: the most likely token at each level, without scores."""
        sees = self._all_ancestors.expand(len(roots), 1, -1)
        at_levels = (positions + self._steps[:, None]).clamp_(max=self._last_position)
        chain, are_finite = [roots], []
        for level in range(shape.num_steps):
            if level:
                states = self._model.recur(output)
                output = self._model(chain[-1], states, at_levels[level - 1], attend_at(level, sees[:, :, :level]))
            token, is_finite = self._vocabulary.best(self._model.logits(output), noise, level)
            chain.append(token)
            are_finite.append(is_finite)
        tree = DraftTree.chains(torch.stack(chain, 1))
        return tree._replace(num_nodes=tree.num_nodes * torch.stack(are_finite, 1).all(-1))


class LevelPrediction(NamedTuple):
    """What follows the nodes of a level: each its own tokens, or all of a tree the same, which have one row."""

    logits: Tensor  # [B, nodes or 1, columns]
    confidence: Tensor | None = None  # [B, nodes or 1]: the chance that a token drafted there is accepted; None: 1


# (level, tokens int64 [B, nodes], the places of their parents in the level before, int64 [B, nodes]) -> what follows
# them. Level 0 has the roots, as their own parents.
Predict = Callable[[int, Tensor, Tensor], LevelPrediction]


def grow_tree(
    roots: Tensor, shape: TreeShape, noise: TreeNoise | None, vocabulary: DraftVocabulary, predict: Predict
) -> DraftTree:
    """EAGLE-2's trees below `roots` int64 [B]: of each level, the best nodes are expanded."""
    topk = shape.topk
    level_probs: list[Tensor] = []  # the distribution that each level's children are drawn from
    kept = level_probs if shape.returns_draft_probs else None
    parents = torch.zeros_like(roots[:, None])

    def children(level: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, confidence = predict(level, tokens, parents)
        probs, found = vocabulary.candidates(logits, noise, level, kept, topk)
        return probs if confidence is None else probs * confidence[:, :, None], found

    probs, tokens = children(0, roots[:, None])
    pool = CandidatePool.of_roots(probs[:, 0], tokens[:, 0])
    frontier = torch.arange(topk, device=roots.device).expand(len(roots), topk)
    parents = parents.expand(-1, topk)
    for level in range(1, shape.num_steps):
        probs, tokens = children(level, pool.tokens.gather(1, frontier))
        scores = pool.scores.gather(1, frontier)[:, :, None] * probs
        pool.expand(frontier, scores, tokens.expand(-1, topk, -1))
        if level + 1 < shape.num_steps:
            frontier = pool.best_of_last()
            parents = (frontier - (pool.scores.shape[1] - topk**2)) // topk
    tree = pool.tree(roots, shape.num_draft_tokens - 1)
    if not level_probs:
        return tree
    return tree._replace(draft_probs=F.pad(torch.stack(level_probs, 1), (0, 0, 0, 1)))
