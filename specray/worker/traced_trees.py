"""The verified trees of the requests that ask for a trace."""

from collections.abc import Sequence

import torch

from specray.draft_trace import VerifiedTree
from specray.step import RequestResult
from specray.worker.input_batch import StepBatch
from specray.worker.step_output import StepOutput


def with_traces(results: Sequence[RequestResult], batch: StepBatch, output: StepOutput) -> list[RequestResult]:
    """The results of all rows, with the trees that were asked for. They take one more copy to the host."""
    rows = [row for row in batch.rows.sampling if batch.rows.states[row].traces_drafts and output.num_kept(row)]
    tree, traced = batch.tree, list(results)
    index = torch.tensor(rows, dtype=torch.int64).to(tree.tokens.device)
    tokens, parents = torch.stack((tree.tokens, tree.parents)).index_select(1, index).tolist()
    for row, token_ids, nodes in zip(rows, tokens, parents, strict=True):
        count = batch.num_nodes[row]
        traced[row] = traced[row]._replace(tree=VerifiedTree(token_ids[:count], nodes[:count]))
    return traced
