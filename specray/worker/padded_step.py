"""A decode step whose shapes are fixed, as CUDA graphs need it: forward, verification and the commit of accepted paths.

The step reads and writes tensors that stay where they are. It has a bucket, a number of rows and of nodes of all trees,
which lie one after the other. Smaller steps are padded: a padding row is an empty request without a node, and behind
all nodes lie padding nodes, which write their KV to a KV slot that nobody reads. Neither is ever accepted.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specray.ops.attention import recordable
from specray.ops.host_copy import HostCopy
from specray.ops.step_tensors import nodes_of, num_kept, tokens_of
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeBuffers
from specray.spec_decode.drafter import DeviceDrafter
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.shard_verifier import verify_padded_shards
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.torch_step_ops import TorchTable
from specray.spec_decode.verify_batch import PaddedVerifyInput
from specray.worker.buckets import Bucket
from specray.worker.input_batch import StepBatch
from specray.worker.model_runner import ModelRunner
from specray.worker.padded_rows import PaddedRows
from specray.worker.state_pool import PaddedStates
from specray.worker.step_output import StepOutput


class CopiedOutcome:
    """A graph's outcome, int64 [R, 2 + 2 * (D + 1)], on its way to the host."""

    def __init__(self, outcome: Tensor) -> None:
        self._device = outcome
        self._host = HostCopy(outcome.clone() if outcome.device.type == "cpu" else outcome)

    @property
    def first_tokens(self) -> Tensor:
        """The first tokens that rows emitted, int64 [R, 1], on the device, until the next step's verification."""
        return tokens_of(self._device)[:, :1]

    @property
    def is_there(self) -> bool:
        """Whether the copy is complete."""
        return self._host.is_there

    def output(self) -> StepOutput:
        """Waits for the copy."""
        return StepOutput(self._device, self._host.wait().tolist(), {})


class PaddedStep:
    """Steps of these buckets; `layers` are those whose hidden states are kept (see TargetModel)."""

    def __init__(
        self,
        runner: ModelRunner,
        table: RequestTable,
        buckets: Sequence[Bucket],
        layers: tuple[int, ...],
        sampler: NodeSampler,
    ) -> None:
        attention = recordable(runner.attention)
        assert attention is not None, "see `reason_without_graphs`"
        self._model, self._kv, self._table, self._layers = runner.model, runner.kv, table, layers
        assert isinstance(table.ops, TorchTable), "the CPU kernels have no graphs"
        self._attention, self._sampler, self._ops = attention, sampler, table.ops
        device, dtype = table.device, runner.model.embedding.weight.dtype
        rows, max_tokens, nodes = (max(sizes) for sizes in zip(*buckets, strict=True))
        self._slots = torch.full((rows,), table.padding_slot, dtype=torch.int64, device=device)
        self._num_nodes = torch.zeros(rows, dtype=torch.int64, device=device)
        self._trees = torch.full((2, rows, nodes), NONE, dtype=torch.int64, device=device)  # tokens, parents
        head = runner.model.head
        logits_dtype = torch.float32 if head.returns_float32 else dtype
        self._logits = torch.zeros(max_tokens, head.num_columns, dtype=logits_dtype, device=device)
        width = len(layers) * runner.model.shape.hidden_size
        self._aux = torch.zeros(max_tokens + 1, width, dtype=dtype, device=device)  # padding begins behind all nodes
        # What `forward` keeps of each tree: known tokens, the place of the root, and the KV slots of the nodes.
        self._kept = torch.zeros(rows, 2 + nodes, dtype=torch.int64, device=device)
        self._outcome = torch.zeros(rows, 2 + 2 * nodes, dtype=torch.int64, device=device)
        self._drafts = TreeBuffers(rows, nodes, device)
        self._states = None
        if runner.states is not None:
            self._states = PaddedStates(runner.states, rows, nodes, max_tokens, dtype)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has only a part of the vocabulary."""
        return self._model.head.group.size > 1

    def clear(self) -> None:
        """Make everything padding."""
        self._slots.fill_(self._table.padding_slot)
        self._num_nodes.fill_(0)
        self._trees.fill_(NONE)

    def load(self, batch: StepBatch) -> None:
        """Make the next step that of `batch`; everything behind its rows and nodes is padding."""
        self._ops.load_step((self._slots, self._num_nodes, *self._trees.unbind()), batch.rows.slots, batch.tree)
        if self._states is not None:
            self._states.load(batch)

    def forward(self, bucket: Bucket) -> None:
        """The target over all nodes."""
        slots, tree, kept = self._slots[: bucket.rows], self._tree(bucket.rows), self._kept[: bucket.rows]
        tokens = self._ops.tree_input(slots, tree, self._kv.padding_slot, kept, bucket.tokens)
        attention = tokens.attention
        if bucket.nodes == 1:
            attention = replace(attention, row_width=1, row_lens=None)
        attend = self._attention.plan_padded(attention)
        if self._states is not None:
            of_nodes = self._tree(bucket.rows, bucket.nodes), bucket.tokens
            attend = self._states.attending(attend, *self._state_slots(slots), kept[:, 0], *of_nodes)
        _, logits, aux_hidden_states = self._model.with_logits(
            tokens.token_ids, tokens.positions, attend, None, self._layers
        )
        assert isinstance(logits, Tensor)
        self._logits[: bucket.tokens].copy_(logits)
        if aux_hidden_states:
            torch.cat(aux_hidden_states, -1, out=self._aux[: bucket.tokens])

    def verify(self, bucket: Bucket, is_sampled: bool, is_filtered: bool) -> None:
        """Verify the trees after `forward`, and keep the accepted paths.

        `is_sampled`: not all requests are greedy; `is_filtered`: among several ranks, some of these have filters.
        """
        slots, tree, outcome = self._slots[: bucket.rows], self._tree(bucket.rows), self._outcome[: bucket.rows]
        kept = self._kept[: bucket.rows]
        reads_options = is_sampled or isinstance(self._sampler, PaddedSampler)
        logits, options = self._logits[: bucket.tokens], self._table.sampling(slots, []) if reads_options else None
        inputs = PaddedVerifyInput(logits, tree, options, kept[:, 0], is_sampled)
        if self.is_sharded:
            verified = verify_padded_shards(inputs, self._sampler, self._model.head, is_filtered)
        else:
            verified = step_ops(slots.device).verify_padded(inputs, self._sampler)
        if bucket.nodes > 1:
            self._kv.commit(kept[:, 2:], verified.outcome)
            if self._states is not None:
                self._states.commit(*self._state_slots(slots), verified.outcome, kept[:, 1], bucket.tokens)
        self._ops.commit(slots, verified.outcome, outcome)

    def draft(self, bucket: Bucket, drafter: DeviceDrafter, is_sampled: bool) -> None:
        """Draft for the next step after `verify`, in a bucket of a drafter."""
        slots, outcome = self._slots[: bucket.rows], self._outcome[: bucket.rows]
        places = self._kept[: bucket.rows, 1:2] + nodes_of(outcome)[:, : bucket.nodes]
        num_drafts = bucket.nodes - 1
        rows = PaddedRows(self._table, slots, num_kept(outcome), places, self._aux, is_sampled, num_drafts)
        self._drafts.put(drafter.draft(rows))

    def drafts(self, bucket: Bucket, num_rows: int) -> DraftTree:
        """The trees of the last `draft`."""
        return self._drafts.trees(num_rows, bucket.nodes)

    def outcome(self, num_rows: int) -> CopiedOutcome:
        """The outcome of `verify`; one copy to the host."""
        return CopiedOutcome(self._outcome[:num_rows])

    def device_outcome(self, num_rows: int, num_nodes: int) -> Tensor:
        """It on the device, of trees of up to `num_nodes` nodes: int64 [R, 2 + 2 * num_nodes]."""
        outcome = self._outcome[:num_rows]
        return torch.cat((outcome[:, : 2 + num_nodes], nodes_of(outcome)[:, :num_nodes]), 1)

    def kept_states(self, num_rows: int, num_nodes: int) -> Tensor:
        """The hidden states of the nodes that `verify` has kept, [num_rows * num_nodes, any], and some behind them."""
        nodes = nodes_of(self._outcome[:num_rows])[:, :num_nodes]
        return self._aux.index_select(0, (self._kept[:num_rows, 1:2] + nodes).flatten())

    def logits(self, num_nodes: int) -> Tensor:
        """This rank's columns [num_nodes, columns] of the trees' nodes."""
        return self._logits[:num_nodes].clone()

    def aux_hidden_states(self, bucket: Bucket) -> list[Tensor]:
        """Those of all layers side by side, [tokens of the bucket, layers * hidden]; none if nobody reads them."""
        return [self._aux[: bucket.tokens]] if self._layers else []

    def _state_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of the state pools, any one for padding; bool: whether a row is a request's)."""
        is_request = slots != self._table.padding_slot
        return slots.where(is_request, 0), is_request

    def _tree(self, num_rows: int, num_nodes: int | None = None) -> DraftTree:
        tokens, parents = self._trees[:, :num_rows, :num_nodes]
        return DraftTree(tokens, parents, self._num_nodes[:num_rows], tokens.shape[1] - 1)
