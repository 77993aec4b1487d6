"""A decode step whose shapes are fixed, as CUDA graphs need it: forward, verification and the commit of accepted paths.

The step reads and writes tensors that stay where they are. It has a bucket, a number of rows and of nodes per tree, and
smaller steps are padded: a padding row is an empty request without a node, a padding node writes its KV to a KV slot
that nobody reads, and neither is ever accepted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.attention import recordable
from specray.ops.host_copy import HostCopy
from specray.ops.step_tensors import RaggedIndex, nodes_of, tokens_of
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
        largest = Bucket(max(bucket.rows for bucket in buckets), max(bucket.nodes for bucket in buckets))
        max_tokens = max(bucket.num_tokens for bucket in buckets)
        self._slots = torch.full((largest.rows,), table.padding_slot, dtype=torch.int64, device=device)
        self._num_nodes = torch.zeros(largest.rows, dtype=torch.int64, device=device)
        self._trees = torch.full((2, *largest), NONE, dtype=torch.int64, device=device)  # tokens, parents
        head = runner.model.head
        logits_dtype = torch.float32 if head.returns_float32 else dtype
        self._logits = torch.zeros(max_tokens, head.num_columns, dtype=logits_dtype, device=device)
        width = len(layers) * runner.model.shape.hidden_size
        self._aux = torch.zeros(max_tokens, width, dtype=dtype, device=device)
        self._kept = torch.zeros(largest.rows + max_tokens, dtype=torch.int64, device=device)
        self._outcome = torch.zeros(2 * largest.rows + 2 * max_tokens, dtype=torch.int64, device=device)
        self._drafts = TreeBuffers(*largest, device)
        self._states = None
        if runner.states is not None:
            self._states = PaddedStates(runner.states, largest, max_tokens, dtype)

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
        slots, tree = self._slots[: bucket.rows], self._tree(bucket)
        tokens = self._ops.tree_input(slots, tree, self._kv.padding_slot, self._kept_of(bucket))
        attend = self._attention.plan_padded(tokens.attention)
        if self._states is not None:
            attend = self._states.attending(attend, *self._state_slots(slots), self._kept_of(bucket)[:, 0], tree)
        _, logits, aux_hidden_states = self._model.with_logits(
            tokens.token_ids, tokens.positions, attend, None, self._layers
        )
        assert isinstance(logits, Tensor)
        self._logits[: bucket.num_tokens].copy_(logits)
        if aux_hidden_states:
            torch.cat(aux_hidden_states, -1, out=self._aux[: bucket.num_tokens])

    def verify(self, bucket: Bucket, is_sampled: bool, is_filtered: bool) -> None:
        """Verify the trees after `forward`, and keep the accepted paths.

        `is_sampled`: not all requests are greedy; `is_filtered`: among several ranks, some of these have filters.
        """
        slots, tree = self._slots[: bucket.rows], self._tree(bucket)
        lengths, kv_slots = self._kept_of(bucket).tensor_split((1,), 1)
        reads_options = is_sampled or isinstance(self._sampler, PaddedSampler)
        logits, options = self._logits[: bucket.num_tokens], self._table.sampling(slots, []) if reads_options else None
        inputs = PaddedVerifyInput(logits, tree, options, lengths[:, 0], is_sampled)
        if self.is_sharded:
            verified = verify_padded_shards(inputs, self._sampler, self._model.head, is_filtered)
        else:
            verified = step_ops(slots.device).verify_padded(inputs, self._sampler)
        if bucket.nodes > 1:
            self._kv.commit(kv_slots, verified.outcome)
            if self._states is not None:
                self._states.commit(*self._state_slots(slots), verified.outcome, bucket.nodes)
        self._ops.commit(slots, verified.outcome, self._outcome_of(bucket))

    def draft(self, bucket: Bucket, drafter: DeviceDrafter, is_sampled: bool) -> None:
        """Draft for the next step after `verify`."""
        count, _, rest = self._outcome_of(bucket).tensor_split((1, 2), 1)
        nodes, aux = rest[:, bucket.nodes :], self._aux[: bucket.num_tokens]
        rows = PaddedRows(
            self._table, self._slots[: bucket.rows], count[:, 0], nodes, aux, is_sampled, bucket.nodes - 1
        )
        self._drafts.put(drafter.draft(rows))

    def drafts(self, bucket: Bucket, num_rows: int) -> DraftTree:
        """The trees of the last `draft`."""
        return self._drafts.trees(num_rows, bucket.nodes)

    def outcome(self, bucket: Bucket, num_rows: int) -> CopiedOutcome:
        """The outcome of `verify`; one copy to the host."""
        return CopiedOutcome(self.device_outcome(bucket, num_rows))

    def device_outcome(self, bucket: Bucket, num_rows: int) -> Tensor:
        """It on the device, until the next `verify`."""
        return self._outcome_of(bucket)[:num_rows]

    def kept_states(self, bucket: Bucket, num_rows: int) -> Tensor:
        """The hidden states of the nodes that `verify` has kept, [num_rows * nodes, any], and some behind them."""
        nodes = nodes_of(self.device_outcome(bucket, num_rows))
        roots = torch.arange(0, num_rows * bucket.nodes, bucket.nodes, device=nodes.device)
        return self._aux.index_select(0, (roots[:, None] + nodes).flatten())

    def logits(self, bucket: Bucket, num_nodes: list[int]) -> Tensor:
        """This rank's columns [sum of num_nodes, columns] of the trees' nodes."""
        counts = torch.tensor(num_nodes).to(self._logits.device)
        index = RaggedIndex.of(counts, sum(num_nodes))
        return self._logits.index_select(0, index.rows * bucket.nodes + index.offsets)

    def aux_hidden_states(self, bucket: Bucket) -> list[Tensor]:
        """Those of all layers side by side, [tokens of the bucket, layers * hidden]; none if nobody reads them."""
        return [self._aux[: bucket.num_tokens]] if self._layers else []

    def _state_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of the state pools, any one for padding; bool: whether a row is a request's)."""
        is_request = slots != self._table.padding_slot
        return slots.where(is_request, 0), is_request

    def _tree(self, bucket: Bucket) -> DraftTree:
        tokens, parents = self._trees[:, : bucket.rows, : bucket.nodes]
        return DraftTree(tokens, parents, self._num_nodes[: bucket.rows], bucket.nodes - 1)

    def _kept_of(self, bucket: Bucket) -> Tensor:
        """What `verify` needs of `forward`, int64 [R, 1 + N]: known tokens, and the KV slots of the nodes."""
        width = 1 + bucket.nodes
        return self._kept[: bucket.rows * width].view(bucket.rows, width)

    def _outcome_of(self, bucket: Bucket) -> Tensor:
        width = 2 + 2 * bucket.nodes
        return self._outcome[: bucket.rows * width].view(bucket.rows, width)
