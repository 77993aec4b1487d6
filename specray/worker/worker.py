"""One rank of the target: executes plans, and has the drafter prepare the next step's trees.

`execute` is the whole speculative step. Rank 0 decides what is verified and what is emitted and tells
the other ranks, so ranks cannot diverge; a follower runs the same code on what it is told.
"""

import os
import time
from typing import Any

import msgpack
import torch

from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.files import resolve_model
from specray.models.llama import Llama
from specray.models.tokenizer import eos_token_ids, load_tokenizer
from specray.spec_decode import make_drafter
from specray.spec_decode.choice import make_choice
from specray.spec_decode.draft_tree import ROOT, DraftTree, RowTree
from specray.spec_decode.drafter import Drafter, DraftSource, InlineDrafts, ProposeContext
from specray.spec_decode.verifier import VerifyOutput, verify
from specray.step import DraftLimit, RequestResult, StepPlan, StepResult, StepTimes, pack, unpack_plan
from specray.worker.devices import choose_device
from specray.worker.input_batch import InputBatch, build_batch, count_known, sampling_rows
from specray.worker.model_runner import ModelRunner
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.request_state import RequestTable, Row

NOT_A_NUMBER = "the model's output for this request is not a number (NaN or infinity); the request cannot go on"


class Worker:
    """Rank `rank` of `world_size`. Rank 0 is driven by `execute` and `propose`, the others by `follow`.

    `drafter` replaces the configured one (tests); with `colocate`, drafters are taken that connect from processes of
    their own; `model` is an already loaded target to share.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        world_size: int = 1,
        init_method: str | None = None,
        progress: bool = False,
        drafter: Drafter | None = None,
        model: Llama | None = None,
        colocate: DraftEndpoint | None = None,
    ) -> None:
        device = choose_device(config, rank)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // world_size))
        folder = resolve_model(config.model, config.revision, config.load_format, progress=progress)
        self._group = RankGroup(rank, world_size, init_method, device)
        self._runner = ModelRunner(config, folder, self._group, device, progress, model)
        vocab_size = self._runner.model.shape.vocab_size
        self._rows = RequestTable(config.page_size, vocab_size, device)
        eos_ids = eos_token_ids(folder, load_tokenizer(folder))
        self._drafts: DraftSource
        if colocate is not None and self._group.leads:
            self._drafts = RemoteDrafts(colocate, self._runner.ring_limits(config))
        else:
            if drafter is None and self._group.leads:
                drafter = make_drafter(config.speculative, self._runner.view(config, folder, eos_ids))
            self._drafts = InlineDrafts(drafter)
        self._sampler = make_choice(config.speculative)
        self._context = ProposeContext([])
        self.capacity = Capacity(
            num_blocks=self._runner.num_blocks,
            max_draft_tokens=self._drafts.max_draft_tokens,
            context_length=self._runner.context_length,
            vocab_size=vocab_size,
            eos_token_ids=eos_ids,
            reads_next_token=self._drafts.reads_next_token,
            dtype=str(self.model.embedding.weight.dtype).removeprefix("torch."),
        )

    @property
    def model(self) -> Llama:
        return self._runner.model

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target forward over known tokens and draft trees, verify, keep the accepted path."""
        if self._group.size > 1:
            self._group.broadcast_bytes(pack(plan))
        return self._execute(plan)

    def propose(self) -> None:
        """Draft for the next step; called when the step's result is on its way to the host."""
        self._drafts.submit(self._context)

    @torch.inference_mode()
    def follow(self) -> None:
        """Ranks above 0: run rank 0's plans until the group breaks."""
        while True:
            self._execute(unpack_plan(self._group.broadcast_bytes(None)))

    def close(self) -> None:
        self._group.close()

    def _execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        rows = self._rows.apply(plan)
        self._drafts.release(plan.freed_slots)
        self._context = ProposeContext([])  # of the last step; its rows may just have been freed
        if not rows:
            return StepResult(plan.step_id, [], StepTimes(time.perf_counter() - start, 0.0, 0.0, 0.0))
        batch = self._build(plan, rows)
        draft_seconds = self._drafts.seconds
        prepared = time.perf_counter()
        hidden, logits, aux_hidden_states = self._runner.forward(batch, self._drafts.aux_hidden_state_layers)
        is_sound = hidden.index_select(0, batch.last_index).isfinite().all(-1).tolist()  # also waits for the device
        forwarded = time.perf_counter()
        verify_outputs = dict(zip(batch.sampling, self._verify(batch, logits), strict=True))
        results = [self._commit(batch, i, verify_outputs.get(i), is_sound[i]) for i in range(len(rows))]
        self._context = self._draft_context(plan, batch, results, verify_outputs, aux_hidden_states)
        verified = time.perf_counter()
        times = StepTimes(prepared - start, forwarded - prepared, verified - forwarded, draft_seconds)
        return StepResult(plan.step_id, results, times, self._drafts.take_faults())

    def _build(self, plan: StepPlan, rows: list[Row]) -> InputBatch:
        num_known = count_known(plan.rows, rows)
        sampling = sampling_rows(rows, num_known)
        roots = [(rows[i].slot, rows[i].token_ids[-1]) for i in sampling]
        limits = [DraftLimit(plan.rows[i].max_draft_tokens, rows[i].max_draft_steps) for i in sampling]
        drafts = self._drafts.collect(roots, limits) if self._group.leads else DraftTree.of([])
        trees = [RowTree(*row).or_root(self.capacity.vocab_size) for row in self._agree(drafts.rows())]
        tree = DraftTree.of(trees, drafts.draft_probs)
        return build_batch(rows, num_known, sampling, tree, self._runner.device)

    def _verify(self, batch: InputBatch, logits: torch.Tensor) -> list[VerifyOutput]:
        rows = batch.sampling_rows()
        samplers, lengths = [row.sampler for row in rows], [len(row.token_ids) for row in rows]
        verify_outputs = verify(logits, batch.tree, samplers, lengths, self._sampler) if self._group.leads else None
        return [VerifyOutput(*output) for output in self._agree(verify_outputs)]

    def _commit(self, batch: InputBatch, index: int, output: VerifyOutput | None, is_sound: bool) -> RequestResult:
        """Make a row's accepted path its own: KV, length and tokens."""
        row = batch.rows[index]
        if not is_sound or (output is not None and output.is_broken):
            return RequestResult(row.slot, [], 0, None, NOT_A_NUMBER)
        row.num_computed_tokens += batch.num_known[index]
        if output is None:
            return RequestResult(row.slot, [], 0, None, None)
        self._runner.kv.commit(row.kv_slots, row.num_computed_tokens - 1, output.path)
        row.num_computed_tokens += len(output.path) - 1
        row.token_ids += output.token_ids
        num_drafts = batch.tree.num_nodes[batch.sampling.index(index)] - 1
        return RequestResult(row.slot, output.token_ids, num_drafts, output.logprobs, None)

    def _draft_context(
        self,
        plan: StepPlan,
        batch: InputBatch,
        results: list[RequestResult],
        verify_outputs: dict[int, VerifyOutput],
        aux_hidden_states: list[torch.Tensor],
    ) -> ProposeContext:
        """What the drafter is told: every sound row, and the target's features of what it computed for good."""
        sound = [i for i, result in enumerate(results) if result.error is None]
        steps = zip(plan.rows, batch.rows, strict=True)
        room = [min(step.max_draft_tokens, row.max_draft_steps) for step, row in steps]
        wanting = {i for i in sound if i in verify_outputs and room[i]}
        told = sorted(sound, key=lambda i: i not in wanting)
        kept = [batch.kept(i, verify_outputs[i].path if i in verify_outputs else [ROOT]) for i in told]
        starts = [batch.rows[i].num_computed_tokens - len(places) for i, places in zip(told, kept, strict=True)]
        rows = [batch.rows[i].draft_row(start, room[i]) for i, start in zip(told, starts, strict=True)]
        rows, unwanting = rows[: len(wanting)], rows[len(wanting) :]
        if not aux_hidden_states:
            return ProposeContext(rows, unwanting)
        places = [place for row_places in kept for place in row_places]
        index = torch.tensor(places, dtype=torch.int64, device=aux_hidden_states[0].device)
        together = torch.cat([feature.index_select(0, index) for feature in aux_hidden_states], -1)
        return ProposeContext(rows, unwanting, together)

    def _agree(self, value: Any) -> Any:
        """Rank 0's value on every rank, as plain data."""
        if self._group.size == 1:
            return value
        packed = msgpack.packb(value) if self._group.leads else None
        return msgpack.unpackb(self._group.broadcast_bytes(packed))
