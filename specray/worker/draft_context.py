"""The drafter's input from a step: the requests, and the hidden states of the tokens that they committed."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import DraftLimit, StepPlan
from specray.worker.step_backend import StepOutcome


def draft_context(
    table: RequestTable,
    plan: StepPlan,
    outcome: StepOutcome,
    took_part: Sequence[bool],
    missed: Collection[int],
    are_drafts_taken: bool,
) -> ProposeContext:
    """The context of the rows with finite logits, once the host has committed them.

    `took_part`: rows that had not ended before the step. The others: see ProposeContext.
    """
    batch, output, computed, replay = outcome.batch, outcome.output, outcome.computed, outcome.replay
    rows, sampling = batch.rows, set(batch.rows.sampling)
    drafting: list[DraftRequest] = []
    others: list[DraftRequest] = []
    places: list[int] = []  # places of `drafting`'s committed tokens among the step's, in order
    other_places: list[int] = []
    for row, (state, root) in enumerate(zip(rows.states, computed.roots, strict=True)):
        if not output.num_kept(row) or not took_part[row]:
            continue
        limit = useful_limit(plan.rows[row].draft_limit)
        num_before, end = rows.num_known[row] - 1, state.num_computed_tokens
        # A graph drafts for all rows or none.
        gets_drafts = row in sampling and limit.num_steps > 0 and (replay is not None or not state.has_ended)
        committed = [*range(root - num_before, root + 1), *(root + node for node in output.accepted_nodes(row))]
        request = DraftRequest(state.slot, end - len(committed), end, limit)
        (drafting if gets_drafts else others).append(request)
        (places if gets_drafts else other_places).extend(committed)

    def gather() -> Tensor:
        index = table.numbers(places + other_places)
        parts = [states.index_select(0, index) for states in computed.aux_hidden_states]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    return ProposeContext(
        table,
        drafting,
        others,
        gather if computed.aux_hidden_states else None,
        missed,
        replay if are_drafts_taken or len(drafting) == len(rows.states) else None,
        are_drafts_taken,
    )


def useful_limit(limit: DraftLimit) -> DraftLimit:
    """The limit without levels that no tree has: one of n nodes has n at most."""
    return DraftLimit(limit.num_tokens, min(limit.num_tokens, limit.num_steps))
