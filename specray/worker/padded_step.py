"""A decode step whose shapes are fixed, as CUDA graphs need it: forward, verification and the commit of accepted paths.

The step reads and writes tensors that stay where they are. It has a bucket, a number of rows and of nodes per tree, and
smaller steps are padded: a padding row is an empty request without a node, a padding node writes its KV to a KV slot
that nobody reads, and neither is ever accepted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.attention import PaddedAttention, PaddedBatch, pack_paths
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import PaddedCommit, PaddedDrafter
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler
from specray.spec_decode.node_verifier import verify_padded
from specray.spec_decode.request_table import RaggedIndex, RequestTable
from specray.worker.buckets import Bucket
from specray.worker.input_batch import StepBatch
from specray.worker.model_runner import ModelRunner
from specray.worker.step_output import StepOutput


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
        assert isinstance(runner.attention, PaddedAttention)
        self._model, self._kv, self._table, self._layers = runner.model, runner.kv, table, layers
        self._attention, self._sampler = runner.attention, sampler
        device, dtype = table.device, runner.model.embedding.weight.dtype
        largest = Bucket(max(bucket.rows for bucket in buckets), max(bucket.nodes for bucket in buckets))
        max_tokens = max(bucket.num_tokens for bucket in buckets)
        self._slots = torch.full((largest.rows,), table.padding_slot, dtype=torch.int64, device=device)
        self._num_nodes = torch.zeros(largest.rows, dtype=torch.int64, device=device)
        self._trees = torch.full((2, *largest), NONE, dtype=torch.int64, device=device)  # tokens, parents
        self._logits = torch.zeros(max_tokens, table.vocab_size, dtype=torch.float32, device=device)
        width = len(layers) * runner.model.shape.hidden_size
        self._aux = torch.zeros(max_tokens, width, dtype=dtype, device=device)
        self._outcome = torch.zeros(2 * largest.rows + 2 * max_tokens, dtype=torch.int64, device=device)
        self._drafts = torch.full((2, *largest), NONE, dtype=torch.int64, device=device)  # tokens, parents
        self._num_drafted = torch.zeros(largest.rows, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Make everything padding."""
        self._slots.fill_(self._table.padding_slot)
        self._num_nodes.fill_(0)
        self._trees.fill_(NONE)

    def load(self, batch: StepBatch) -> None:
        """Make the next step that of `batch`; everything behind its rows and nodes is padding."""
        self.clear()
        count, width = batch.tree.tokens.shape
        self._slots[:count].copy_(batch.rows.slots)
        self._num_nodes[:count].copy_(batch.tree.num_nodes)
        for part, values in zip(self._trees, (batch.tree.tokens, batch.tree.parents), strict=True):
            part[:count, :width].copy_(values)

    def forward(self, bucket: Bucket) -> None:
        """The target over all nodes."""
        slots, tree, lengths = self._slots[: bucket.rows], self._tree(bucket), self._lengths(bucket)
        is_node = torch.arange(bucket.nodes, device=slots.device) < tree.num_nodes[:, None]
        sees, kv_slots = tree.ancestors(), self._kv_slots(bucket)
        positions = torch.where(is_node, lengths[:, None] + sees.sum(-1) - 2, 0)
        prefix_lens, rows = (lengths - 1).clamp(min=0), slots
        attend = self._attention.plan_padded(
            PaddedBatch(
                prefix_lens.repeat_interleave(bucket.nodes),
                rows.repeat_interleave(bucket.nodes),
                self._table.kv_slots,
                *pack_paths(sees, kv_slots.where(is_node, 0)),
                kv_slots.where(is_node, self._kv.padding_slot).flatten(),
            )
        )
        token_ids = tree.tokens.where(is_node, 0)
        _, logits, aux_hidden_states = self._model.with_logits(
            token_ids.flatten(), positions.flatten(), attend, None, self._layers
        )
        self._logits[: bucket.num_tokens].copy_(logits)
        if aux_hidden_states:
            self._aux[: bucket.num_tokens].copy_(torch.cat(aux_hidden_states, -1))

    def verify(self, bucket: Bucket, is_sampled: bool) -> None:
        """Verify the trees after `forward`, and keep the accepted paths; `is_sampled`: not all requests are greedy."""
        slots, tree = self._slots[: bucket.rows], self._tree(bucket)
        kv_slots = self._kv_slots(bucket)  # before the requests become longer
        reads_options = is_sampled or isinstance(self._sampler, PaddedSampler)
        logits, options = self._logits[: bucket.num_tokens], self._table.sampling(slots, []) if reads_options else None
        verified = verify_padded(logits, tree, options, self._lengths(bucket), is_sampled, self._sampler)
        count = verified.num_tokens
        if bucket.nodes > 1:
            self._kv.commit(kv_slots, verified.nodes, count)
        self._table.append(slots, verified.tokens, count)
        outcome = torch.cat((count[:, None], count[:, None], verified.tokens, verified.nodes), 1)
        self._outcome_of(bucket).copy_(outcome)

    def draft(self, bucket: Bucket, drafter: PaddedDrafter, is_sampled: bool) -> int:
        """Draft for the next step after `verify`; returns the depth of the trees."""
        count, _, rest = self._outcome_of(bucket).tensor_split((1, 2), 1)
        nodes, aux = rest[:, bucket.nodes :], self._aux[: bucket.num_tokens]
        commit = PaddedCommit(self._slots[: bucket.rows], count[:, 0], nodes, aux)
        tree = drafter.propose_padded(self._table, commit, is_sampled)
        for part, values in zip(self._drafts, (tree.tokens, tree.parents), strict=True):
            part[: bucket.rows, : values.shape[1]].copy_(values)
        self._num_drafted[: bucket.rows].copy_(tree.num_nodes)
        return tree.max_depth

    def drafts(self, num_rows: int, max_depth: int) -> DraftTree:
        """The trees of the last `draft`."""
        tokens, parents = self._drafts[:, :num_rows]
        return DraftTree(tokens, parents, self._num_drafted[:num_rows], max_depth)

    def output(self, bucket: Bucket, num_rows: int) -> StepOutput:
        """The outcome of `verify`; one copy to the host."""
        return StepOutput.of_outcome(self._outcome_of(bucket)[:num_rows])

    def logits(self, bucket: Bucket, num_nodes: list[int]) -> Tensor:
        """float32 [sum of num_nodes, V] of the trees' nodes."""
        counts = torch.tensor(num_nodes).to(self._logits.device)
        index = RaggedIndex.of(counts, sum(num_nodes))
        return self._logits.index_select(0, index.rows * bucket.nodes + index.offsets)

    def aux_hidden_states(self, bucket: Bucket) -> list[Tensor]:
        """Those of all layers side by side, [tokens of the bucket, layers * hidden]; none if nobody reads them."""
        return [self._aux[: bucket.num_tokens]] if self._layers else []

    def roots(self, bucket: Bucket, num_rows: int) -> Tensor:
        """int64 [num_rows], places of the roots among the bucket's tokens."""
        return torch.arange(num_rows, device=self._slots.device) * bucket.nodes

    def _tree(self, bucket: Bucket) -> DraftTree:
        tokens, parents = self._trees[:, : bucket.rows, : bucket.nodes]
        return DraftTree(tokens, parents, self._num_nodes[: bucket.rows], bucket.nodes - 1)

    def _lengths(self, bucket: Bucket) -> Tensor:
        """Known tokens, int64 [R]."""
        return self._table.num_tokens.index_select(0, self._slots[: bucket.rows]).long()

    def _kv_slots(self, bucket: Bucket) -> Tensor:
        """KV slots of the nodes, int64 [R, N]; undefined for padding."""
        nodes = torch.arange(bucket.nodes, device=self._slots.device)
        places = (self._lengths(bucket)[:, None] - 1 + nodes).clamp(min=0)
        slots = self._slots[: bucket.rows, None].expand_as(places)
        return self._table.kv_slots_at(slots.flatten(), places.flatten()).view_as(places)

    def _outcome_of(self, bucket: Bucket) -> Tensor:
        width = 2 + 2 * bucket.nodes
        return self._outcome[: bucket.rows * width].view(bucket.rows, width)
