"""One rank of the target: executes plans and submits the next step's drafts.

`execute` is the whole speculative step. Rank 0 broadcasts the trees and the outcome of verification; the other ranks
run the same code on what they receive, so ranks cannot diverge.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specray.config import MAX_TREE_NODES, EngineConfig
from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.causal_lm import TargetModel
from specray.models.files import resolve_model
from specray.models.tokenizer import eos_token_ids, load_tokenizer
from specray.ops.attention import PaddedAttention
from specray.ops.cpu.threads import use_threads
from specray.ops.graphs import make_graphs
from specray.ops.linear import fixed_order
from specray.outputs import TokenLogprob
from specray.spec_decode import make_drafter
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, DraftRequest, DraftSource, ProposeContext, padded_drafter
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.samplers import make_sampler
from specray.spec_decode.shard_verifier import verify_shards
from specray.spec_decode.verifier import can_verify_padded, is_padded, verify
from specray.spec_decode.verify_batch import VerifyInput
from specray.step import DraftLimit, RequestResult, StepPlan, StepResult, StepTimes
from specray.step_wire import pack, unpack_plan
from specray.structured_output.compilation import make_tools
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import broadcast_output, broadcast_tree
from specray.worker.buckets import Bucket
from specray.worker.compilation import compile_target
from specray.worker.decode_graphs import DecodeGraphs
from specray.worker.devices import choose_device
from specray.worker.input_batch import ScheduledBatch, StepBatch, build_batch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.prompt_logprobs import compute_prompt_logprobs
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.step_output import StepOutput
from specray.worker.traced_trees import traced_trees

logger = logging.getLogger(__name__)

NO_DRAFTS = DraftLimit(0, 0)
NOT_A_NUMBER = "the model's output for this request is NaN or infinite, so no token can be sampled"
NO_TOKEN_ALLOWED = "the grammar allows no token of the vocabulary here, or the model's output is NaN or infinite"


class Worker:
    """Rank `rank` of `world_size`. Rank 0 is driven by `execute` and `propose`, the others by `run_loop`.

    `drafter` replaces the configured one (tests). With `colocate`, drafters connect from their own processes.
    `model` is a target that is already loaded and whose weights are shared.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        world_size: int = 1,
        init_method: str | None = None,
        progress: bool = False,
        drafter: Drafter | None = None,
        model: TargetModel | None = None,
        colocate: DraftEndpoint | None = None,
    ) -> None:
        device = choose_device(config, rank)
        if device.type == "cpu":
            use_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // world_size))
        folder = resolve_model(config.model, config.revision, config.load_format, progress=progress)
        self._group = RankGroup(rank, world_size, init_method, device, config.deterministic)
        self._runner = ModelRunner(config, folder, self._group, device, progress, model, colocates=colocate is not None)
        vocab_size = self._runner.model.shape.vocab_size
        max_tokens = self._runner.context_length + MAX_TREE_NODES + config.page_size
        self._table = RequestTable(config.max_running_requests, max_tokens, config.page_size, vocab_size, device)
        tokenizer = load_tokenizer(folder)
        eos_ids = eos_token_ids(folder, tokenizer)
        self.grammars = GrammarTable(partial(make_tools, tokenizer, vocab_size, eos_ids))
        self.drafts: DraftSource
        if colocate is not None and self._group.leads:
            self.drafts = RemoteDrafts(colocate, self._runner.ring_limits(config), self._table)
        else:
            if drafter is None and self._group.leads:
                with fixed_order(config.deterministic):
                    drafter = make_drafter(config.speculative, self._runner.view(config, folder, eos_ids))
            self.drafts = InlineDrafts(drafter, config.max_running_requests, vocab_size, device)
        self._sampler = make_sampler(config.speculative)
        compile_target(config, self._runner, self.drafts.max_draft_tokens, progress)
        self._graphs = self._capture(config)
        self._context = ProposeContext(self._table, [])
        self.capacity = Capacity(
            num_blocks=self._runner.num_blocks,
            max_draft_tokens=self.drafts.max_draft_tokens,
            context_length=self._runner.context_length,
            vocab_size=vocab_size,
            eos_token_ids=eos_ids,
            reads_next_token=self.drafts.reads_next_token,
            dtype=str(self.model.embedding.weight.dtype).removeprefix("torch."),
            is_batch_invariant=self._runner.is_batch_invariant(config),
        )

    @property
    def model(self) -> TargetModel:
        return self._runner.model

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target forward over known tokens and draft trees, verify, keep the accepted path."""
        ready, withheld = self.grammars.withhold(plan)
        if self._group.size > 1:
            self._group.broadcast_bytes(pack(ready))
        result = self._execute(ready)
        if not withheld:
            return result
        computed = iter(result.rows)
        return result._replace(rows=[withheld.get(row.slot) or next(computed) for row in plan.rows])

    def propose(self) -> None:
        """Draft for the next step; called after the step's result was sent to the scheduler."""
        self.drafts.submit(self._context)

    @torch.inference_mode()
    def run_loop(self) -> None:
        """Run the plans of rank 0 until the group breaks; for ranks above 0."""
        while True:
            self._execute(unpack_plan(self._group.broadcast_bytes(None)))

    def close(self) -> None:
        self._group.close()

    @torch.inference_mode()
    def _capture(self, config: EngineConfig) -> DecodeGraphs | None:
        """The graphs of decode steps; None where there are none.

        Ranks above 0 do not know the drafter, so they could not choose the same buckets.
        """
        if config.disable_cuda_graph or self._group.size > 1:
            return None
        graphs = make_graphs(self._table.device, config.attention_backend)
        if graphs is None:
            return None
        if not isinstance(self._runner.attention, PaddedAttention):
            logger.info("attention_backend=%s has no CUDA graphs", config.attention_backend)
            return None
        rows = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
        drafter = self.drafts.drafter if isinstance(self.drafts, InlineDrafts) else None
        padded = padded_drafter(drafter) if is_padded(self._sampler) else None
        captured = DecodeGraphs(graphs, self._runner, self._table, self.drafts, rows, padded, self._sampler)
        captured.capture()
        return captured

    def _execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        rows = ScheduledBatch.of(self._table, plan)
        self.drafts.release(plan.freed_slots)
        self._context = ProposeContext(self._table, [])  # the last step's may name slots that were just freed
        if not rows.states:
            return StepResult(plan.step_id, [], StepTimes(time.perf_counter() - start, 0.0, 0.0, 0.0))
        batch = self._collect(plan, rows)
        draft_seconds = self.drafts.seconds
        prepared = time.perf_counter()
        bucket = self._graphs.bucket(batch) if self._graphs is not None else None
        states = [state.sampling for state in rows.states]
        verifying = bucket if batch.mask is None and can_verify_padded(states, self._sampler) else None
        computed = self._forward(batch, bucket, plan.runs_drafter, returns_logits=verifying is None)
        forwarded = time.perf_counter()
        # Steps in graphs have no hidden states, and compute no token of a prompt but its last.
        prompts = {} if computed.hidden is None else compute_prompt_logprobs(self.model, batch, computed.hidden)
        output = self._verify(batch, verifying, computed)
        results = [self._commit_row(batch, output, row, prompts.get(row)) for row in range(len(rows.states))]
        for row, verified_tree in traced_trees(batch, output).items():
            results[row] = results[row]._replace(tree=verified_tree)
        if plan.runs_drafter:
            replay = None if self._graphs is None or verifying is None else self._graphs.draft(batch, verifying)
            self._context = self._draft_context(plan, batch, output, computed, replay)
        verified = time.perf_counter()
        times = StepTimes(prepared - start, forwarded - prepared, verified - forwarded, draft_seconds)
        return StepResult(plan.step_id, results, times, self.drafts.take_faults())

    def _collect(self, plan: StepPlan, rows: ScheduledBatch) -> StepBatch:
        """The draft trees of the rows that sample, and what grammars allow at their nodes."""
        roots, tree, num_nodes, mask = rows.roots(self._table), None, None, None
        if self._group.leads:
            sampling = set(rows.sampling)
            draft_limits = [row.draft_limit if place in sampling else NO_DRAFTS for place, row in enumerate(plan.rows)]
            tree, num_nodes = self.drafts.collect(rows.slots, roots, draft_limits)
            slots = [state.slot for state in rows.states]
            tree, num_nodes, mask = self.grammars.constrain(slots, rows.sampling, tree, num_nodes, draft_limits)
        if self._group.size > 1:
            tree, num_nodes = broadcast_tree(self._group, tree, num_nodes, self._table.device)
        assert tree is not None
        assert num_nodes is not None
        return StepBatch(rows, tree, num_nodes, mask)

    def _forward(
        self, batch: StepBatch, bucket: Bucket | None, runs_drafter: bool, returns_logits: bool
    ) -> ForwardOutput:
        if self._graphs is not None and bucket is not None:
            return self._graphs.forward(batch, bucket, returns_logits)
        layers = self.drafts.aux_hidden_state_layers if runs_drafter else ()
        return self._runner.forward(build_batch(self._table, batch), layers)

    def _verify(self, batch: StepBatch, bucket: Bucket | None, computed: ForwardOutput) -> StepOutput:
        """Verify the trees and keep the accepted paths, in the graph of `bucket` or without one."""
        if self._graphs is not None and bucket is not None:
            return self._graphs.verify(batch, bucket)
        output = self._verify_eagerly(batch, computed)
        self._commit(batch, output)
        return output

    def _verify_eagerly(self, batch: StepBatch, computed: ForwardOutput) -> StepOutput:
        """Verify the trees of the rows that sample. The outcome of all rows is copied to the host once."""
        rows, output, verified = batch.rows, None, None
        states, num_nodes, tree = rows.states, batch.num_nodes, batch.tree
        slots, lengths, sampling = rows.slots, rows.starts + rows.counts, None
        if not rows.are_all_sampling:
            sampling = torch.tensor(rows.sampling, dtype=torch.int64).to(self._table.device)
            states, num_nodes = [states[row] for row in rows.sampling], [num_nodes[row] for row in rows.sampling]
            slots, lengths, tree = slots[sampling], lengths[sampling], tree.select(sampling)
        if states:
            assert computed.logits is not None
            options = self._table.sampling(slots, states)
            inputs = VerifyInput(computed.logits, tree, num_nodes, options, lengths)
            if self._group.size > 1:
                verified = verify_shards(inputs, self.model.head, self._sampler, batch.mask)
            else:
                verified = verify(inputs, self._sampler, batch.mask)
        if self._group.leads:
            if sampling is None:
                assert verified is not None
                output = StepOutput.of_sampled(verified)
            else:
                assert computed.hidden is not None
                is_finite = computed.hidden.index_select(0, computed.roots).isfinite().all(-1)
                output = StepOutput.of(is_finite, sampling, rows.sampling, verified)
        if self._group.size > 1:
            output = broadcast_output(self._group, output, self._table.device)
        assert output is not None
        return output

    def _commit(self, batch: StepBatch, output: StepOutput) -> None:
        """Keep the accepted paths on the device: KV and tokens."""
        rows, tree = batch.rows, batch.tree
        if tree.max_depth:
            nodes = torch.arange(tree.tokens.shape[1], device=self._table.device)
            places = (rows.starts + rows.counts - 1)[:, None] + nodes
            kv_slots = self._table.kv_slots_at(rows.slots[:, None].expand_as(places).flatten(), places.flatten())
            self._runner.kv.commit(kv_slots.view_as(places), output.nodes, output.num_kept)
        self._table.append(rows.slots, output.tokens, output.num_emitted)

    def _commit_row(
        self, batch: StepBatch, output: StepOutput, row: int, prompt_logprobs: list[TokenLogprob] | None
    ) -> RequestResult:
        """Keep a row's accepted path in the host's copy: lengths and tokens."""
        state, num_kept = batch.rows.states[row], int(output.host[row, 0])
        if not num_kept:
            error = NOT_A_NUMBER if state.sampling.options.grammar is None else NO_TOKEN_ALLOWED
            return RequestResult(state.slot, [], 0, None, error)
        tokens = output.emitted(row)
        self.grammars.accept(state.slot, tokens)
        state.num_computed_tokens += batch.rows.num_known[row] + num_kept - 1
        state.token_ids += tokens
        state.sampling.num_output_tokens = len(state.token_ids) - state.num_prompt_tokens
        num_drafts, nodes = batch.num_nodes[row] - 1, output.accepted_nodes(row)
        return RequestResult(state.slot, tokens, num_drafts, output.logprobs.get(row), None, nodes, prompt_logprobs)

    def _draft_context(
        self,
        plan: StepPlan,
        batch: StepBatch,
        output: StepOutput,
        computed: ForwardOutput,
        replay: Callable[[], DraftTree] | None,
    ) -> ProposeContext:
        """The drafter's input: rows with finite logits, and the hidden states of the tokens they committed."""
        rows, num_kept = batch.rows, output.host[:, 0].tolist()
        gets_drafts = [False] * len(num_kept)
        for row in rows.sampling:
            gets_drafts[row] = plan.rows[row].draft_limit.allows_drafts
        order = sorted((row for row, kept in enumerate(num_kept) if kept), key=lambda row: not gets_drafts[row])
        lengths = [rows.num_known[row] + num_kept[row] - 1 for row in order]
        requests = []
        for row, length in zip(order, lengths, strict=True):
            state, limit = rows.states[row], plan.rows[row].draft_limit
            end = state.num_computed_tokens
            useful = DraftLimit(limit.num_tokens, min(limit))  # a tree of n nodes has n levels at most
            requests.append(DraftRequest(state.slot, end - length, end, useful))
        count = sum(gets_drafts[row] for row in order)

        def gather() -> Tensor:
            index = batch.committed_places(computed.roots, order, output.nodes, output.num_kept, lengths)
            return torch.cat([states.index_select(0, index) for states in computed.aux_hidden_states], -1)

        return ProposeContext(
            self._table,
            requests[:count],
            requests[count:],
            gather if computed.aux_hidden_states else None,
            replay if count == len(num_kept) else None,
        )
