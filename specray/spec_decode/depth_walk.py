"""Verification depth by depth, for samplers and options that need the path up to a node."""

import torch

from specray.ops.noise import noise_keys
from specray.ops.sampling import token_logprob
from specray.outputs import TokenLogprob
from specray.spec_decode.draft_tree import NONE, ROOT
from specray.spec_decode.node_sampler import NodeBatch, NodeSampler
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


def walk_by_depth(inputs: VerifyInput, sampler: NodeSampler) -> VerifyOutput:
    """Sample one node per request and depth. Each depth copies its results to the host."""
    tree, states, device = inputs.tree, inputs.sampling.states, inputs.logits.device
    positions = inputs.lengths[:, None] + torch.arange(tree.max_depth + 1, device=device)
    keys = noise_keys(inputs.sampling.seeds[:, None], positions)
    is_repeated, starts = tree.repeats_sibling(), inputs.starts()
    paths: list[list[int]] = [[ROOT] for _ in states]
    tokens: list[list[int]] = [[] for _ in states]
    logprobs: dict[int, list[TokenLogprob]] = {
        row: [] for row, state in enumerate(states) if state.options.logprobs is not None
    }
    active = list(range(len(states)))
    for depth in range(tree.max_depth + 1):
        at = [paths[row][-1] for row in active]
        rows, node = torch.tensor([active, at]).to(device)
        places = torch.from_numpy(starts[active] + at).to(device)
        here = inputs.logits.index_select(0, places).float()
        unmasked = here if inputs.unmasked is None else inputs.unmasked.index_select(0, places).float()
        is_child = (tree.parents.index_select(0, rows) == node[:, None]) & ~is_repeated.index_select(0, rows)
        children = is_child.to(torch.int8).argsort(descending=True, stable=True)  # in order, then all other nodes
        siblings = tree.tokens.index_select(0, rows).masked_fill(~is_child, NONE).gather(1, children)
        probs = None if tree.draft_probs is None else tree.draft_probs[rows, node]
        sampling, rows_keys, at_depth = inputs.sampling.select(active), keys[rows, depth], positions[rows, depth]
        chosen = sampler(NodeBatch(here, sampling, at_depth, rows_keys, siblings, probs, depth))
        logit = here.gather(1, chosen[:, None])[:, 0]
        is_next = siblings == chosen[:, None]
        next_node = children.gather(1, is_next.to(torch.int8).argmax(-1, keepdim=True))[:, 0]
        next_node = torch.where(is_next.any(-1), next_node, NONE)
        still_active = []
        results = torch.stack((chosen, logit.isfinite(), logit.isneginf(), next_node), 1).tolist()
        for row, row_logits, (token, is_finite, is_masked, child) in zip(active, unmasked, results, strict=True):
            if is_masked:  # no token is left: the path ends before it, and the next step, which begins there, says why
                continue
            if not is_finite:
                tokens[row] = []
                continue
            states[row].append(token)
            tokens[row].append(token)
            if row in logprobs:
                logprobs[row].append(token_logprob(row_logits, token, states[row].options))
            if child != NONE and depth < tree.max_depth:
                paths[row].append(child)
                still_active.append(row)
        active = still_active
        if not active:
            break
    width = tree.max_depth + 1
    padded = [[row + [0] * (width - len(row)) for row in part] for part in (tokens, paths)]
    token_ids, nodes = torch.tensor(padded, dtype=torch.int64).view(2, len(states), -1)[:, :, :width].to(device)
    num_tokens = torch.tensor([len(row) for row in tokens], dtype=torch.int64).to(device)
    return VerifyOutput.of(num_tokens, token_ids, nodes, logprobs)
