"""The worker's rows: what it must remember of each slot between steps. Plans change it, verdicts extend it."""

from dataclasses import dataclass

import numpy as np
import torch

from specray.ops.sampling import SamplerRow
from specray.spec_decode.drafter import DraftRow
from specray.step import UNLIMITED, NewRequest, ScheduledRow, StepPlan


@dataclass(slots=True, eq=False)
class Row:
    """One slot's request. The KV of token p lies in pool slot `kv_slots[p]`."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int  # committed tokens whose KV is written
    kv_slots: np.ndarray  # int64 [tokens the row's blocks can hold]
    sampler: SamplerRow
    cache_salt: str
    max_draft_steps: int = UNLIMITED.num_steps

    def draft_row(self, start: int, max_steps: int) -> DraftRow:
        """The row for the drafter, after a step that computed it from position `start`."""
        return DraftRow(
            self.slot,
            self.token_ids,
            self.num_prompt_tokens,
            self.cache_salt,
            start,
            self.num_computed_tokens,
            self.kv_slots,
            self.sampler.options.seed,
            self.sampler.options.temperature,
            max_steps,
        )


class RequestTable:
    """Rows by slot."""

    def __init__(self, page_size: int, vocab_size: int, device: torch.device) -> None:
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, Row] = {}

    def apply(self, plan: StepPlan) -> list[Row]:
        """Free slots, enter new rows, extend blocks; the rows of the step, in the plan's order."""
        for slot in plan.freed_slots:
            del self._rows[slot]
        for new in plan.new_requests:
            self._rows[new.slot] = self._enter(new)
        return [self._extended(step) for step in plan.rows]

    def _enter(self, new: NewRequest) -> Row:
        sampler = SamplerRow.start(new.sampling, new.token_ids, new.num_prompt_tokens, self._vocab_size, self._device)
        slots = self._kv_slots(new.block_ids)
        return Row(
            new.slot,
            list(new.token_ids),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            slots,
            sampler,
            new.cache_salt,
            new.max_draft_steps,
        )

    def _extended(self, step: ScheduledRow) -> Row:
        row = self._rows[step.slot]
        if step.new_block_ids:
            row.kv_slots = np.concatenate((row.kv_slots, self._kv_slots(step.new_block_ids)))
        return row

    def _kv_slots(self, block_ids: list[int]) -> np.ndarray:
        blocks = np.array(block_ids, dtype=np.int64)
        return (blocks[:, None] * self._page_size + self._offsets).ravel()
