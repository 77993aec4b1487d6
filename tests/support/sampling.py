"""Sampling and verification with options on the host; the worker takes them from its request table."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.noise import gumbel, noise_keys
from specray.ops.sampling import sample
from specray.ops.sampling_state import SamplingBatch, SamplingState, TokenMask
from specray.outputs import TokenLogprob
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.verifier import verify
from specray.spec_decode.verify_batch import VerifyInput
from specray.step import SamplingOptions

CPU = torch.device("cpu")


def noise_of(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, ids: Tensor | None = None) -> Tensor:
    """Gumbel noise, float32 [n, vocab_size]."""
    return gumbel(keys_of(seeds, positions), vocab_size, ids)


def keys_of(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    return noise_keys(torch.tensor(seeds, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64))


def state_of(options: SamplingOptions, known: Sequence[int] = (), num_prompt: int = 0, size: int = 8) -> SamplingState:
    """State of a request with these options after the tokens `known`, for a vocabulary of `size`."""
    return SamplingState.start(options, known, num_prompt, size, CPU)


def sample_rows(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
    """`sample` with the seeds of the states' options."""
    return sample(logits, SamplingBatch.of(states, CPU), keys_of([state.options.seed for state in states], positions))


class Verified(NamedTuple):
    """One request's output on the host."""

    token_ids: list[int]
    path: list[int]
    logprobs: list[TokenLogprob] | None

    @property
    def is_broken(self) -> bool:
        return not self.token_ids


def verify_rows(
    logits: Tensor,
    trees: Sequence[TreeLists],
    states: Sequence[SamplingState],
    lengths: Sequence[int],
    sampler: NodeSampler = coupled,
    draft_probs: Tensor | None = None,
    mask: TokenMask | None = None,
) -> list[Verified]:
    """`verify`, with outputs per request on the host."""
    made = DraftTree.from_lists(trees)
    tree = DraftTree(made.tokens, made.parents, made.num_nodes, made.max_depth, draft_probs)
    num_nodes = [len(row.tokens) for row in trees]
    inputs = VerifyInput(logits, tree, num_nodes, SamplingBatch.of(states, CPU), torch.tensor(lengths))
    output = verify(inputs, sampler, mask)
    rows = zip(output.num_tokens.tolist(), output.tokens.tolist(), output.nodes.tolist(), strict=True)
    return [
        Verified(tokens[:count], nodes[:count], output.logprobs.get(row))
        for row, (count, tokens, nodes) in enumerate(rows)
    ]


def mask_of(allowed: Tensor, rows: Sequence[int] | None = None) -> TokenMask:
    """The mask of bool [n, V], packed; `rows` are its places in the logits, all by default."""
    padded = F.pad(allowed, (0, -allowed.shape[1] % 32))
    packed = np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32)
    return TokenMask(torch.tensor(range(len(allowed)) if rows is None else rows), torch.from_numpy(packed))
