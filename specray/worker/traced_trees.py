"""The verified trees of the requests that ask for a trace."""

import torch

from specray.draft_trace import VerifiedTree
from specray.worker.input_batch import StepBatch
from specray.worker.step_output import StepOutput


def traced_trees(batch: StepBatch, output: StepOutput) -> dict[int, VerifiedTree]:
    """Trees by row. One more copy to the host, in steps with a request that asks for them."""
    rows = [row for row in batch.rows.sampling if batch.rows.states[row].traces_drafts and output.host[row, 0]]
    if not rows:
        return {}
    tree = batch.tree
    index = torch.tensor(rows, dtype=torch.int64).to(tree.tokens.device)
    tokens, parents = torch.stack((tree.tokens, tree.parents)).index_select(1, index).tolist()
    counts = [batch.num_nodes[row] for row in rows]
    return {
        row: VerifiedTree(token_ids[:count], nodes[:count])
        for row, token_ids, nodes, count in zip(rows, tokens, parents, counts, strict=True)
    }
