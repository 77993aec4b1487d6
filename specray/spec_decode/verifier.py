"""The verifier: walk each draft tree from its root, and sample a token at every node on the way.

If the token is a child of the node, the walk continues there; otherwise it is the bonus token and the walk ends. With
coupled sampling the target samples its own token, so the output does not depend on the drafts. Most requests are
verified at once: the tokens of all nodes are chosen in one batch, and comparisons on the device give the path. Requests
whose logits depend on the path (penalties), that need logprobs, or whose sampler depends on the drafts are walked depth
by depth. So are sampled requests on a CPU, where noise for unvisited nodes costs more than the depths.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.argmax import argmax
from specray.ops.noise import noise_keys
from specray.ops.sampling import sample, token_logprob
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.outputs import TokenLogprob
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.spec_decode.node_sampler import NodeBatch, NodeSampler, coupled


class VerifyOutput(NamedTuple):
    """Outcome of B trees of at most D levels below the root, on the device."""

    num_tokens: Tensor  # int64 [B]: accepted drafts and the bonus token; 0: the logits are not finite
    tokens: Tensor  # int64 [B, D + 1]: accepted drafts, then the bonus token; undefined past `num_tokens`
    nodes: Tensor  # int64 [B, D + 1]: accepted nodes, the root first; undefined past `num_tokens`
    logprobs: dict[int, list[TokenLogprob]]  # of the requests with logprobs, by row


class VerifyInput(NamedTuple):
    """B trees and the target's logits at their nodes."""

    logits: Tensor  # float32 [sum of num_nodes, V], requests and nodes in order
    tree: DraftTree
    num_nodes: list[int]  # the host's copy of tree.num_nodes
    sampling: SamplingBatch  # a walk by depth counts emitted tokens in its states
    lengths: Tensor  # int64 [B], known tokens, the root included: the positions of the first tokens to sample

    def starts(self) -> np.ndarray:
        """int64 [B]: place of each root in `logits`."""
        counts = np.array(self.num_nodes, dtype=np.int64)
        return counts.cumsum() - counts

    def select(self, rows: list[int]) -> "VerifyInput":
        """These requests only."""
        device, starts = self.logits.device, self.starts()
        index = torch.tensor(rows, dtype=torch.int64).to(device)
        places = np.concatenate([np.arange(starts[row], starts[row] + self.num_nodes[row]) for row in rows])
        return VerifyInput(
            self.logits.index_select(0, torch.from_numpy(places).to(device)),
            self.tree.select(index),
            [self.num_nodes[row] for row in rows],
            self.sampling.select(rows),
            self.lengths.index_select(0, index),
        )


def verify(inputs: VerifyInput, sampler: NodeSampler = coupled, allowed: Tensor | None = None) -> VerifyOutput:
    """Verify all trees. `allowed` bool [sum of num_nodes, V] masks the tokens that a grammar permits at each node."""
    if allowed is not None:
        inputs = inputs._replace(logits=inputs.logits.masked_fill(~allowed, -torch.inf))
    is_cpu, states = inputs.logits.device.type == "cpu", inputs.sampling.states
    walked = [row for row, state in enumerate(states) if sampler is not coupled or _needs_walk(state, is_cpu)]
    if not walked:
        return _verify_at_once(inputs)
    if len(walked) == len(states):
        return _verify_by_depth(inputs, sampler)
    others = sorted(set(range(len(states))) - set(walked))
    at_once = _verify_at_once(inputs.select(others))
    by_depth = _verify_by_depth(inputs.select(walked), sampler)
    order = torch.tensor(others + walked).argsort().to(inputs.logits.device)
    num_tokens, tokens, nodes = (
        torch.cat(both).index_select(0, order) for both in zip(at_once[:3], by_depth[:3], strict=True)
    )
    return VerifyOutput(num_tokens, tokens, nodes, {walked[row]: probs for row, probs in by_depth.logprobs.items()})


def _needs_walk(state: SamplingState, is_cpu: bool) -> bool:
    return state.options.logprobs is not None or state.adjusts_logits or (is_cpu and state.is_sampled)


def _verify_at_once(inputs: VerifyInput) -> VerifyOutput:
    """Choose the target's token at every node, then accept the nodes whose whole path was chosen."""
    tree, device = inputs.tree, inputs.logits.device
    num_rows, width = tree.tokens.shape
    ancestors = tree.ancestors()
    depths = ancestors.sum(-1) - 1
    nodes = torch.arange(width, device=device)
    is_node = nodes < tree.num_nodes[:, None]
    starts = tree.num_nodes.cumsum(0) - tree.num_nodes
    places = torch.where(is_node, starts[:, None] + nodes, 0)
    flat = _choose_everywhere(inputs, depths, is_node)
    is_finite = inputs.logits.gather(1, flat[:, None])[:, 0].isfinite()
    chosen, is_finite = flat[places], is_finite[places] & is_node
    parents = tree.parents.clamp(min=0)
    is_chosen = (tree.tokens == chosen.gather(1, parents)) & is_node & ~repeats_sibling(tree)
    is_chosen[:, ROOT] = True
    is_accepted = (is_chosen[:, None, :] | ~ancestors).all(-1) & (depths <= tree.max_depth) & is_node
    has_finite_path = (is_finite | ~is_accepted).all(-1)
    # At most one node of each depth is accepted; the others go to a column that is cut off.
    columns = torch.where(is_accepted, depths, tree.max_depth + 1)
    path = torch.zeros(num_rows, tree.max_depth + 2, dtype=torch.int64, device=device)
    path = path.scatter_(1, columns, nodes.expand(num_rows, width))[:, :-1]
    return VerifyOutput(is_accepted.sum(-1) * has_finite_path, chosen.gather(1, path), path, {})


def _choose_everywhere(inputs: VerifyInput, depths: Tensor, is_node: Tensor) -> Tensor:
    """The target's token at every node, int64 [sum of num_nodes]; `depths` and `is_node` are [B, N]."""
    if not any(state.is_sampled for state in inputs.sampling.states):
        return argmax(inputs.logits)
    positions = inputs.lengths[:, None] + depths
    keys = noise_keys(inputs.sampling.seeds[:, None], positions)
    places = is_node.flatten().argsort(descending=True, stable=True)[: len(inputs.logits)]
    rows = np.repeat(np.arange(len(inputs.num_nodes)), inputs.num_nodes).tolist()
    return sample(inputs.logits, inputs.sampling.select(rows), keys.flatten(0, 1).index_select(0, places))


def _verify_by_depth(inputs: VerifyInput, sampler: NodeSampler) -> VerifyOutput:
    """Sample one node per request and depth. Each depth copies its results to the host."""
    tree, states, device = inputs.tree, inputs.sampling.states, inputs.logits.device
    positions = inputs.lengths[:, None] + torch.arange(tree.max_depth + 1, device=device)
    keys = noise_keys(inputs.sampling.seeds[:, None], positions)
    is_repeated, starts = repeats_sibling(tree), inputs.starts()
    paths: list[list[int]] = [[ROOT] for _ in states]
    tokens: list[list[int]] = [[] for _ in states]
    logprobs: dict[int, list[TokenLogprob]] = {
        row: [] for row, state in enumerate(states) if state.options.logprobs is not None
    }
    active = list(range(len(states)))
    for depth in range(tree.max_depth + 1):
        at = [paths[row][-1] for row in active]
        rows, node = torch.tensor([active, at]).to(device)
        here = inputs.logits.index_select(0, torch.from_numpy(starts[active] + at).to(device))
        is_child = (tree.parents.index_select(0, rows) == node[:, None]) & ~is_repeated.index_select(0, rows)
        children = is_child.to(torch.int8).argsort(descending=True, stable=True)  # in order, then all other nodes
        siblings = tree.tokens.index_select(0, rows).masked_fill(~is_child, NONE).gather(1, children)
        probs = None if tree.draft_probs is None else tree.draft_probs[rows, node]
        sampling, rows_keys, at_depth = inputs.sampling.select(active), keys[rows, depth], positions[rows, depth]
        chosen = sampler(NodeBatch(here, sampling, at_depth, rows_keys, siblings, probs, depth))
        is_finite = here.gather(1, chosen[:, None])[:, 0].isfinite()
        is_next = siblings == chosen[:, None]
        next_node = children.gather(1, is_next.to(torch.int8).argmax(-1, keepdim=True))[:, 0]
        next_node = torch.where(is_next.any(-1), next_node, NONE)
        still_active = []
        results = torch.stack((chosen, is_finite.long(), next_node), 1).tolist()
        for row, row_logits, (token, is_finite, child) in zip(active, here, results, strict=True):
            if not is_finite:
                tokens[row] = []
                continue
            states[row].append(token)
            tokens[row].append(token)
            if row in logprobs:
                logprobs[row].append(token_logprob(row_logits, token, states[row].options.logprobs or 0))
            if child != NONE:
                paths[row].append(child)
                still_active.append(row)
        active = still_active
        if not active:
            break
    width = tree.max_depth + 1
    padded = [[row + [0] * (width - len(row)) for row in part] for part in (tokens, paths)]
    token_ids, nodes = torch.tensor(padded, dtype=torch.int64).view(2, len(states), -1)[:, :, :width].to(device)
    num_tokens = torch.tensor([len(row) for row in tokens], dtype=torch.int64).to(device)
    return VerifyOutput(num_tokens, token_ids, nodes, logprobs)


def repeats_sibling(tree: DraftTree) -> Tensor:
    """bool [B, N]: nodes that repeat the token of an earlier sibling. The first of equal siblings counts."""
    num_rows, width = tree.tokens.shape
    if width <= 2:
        return torch.zeros(num_rows, width, dtype=torch.bool, device=tree.tokens.device)
    is_same = (tree.tokens[:, :, None] == tree.tokens[:, None, :]) & (
        tree.parents[:, :, None] == tree.parents[:, None, :]
    )
    return is_same.tril(-1).any(-1)
