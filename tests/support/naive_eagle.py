"""A naive reference of drafting: everything is computed from the tokens, without a cache or batch.

The tree is built in a loop over candidates. Every node is computed on its own path after the whole prefix, whose hidden
states come from a forward pass of the target without a cache. The models and the noise are the package's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specray.models.heads.eagle3 import ParallelHead
from specray.models.heads.served import EagleHead
from specray.models.llama import Llama
from specray.ops.layer_attention import LayerAttention
from specray.ops.noise import gumbel, noise_keys
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.draft_model import DraftModel
from specray.spec_decode.draft_tree import NONE, TreeLists
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_shape import TreeShape
from tests.support.block_toy import BlockToy

# path below the root -> the topk most probable (probability, token) after it, best first
Path = tuple[int, ...]
Distribution = Callable[[Path], list[tuple[float, int]]]


@dataclass
class Candidate:
    """One entry of the pool."""

    path: Path
    score: float
    parent: int  # index in the pool; -1 for the root


def naive_pool(probs: Distribution, num_steps: int, topk: int) -> list[Candidate]:
    """All candidates in the order they are made."""
    pool = [Candidate((token,), p, NONE) for p, token in probs(())]
    frontier = list(range(topk))
    for _ in range(num_steps - 1):
        first = len(pool)
        for index in frontier:
            parent = pool[index]
            pool += [Candidate((*parent.path, token), parent.score * p, index) for p, token in probs(parent.path)]
        frontier = _best(pool, range(first, len(pool)), topk)
    return pool


def naive_tree(pool: list[Candidate], num_drafts: int, root: int) -> TreeLists:
    chosen = _best(pool, range(len(pool)), num_drafts)
    tokens = [root] + [pool[index].path[-1] for index in chosen]
    return TreeLists(tokens, [NONE] + [0 if pool[i].parent < 0 else 1 + chosen.index(pool[i].parent) for i in chosen])


def _best(pool: list[Candidate], among: range, count: int) -> list[int]:
    """The highest scores; of equal ones, the first."""
    left, taken = list(among), []
    for _ in range(count):
        winner = left[0]
        for index in left:
            if pool[index].score > pool[winner].score:
                winner = index
        left.remove(winner)
        taken.append(winner)
    return taken


class NaiveTree:
    """One request's tree; `ids` are the target's of the columns of the logits, None: the same."""

    def __init__(self, context: ProposeContext, request: DraftRequest, shape: TreeShape, ids: Tensor | None) -> None:
        self._text, self._end = context.token_ids(request), request.end
        self._options = context.table.states[request.slot].sampling.options
        assert len(self._text) == self._end + 1
        self._shape, self._ids = shape, ids
        self._gaps: list[float] = []  # relative gaps between neighbours in every ordering
        self._pool = naive_pool(self._probs, shape.num_steps, shape.topk)
        self.tree = naive_tree(self._pool, shape.num_draft_tokens - 1, self._text[-1])

    def has_near_tie(self, tolerance: float) -> bool:
        """Whether rounding could order two candidates either way, so that another tree would be correct too."""
        topk, last = self._shape.topk, self._shape.num_draft_tokens - 1
        scores = [candidate.score for candidate in self._pool]
        for start in range(topk, len(scores), topk**2):
            self._record_gaps(sorted(scores[start : start + topk**2], reverse=True)[: topk + 1])
        self._record_gaps(sorted(scores, reverse=True)[last - 1 : last + 1])
        return min(self._gaps) < tolerance

    def _logits(self, path: Path) -> Tensor:
        """float32 [columns] after `path`."""
        raise NotImplementedError

    def _confidence(self, path: Path) -> float:  # noqa: ARG002
        """Factor of the probabilities after `path`."""
        return 1.0

    def _probs(self, path: Path) -> list[tuple[float, int]]:
        logits = self._logits(path)
        ids = torch.arange(len(logits)) if self._ids is None else self._ids
        if self._options.temperature >= GREEDY_BELOW:
            keys = noise_keys(torch.tensor([self._options.seed]), torch.tensor([self._end + 1 + len(path)]))
            noise = gumbel(keys, 1 + int(ids.max()))[0]
            logits = logits / self._options.temperature + noise[ids]
        probs = sorted(((p, int(ids[i])) for i, p in enumerate(logits.softmax(-1).tolist())), reverse=True)
        self._record_gaps([p for p, _ in probs[: self._shape.topk + 1]])
        sure = self._confidence(path)
        return [(p * sure, token) for p, token in probs[: self._shape.topk]]

    def _record_gaps(self, falling: list[float]) -> None:
        self._gaps += [(a - b) / max(a, 1e-30) for a, b in pairwise(falling)] + [1.0]


class NaiveDraft(NaiveTree):
    """Tree of an EAGLE head; `kv` [prefix, 2, kv_heads, dim] is the expected KV cache of the prefix."""

    def __init__(
        self,
        context: ProposeContext,
        request: DraftRequest,
        target: Llama,
        head: EagleHead,
        shape: TreeShape,
        last_position: int,
    ) -> None:
        self._text, self._end = context.token_ids(request), request.end
        self._head, self._last_position = head, last_position
        self._last_kv: Tensor | None = None
        self._outputs: dict[Path, Tensor] = {}
        positions = torch.arange(self._end)
        tokens = torch.tensor(self._text)
        _, aux_hidden_states = target(tokens[:-1], positions, attend_to_the_past, head.aux_hidden_state_layers)
        self._states = head.fuse(torch.cat(aux_hidden_states, -1))
        self._output(())
        assert self._last_kv is not None
        self.kv = self._last_kv
        super().__init__(context, request, shape, head.draft_token_ids)

    def _logits(self, path: Path) -> Tensor:
        return self._head.logits(self._output(path)[None])[0]

    def _output(self, path: Path) -> Tensor:
        """The head's output [hidden] at the end of prefix and path, computed from scratch."""
        if path not in self._outputs:
            end = self._end
            tokens = torch.tensor([*self._text[1:], *self._tokens_of(path)])
            positions = torch.tensor([*range(end), *(min(end + i, self._last_position) for i in range(len(path)))])
            states = torch.cat((self._states, *(self._state(path[:length]) for length in range(len(path)))))
            self._outputs[path] = self._head(tokens, states, positions, self._record_kv_and_attend)[-1]
        return self._outputs[path]

    def _tokens_of(self, path: Path) -> Sequence[int]:
        return path

    def _state(self, path: Path) -> Tensor:
        """The state [1, hidden] of the token after `path`."""
        return self._head.recur(self._output(path)[None])

    def _record_kv_and_attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        self._last_kv = kv.clone()
        layers = self._head.layer_attention
        return attend_to_the_past(layer, q, kv, layers[layer] if layers else LayerAttention())


class NaiveParallel(NaiveDraft):
    """Tree of a P-EAGLE head: masks stand for the tokens of a path and for their states."""

    def _tokens_of(self, path: Path) -> Sequence[int]:
        assert isinstance(self._head, ParallelHead)
        return [self._head.mask_token_id] * len(path)

    def _state(self, path: Path) -> Tensor:  # noqa: ARG002
        assert isinstance(self._head, ParallelHead)
        return self._head.mask_state


class NaiveBlock(NaiveTree):
    """Tree of a DFlash or DSpark head; `context` are the target's hidden states [prefix, columns]."""

    def __init__(
        self, context: ProposeContext, request: DraftRequest, toy: BlockToy, states: Tensor, shape: TreeShape
    ) -> None:
        self._toy, self._root = toy, context.token_ids(request)[-1]
        num_rows = shape.num_steps + (not toy.layout.samples_from_anchor)
        self._outputs = toy.outputs(states, self._root, num_rows)
        super().__init__(context, request, shape, toy.draft_ids)

    def _logits(self, path: Path) -> Tensor:
        return self._toy.predictions(self._outputs, [self._root, *path])[0].float()

    def _confidence(self, path: Path) -> float:
        return self._toy.predictions(self._outputs, [self._root, *path])[1]


class NaiveStandalone(NaiveTree):
    """Tree of a draft model; `kv` [layers, prefix, 2, kv_heads, dim] as above."""

    def __init__(self, context: ProposeContext, request: DraftRequest, model: DraftModel, shape: TreeShape) -> None:
        self._tokens, self._model = context.token_ids(request), model
        self._kv: list[Tensor] = []
        super().__init__(context, request, shape, model.draft_token_ids)
        self._logits(())
        self.kv = torch.stack(self._kv)[:, :-1]  # without the root's

    def _logits(self, path: Path) -> Tensor:
        self._kv = []
        tokens = torch.tensor([*self._tokens, *path])
        return self._model.logits(self._model.read(tokens, torch.arange(len(tokens)), self._record_kv_and_attend)[-1:])[
            0
        ]

    def _record_kv_and_attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        self._kv.append(kv.clone())
        return attend_to_the_past(layer, q, kv)


def attend_to_the_past(layer: int, q: Tensor, kv: Tensor, how: LayerAttention = LayerAttention()) -> Tensor:  # noqa: ARG001, B008
    """Causal attention without a cache, by softmax over all earlier positions in the window."""
    k, v = (part.repeat_interleave(q.shape[1] // kv.shape[2], 1).transpose(0, 1) for part in kv.unbind(1))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * (how.scale or q.shape[-1] ** -0.5)
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(-len(q) if how.window is None else 1 - how.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if how.sinks is not None:
        scores = torch.cat((scores, how.sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return (scores.softmax(-1)[..., : len(q)] @ v).transpose(0, 1).flatten(1)
