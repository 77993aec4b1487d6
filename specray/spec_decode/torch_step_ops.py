"""The operations of a step around its forward passes with torch: the executable specification of `step_ops`."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specray.ops.attention import PaddedBatch, pack_paths
from specray.ops.device_ops import ops_on
from specray.ops.noise import noise_keys
from specray.ops.polling_torch import await_number
from specray.ops.sampling_state import SamplingBatch
from specray.ops.shard_sampling import choose_in_shard
from specray.ops.step_tensors import (
    Choices,
    RaggedIndex,
    RequestBuffer,
    TreesWanted,
    TreeTensors,
    num_emitted,
    tokens_of,
)
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler, coupled
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput, VerifyOutput


class FlatTokens(NamedTuple):
    """The T tokens of R rows and their trees."""

    token_ids: Tensor  # int64 [T], like the next two
    positions: Tensor
    slot_mapping: Tensor  # KV slots to write
    roots: Tensor  # int64 [R], places of the roots; a root's nodes follow it
    kv_slots: Tensor  # int64 [R, kv_width]: those of the first positions
    ancestors: Tensor | None  # see DraftTree; None: there are no drafts


class TableOps(Protocol):
    """Reads and writes the rows of a request table. Slots, positions and tokens are int64."""

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        """int64 [T], the cells `column` + position of each slot."""

    def kv_slots(self, slots: Tensor, starts: Tensor | None, width: int) -> Tensor:
        """KV slots [n, width] of `width` positions from `starts` [n] on, by default from 0."""

    def append(self, slots: Tensor, outcome: Tensor) -> None:
        """Append the tokens that `slots` [n] emitted; `outcome` is that of StepOutput."""

    def build_step(
        self, columns: Sequence[Tensor], trees: Sequence[Tensor], total: int, kv_width: int, has_drafts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The fields of FlatTokens, `total` tokens in all.

        `columns` are slots, positions of the first tokens to compute, and their numbers, the root included, each [R];
        `trees` are tokens and parents [R, N] and numbers of nodes [R].
        """

    def extend_input(
        self, slots: Tensor, starts: Tensor, ends: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a draft head reads of positions `starts` to `ends` of each request, `total` in all.

        (next token ids, positions and KV slots [total], places of the requests' last positions [n]).
        """


class TreeOps(Protocol):
    """Reads and writes trees by slot: the `pending` ones are [slots, W]."""

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        """Keep the trees of `slots` [B]; they replace older ones. If they have scores, so have the pending ones."""

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens and parents [B, W], numbers of nodes [B], report [2, B]) of trees, which no longer wait.

        The report has the numbers of nodes, 0 if the drafter's logits
        were not finite, and which trees are chains. With `least`, nodes of a lower score are cut, and the
        report is float32 [3 + W, B]: also the numbers of nodes before that, and the nodes' scores.
        """


class TreeInput(NamedTuple):
    """All nodes of B trees, tree by tree, and padding behind them: T tokens."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: PaddedBatch


class ExtendInput(NamedTuple):
    """The tokens behind those that B requests committed, T = B * width."""

    token_ids: Tensor  # int64 [T], of the next position
    positions: Tensor  # int64 [T], of the committed tokens
    attention: PaddedBatch
    nodes: Tensor  # int64 [T], places of their hidden states
    last: Tensor  # int64 [B], place of each request's last token among the T
    ends: Tensor  # int64 [B], position of each request's last known token, the root of its next tree
    roots: Tensor  # int64 [B], that token


class TorchStepOps:
    """The operations of a device."""

    def __init__(self, device: torch.device) -> None:
        # Whether sampled requests are better walked depth by depth than verified at all nodes: on a CPU noise for nodes
        # that no walk visits costs more than the depths.
        self.walks_sampled = device.type == "cpu"

    def table(self, buffer: RequestBuffer) -> TableOps:
        """The operations on a request table, which has `buffer`."""
        return TorchTable(buffer)

    def trees(self) -> TreeOps:
        """The operations on trees that wait."""
        return TorchTrees()

    def release_trees(self, flag: Tensor, number: int) -> None:
        """Set `flag` int64 [1], in memory that two processes share, behind all that was written before."""
        flag.fill_(number)

    def await_trees(
        self, flag: Tensor, num_nodes: Tensor, most_nodes: int, number: int, timeout_s: float
    ) -> tuple[Tensor, Tensor]:
        """(`num_nodes` int64 [B] once `flag` is `number`, int64 [1] whether that was in time); the device waits.

        Numbers are NONE if it was not, or if they exceed `most_nodes`.
        """
        is_there = await_number(flag, number, timeout_s)
        in_time = torch.tensor([int(is_there)], device=flag.device)
        return torch.where((num_nodes <= most_nodes) & (in_time > 0), num_nodes, NONE), in_time

    def verify(self, inputs: VerifyInput) -> VerifyOutput:
        """Verify trees of requests whose tokens do not depend on the path, with coupled sampling."""
        return _verify(inputs, coupled)

    def verify_chosen(self, tokens: Tensor, tree: DraftTree) -> VerifyOutput:
        """Verify trees by the target's tokens at their nodes, int64 [sum of num_nodes]; -1: logits are not finite."""
        places = tree.places(len(tokens))
        return accept(tree, tree.ancestors(), tokens[places], tokens[places] >= 0)

    def choose(self, inputs: VerifyInput | PaddedVerifyInput, first_id: int = 0) -> Choices:
        """The target's token for each row of `logits`, among its columns; undefined where that is padding.

        `first_id` is the token id of the first column.
        """
        logits, options, temperature, keys = inputs.logits, inputs.drawn, None, None
        if options is not None:
            index = RaggedIndex.of(inputs.tree.num_nodes, len(logits))
            temperature, keys = options.temperature.index_select(0, index.rows), _keys(inputs, options, index)
        return choose_in_shard(ops_on(logits.device), logits, temperature, keys, first_id)

    def verify_padded(self, inputs: PaddedVerifyInput, sampler: NodeSampler) -> VerifyOutput:
        """`verify` where `can_verify_padded`. A request whose tree has no node keeps and emits nothing."""
        return _verify(inputs, sampler)

    def accept(self, tree: DraftTree, choices: Choices) -> VerifyOutput:
        """Walk trees by the tokens that `choose` chose."""
        places = tree.places(len(choices.tokens))
        return accept(tree, tree.ancestors(), choices.tokens[places], choices.is_finite[places] > 0)


def at_nodes(sampler: NodeSampler, chosen: Tensor, inputs: VerifyInput | PaddedVerifyInput) -> Tensor:
    """The sampler's tokens after all nodes, int64 [T], from those that `coupled` chooses."""
    if not isinstance(sampler, PaddedSampler):
        return chosen
    tree, sampling, size = inputs.tree, inputs.sampling, inputs.logits.shape[-1]
    assert sampling is not None
    found = sampler.at_nodes(chosen[tree.places(len(chosen))], tree, sampling.seeds, inputs.lengths, size)
    return _of_nodes(found, RaggedIndex.of(tree.num_nodes, len(chosen)))


def _verify(inputs: VerifyInput | PaddedVerifyInput, sampler: NodeSampler) -> VerifyOutput:
    tree, logits, options, ops = inputs.tree, inputs.logits, inputs.drawn, ops_on(inputs.logits.device)
    if options is None:
        chosen = ops.argmax(logits)
    else:
        index = RaggedIndex.of(tree.num_nodes, len(logits))
        is_filtered = not options.states or any(state.is_filtered for state in options.states)
        keys = _keys(inputs, options, index)
        chosen = ops.sample_padded(logits, options.of_rows(index.rows), keys, is_filtered)
    is_finite = logits.gather(1, chosen[:, None])[:, 0].isfinite()
    places = tree.places(len(chosen))
    return accept(tree, tree.ancestors(), at_nodes(sampler, chosen, inputs)[places], is_finite[places])


def _keys(inputs: VerifyInput | PaddedVerifyInput, options: SamplingBatch, index: RaggedIndex) -> Tensor:
    """The noise of the tokens after all nodes, int32 [T, 2]."""
    positions = inputs.lengths[:, None] + inputs.tree.ancestors().sum(-1) - 1
    return _of_nodes(noise_keys(options.seeds[:, None], positions), index)


def _of_nodes(values: Tensor, index: RaggedIndex) -> Tensor:
    """[T, ...] of `values` [B, N, ...]; any of them for padding."""
    return values[index.rows, index.offsets.clamp(max=values.shape[1] - 1)]


def accept(tree: DraftTree, ancestors: Tensor, chosen: Tensor, is_finite: Tensor) -> VerifyOutput:
    """Accept the nodes whose whole path was chosen; `chosen` are the target's tokens at all places.

    `ancestors` bool [B, N, N] are those of `tree`. `chosen` and `is_finite` [B, N] are undefined without a node.
    """
    num_rows, width = tree.tokens.shape
    nodes = torch.arange(width, device=chosen.device)
    is_node = nodes < tree.num_nodes[:, None]
    depths = ancestors.sum(-1) - 1
    is_finite = is_finite & is_node
    parents = tree.parents.clamp(min=0)
    is_chosen = (tree.tokens == chosen.gather(1, parents)) & is_node & ~tree.repeats_sibling()
    is_chosen[:, ROOT].fill_(True)
    is_accepted = (is_chosen[:, None, :] | ~ancestors).all(-1) & (depths <= tree.max_depth) & is_node
    has_finite_path = (is_finite | ~is_accepted).all(-1)
    # At most one node of each depth is accepted; the others go to a column that is cut off.
    columns = torch.where(is_accepted, depths, tree.max_depth + 1)
    path = torch.zeros(num_rows, tree.max_depth + 2, dtype=torch.int64, device=chosen.device)
    path = path.scatter_(1, columns, nodes.expand(num_rows, width))[:, :-1]
    return VerifyOutput.of(is_accepted.sum(-1) * has_finite_path, chosen.gather(1, path), path)


class TorchTable:
    """TableOps. The buffer's last row takes what is masked."""

    def __init__(self, buffer: RequestBuffer) -> None:
        self.buffer = buffer
        self._discard_index = len(buffer.cells) - buffer.row_size
        self.padding_slot = self._discard_index // buffer.row_size  # an empty request
        rows = buffer.cells.view(-1, buffer.row_size)
        self.num_tokens = rows[:, buffer.length_column]
        self.all_kv_slots = rows[:, buffer.kv_column : buffer.length_column]

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        return self.buffer.cells.index_select(0, slots * self.buffer.row_size + column + positions).long()

    def kv_slots(self, slots: Tensor, starts: Tensor | None, width: int) -> Tensor:
        buffer, first = self.buffer, self.buffer.kv_column
        if starts is None:
            rows = buffer.cells.view(-1, buffer.row_size)[:, first : first + width]
            return rows.index_select(0, slots).long()
        positions = starts[:, None] + torch.arange(width, device=slots.device)
        found = self.cells(slots[:, None].expand_as(positions).flatten(), positions.flatten(), first)
        return found.view_as(positions)

    def append(self, slots: Tensor, outcome: Tensor) -> None:
        num_tokens, tokens = num_emitted(outcome), tokens_of(outcome)
        cells, row_size = self.buffer.cells, self.buffer.row_size
        known = cells.view(-1, row_size)[:, self.buffer.length_column]
        lengths = known.index_select(0, slots).long()
        columns = torch.arange(tokens.shape[1], device=slots.device)
        places = slots[:, None] * row_size + lengths[:, None] + columns
        places = places.where(columns < num_tokens[:, None], self._discard_index)
        cells.index_copy_(0, places.flatten(), tokens.flatten().to(torch.int32))
        known.index_copy_(0, slots, (lengths + num_tokens).to(torch.int32))

    def build_step(
        self, columns: Sequence[Tensor], trees: Sequence[Tensor], total: int, kv_width: int, has_drafts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        tokens, parents, num_nodes = trees
        query_lens = columns[2] + num_nodes - 1
        index = RaggedIndex.of(query_lens, total)
        slots, starts, counts = (column.index_select(0, index.rows) for column in columns)
        places_in_kv, node = starts + index.offsets, index.offsets - counts + 1
        token_ids = self.cells(slots, torch.where(node > 0, starts, places_in_kv), 0)
        positions, ancestors = places_in_kv, None
        if has_drafts:
            ancestors = DraftTree(tokens, parents, num_nodes, tokens.shape[1] - 1).ancestors()
            depth = (ancestors.sum(-1) - 1)[index.rows, node.clamp(min=0)]
            token_ids = torch.where(node > 0, tokens[index.rows, node.clamp(min=0)], token_ids)
            positions = torch.where(node > 0, places_in_kv - node + depth, places_in_kv)
        written = self.cells(slots, places_in_kv, self.buffer.kv_column)
        roots, kv_slots = query_lens.cumsum(0) - num_nodes, self.kv_slots(columns[0], None, kv_width)
        return token_ids, positions, written, roots, kv_slots, ancestors

    def extend_input(
        self, slots: Tensor, starts: Tensor, ends: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        index = RaggedIndex.of(ends - starts, total)
        rows, positions = slots.index_select(0, index.rows), starts.index_select(0, index.rows) + index.offsets
        token_ids, written = self.cells(rows, positions + 1, 0), self.cells(rows, positions, self.buffer.kv_column)
        return token_ids, positions, written, (ends - starts).cumsum(0) - 1

    # What CUDA graphs need beside these: fixed shapes, nothing from the host.

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self.cells(slots, positions, 0)

    def kv_slots_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self.cells(slots, positions, self.buffer.kv_column)

    def load_step(self, step: Sequence[Tensor], slots: Tensor, tree: DraftTree) -> None:
        """Make `step` (slots [R], numbers of nodes [R], tokens and parents [R, N]) that of B <= R trees.

        Everything behind them is padding.
        """
        for part, padding in zip(step, (self.padding_slot, 0, NONE, NONE), strict=True):
            part.fill_(padding)
        count, width = tree.tokens.shape
        step[0][:count].copy_(slots)
        step[1][:count].copy_(tree.num_nodes)
        for part, values in zip(step[2:], (tree.tokens, tree.parents), strict=True):
            part[:count, :width].copy_(values)

    def tree_input(self, slots: Tensor, tree: DraftTree, padding_kv_slot: int, kept: Tensor, total: int) -> TreeInput:
        """The input of the target, of `total` tokens: at least the nodes of all trees, at most B * N.

        `kept` int64 [B, 2 + N], contiguous, becomes known tokens, the places of the roots, and the KV slots of nodes.
        """
        width = tree.tokens.shape[1]
        nodes = torch.arange(width, device=slots.device)
        lengths = self.num_tokens.index_select(0, slots).long()
        places = (lengths[:, None] - 1 + nodes).clamp(min=0)
        kv_slots = self.kv_slots_at(slots.repeat_interleave(width), places.flatten()).view_as(places)
        kept.copy_(torch.cat((lengths[:, None], tree.starts()[:, None], kv_slots), 1))
        is_node, sees = nodes < tree.num_nodes[:, None], tree.ancestors()
        index = RaggedIndex.of(tree.num_nodes, total)
        is_token = index.offsets < tree.num_nodes.index_select(0, index.rows)

        def flat(values: Tensor, padding: int = 0) -> Tensor:
            return _of_nodes(values.expand_as(places), index).where(is_token, padding)

        paths, path_lengths = pack_paths(sees, kv_slots.where(is_node, 0))
        batch = PaddedBatch(
            flat((lengths - 1).clamp(min=0)[:, None]),
            flat(slots[:, None]),
            self.all_kv_slots,
            _of_nodes(paths.view(*places.shape, -1), index).where(is_token[:, None], 0),
            flat(path_lengths.view_as(places), 1),
            flat(kv_slots, padding_kv_slot),
            width,
            tree.num_nodes,
        )
        return TreeInput(flat(tree.tokens), flat(lengths[:, None] + sees.sum(-1) - 2), batch)

    def padded_extend(
        self,
        slots: Tensor,
        num_kept: Tensor,
        states: Tensor,
        width: int,
        padding_kv_slot: int,
    ) -> ExtendInput:
        """The input of a draft head, at most `width` tokens for each request; arguments as in PaddedRows."""
        num_rows = len(states)
        ends = (self.num_tokens.index_select(0, slots).long() - 1).clamp(min=0)
        depth = torch.arange(width, device=slots.device)
        is_token = depth < num_kept[:, None]
        starts = ends - num_kept
        positions = (starts[:, None] + depth).where(is_token, 0).flatten()
        rows = slots.repeat_interleave(width)
        kv_slots = self.kv_slots_at(rows, positions).view_as(is_token)
        batch = PaddedBatch(
            starts.repeat_interleave(width),
            rows,
            self.all_kv_slots,
            kv_slots.where(is_token, 0).repeat_interleave(width, 0),
            (depth + 1).repeat(num_rows),
            kv_slots.where(is_token, padding_kv_slot).flatten(),
            width,
        )
        row = torch.arange(num_rows, device=slots.device)
        return ExtendInput(
            self.tokens_at(rows, positions + 1),
            positions,
            batch,
            states[:, :width].flatten(),
            row * width + (num_kept - 1).clamp(min=0),
            ends,
            self.tokens_at(slots, ends),
        )

    def commit(self, slots: Tensor, outcome: Tensor, report: Tensor) -> None:
        """`append`, and copy the outcome to `report`, which stays where it is."""
        self.append(slots, outcome)
        report.copy_(outcome)


class TorchTrees:
    """TreeOps."""

    def put(self, pending: TreeTensors, slots: Tensor, trees: TreeTensors) -> None:
        width = trees.tokens.shape[1]
        pending.tokens[:, :width].index_copy_(0, slots, trees.tokens)
        pending.parents[:, :width].index_copy_(0, slots, trees.parents)
        pending.num_nodes.index_copy_(0, slots, trees.num_nodes)
        if pending.scores is not None and trees.scores is not None:
            pending.scores[:, :width].index_copy_(0, slots, trees.scores)
        elif pending.scores is not None:
            pending.scores.index_fill_(0, slots, 1.0)

    def take(self, pending: TreeTensors, wanted: TreesWanted, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots, roots, most, least = wanted
        tokens, parents, found = (part.index_select(0, slots) for part in pending[:3])
        pending.num_nodes.index_fill_(0, slots, NONE)
        tree = DraftTree(tokens, parents, found, tokens.shape[1] - 1)
        is_usable = (found > 0) & (tokens[:, ROOT] == roots) & tree.is_valid(vocab_size)
        within = torch.where(is_usable, torch.minimum(found, most.to(found.dtype)), 1)
        nodes = torch.arange(tokens.shape[1], device=slots.device)
        num_nodes, scores = within, None
        if pending.scores is not None and least is not None:
            scores = pending.scores.index_select(0, slots)
            num_nodes = ((scores >= least[:, None]) & (nodes < within[:, None])).sum(-1).clamp(min=1)
        is_chain = ((parents == nodes - 1) | (nodes >= num_nodes[:, None])).all(-1)
        tokens, parents = (part.masked_fill(nodes >= num_nodes[:, None], NONE) for part in (tokens, parents))
        tokens[:, ROOT], parents[:, ROOT] = roots, NONE
        report = torch.stack((torch.where(found == 0, 0, num_nodes), is_chain))
        if scores is not None:
            report = torch.cat((report, within[None], scores.t()))
        return tokens, parents, num_nodes, report
