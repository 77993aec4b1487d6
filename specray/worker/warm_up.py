"""What an engine does before it reports that it is ready, so that no request waits for it.

All CUDA graphs are captured, and steps of made-up requests compile the kernels of prompts, verification and drafts:
Triton compiles a kernel when it is called for the first time, which takes a second or more. A drafter in its own
process does the same before it connects. If it compiled kernels later, it would be dropped as frozen.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from specray.config import EngineConfig
from specray.spec_decode.propose_context import DraftRequest
from specray.step import UNLIMITED, WARM_UP_SALT, NewRequest, SamplingOptions, ScheduledRequest, StepPlan
from specray.worker.remote_drafter.wire import DraftReply, Order, RequestDelta

if TYPE_CHECKING:
    from specray.worker.worker import Worker

SLOT = 0
NUM_DECODE_STEPS = 3  # the first one has no drafts yet in graphs, and those of the last one are not verified
_GREEDY = SamplingOptions(0, 0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, [], None)
_SAMPLED = _GREEDY._replace(temperature=1.0)
_FILTERED = _SAMPLED._replace(top_p=0.9, top_k=20, min_p=0.01)
OPTIONS = (_GREEDY, _SAMPLED, _FILTERED, _FILTERED._replace(presence_penalty=0.5))

logger = logging.getLogger(__name__)


class WarmUpSizes(NamedTuple):
    """What bounds the made-up requests."""

    num_kv_slots: int  # of the pool, those of block 0 included
    context_length: int
    vocab_size: int
    max_draft_tokens: int

    def requests(self, config: EngineConfig) -> Iterator[NewRequest]:
        """A request with each of OPTIONS for each drafter, one after the other in the same slot and blocks.

        Their prompt is a chunk, or as much of it as fits. There are none if not even one token does.
        """
        behind = (1 + NUM_DECODE_STEPS) * (1 + self.max_draft_tokens)  # tokens and drafts behind the prompt
        room = min(self.context_length, self.num_kv_slots - config.page_size) - behind
        if (length := min(config.chunked_prefill_size, room)) < 1:
            return
        prompt = [place % self.vocab_size for place in range(length)]
        blocks = list(range(1, 1 - (length + behind) // -config.page_size))
        for drafter in [each.name for each in config.speculative.drafters] or [""]:
            for options in OPTIONS:
                yield NewRequest(SLOT, prompt, length, 0, blocks, options, WARM_UP_SALT, drafter=drafter)


def warm_up(worker: "Worker", config: EngineConfig) -> None:
    """Capture and time all graphs and compile all kernels, before any other step. All ranks call it together.

    On ranks above 0 it returns once graphs are captured, and `run_loop` runs the steps.
    """
    worker.prepare()
    buckets = worker.backend.measure()
    if not worker.leads or not worker.backend.compiles_kernels:
        return
    capacity, start = worker.capacity, time.perf_counter()
    sizes = WarmUpSizes(
        capacity.num_blocks * config.page_size,
        capacity.context_length,
        capacity.vocab_size,
        worker.drafts.max_draft_tokens,
    )
    freed: list[int] = []
    for new in sizes.requests(config):
        for step in range(1 + NUM_DECODE_STEPS):
            entering = [] if step else [new]
            row = ScheduledRequest(SLOT, len(new.token_ids), UNLIMITED, [])
            worker.execute(StepPlan(0, [] if step else freed, entering, [row]))
            worker.propose()
        freed = [SLOT]
    worker.execute(StepPlan(0, freed, [], []))
    worker.bucket_seconds = buckets
    logger.info("warmed up in %.1f s", time.perf_counter() - start)


def warm_up_drafter(reply: Callable[[Order], DraftReply], config: EngineConfig, sizes: WarmUpSizes) -> None:
    """Compile all kernels of a drafter. `reply` drafts for an order."""
    start = time.perf_counter()
    freed: list[int] = []
    for new in sizes.requests(config):
        known = [*new.token_ids, 0]
        order = Order(0, 0, freed, [new._replace(token_ids=known)], [], [], [], [])
        begin, end = 0, len(new.token_ids)
        for _ in range(1 + NUM_DECODE_STEPS):
            reply(order._replace(requests=[DraftRequest(SLOT, begin, end, UNLIMITED)]))
            begin, end = end, end + 1
            order = Order(0, 0, [], [], [RequestDelta(SLOT, [0], [])], [], [], [])
        freed = [SLOT]
    reply(Order(0, 0, freed, [], [], [], [], []))
    logger.info("the drafter warmed up in %.1f s", time.perf_counter() - start)
