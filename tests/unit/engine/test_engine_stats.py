"""After any run, the engine's metrics equal the counts of the executor and the caller."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.metrics import REASONS
from specray.outputs import RequestOutput
from tests.unit.engine.fake_executor import FakeExecutor, letters_tokenizer, request, run_to_end

CONTEXT = 40
MAX_STEPS = 1000
TOKENIZER = letters_tokenizer()


@given(
    prompts=st.lists(st.lists(st.integers(2, 3), min_size=1, max_size=30), min_size=1, max_size=8),
    accepts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    spare_blocks=st.integers(0, 8),
    aborted=st.sets(st.integers(0, 7), max_size=3),
    broken=st.sets(st.integers(0, 7), max_size=2),
    reuse=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_metrics_equal_the_executors_counts(
    prompts: list[list[int]],
    accepts: list[tuple[int, int]],
    spare_blocks: int,
    aborted: set[int],
    broken: set[int],
    reuse: bool,
) -> None:
    config = EngineConfig(page_size=4, max_running_requests=3, chunked_prefill_size=7, disable_radix_cache=not reuse)
    executor = FakeExecutor(config, CONTEXT // 4 + 1 + spare_blocks, 5, accepts, CONTEXT)
    executor.broken = broken
    engine = Engine(config, executor, TOKENIZER)
    for seed, prompt in enumerate(prompts):
        executor.max_lengths[seed] = CONTEXT
        engine.add_request(request(seed, prompt, CONTEXT - len(prompt)))
    outputs: list[RequestOutput] = []
    for _ in range(MAX_STEPS):
        outputs += engine.step()
        engine.requests.abort(f"r{seed}" for seed in aborted)
        if not engine.has_work:
            break
    engine.update_gauges()
    check(engine, executor, prompts, outputs)


def check(engine: Engine, executor: FakeExecutor, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    stats, counts = engine.stats.snapshot(), executor.counts
    preemptions = {seed: entries - 1 for seed, entries in counts.entries.items()}
    reasons = Counter(output.finish_reason.value for output in outputs if output.finish_reason)
    assert stats["specray_prompt_tokens_total"] == sum(map(len, prompts))
    # The dashboard shows it for each verified tree.
    assert stats["specray_draft_budget_tokens_total"] <= 5 * stats["specray_verify_steps_total"]
    assert stats["specray_generation_tokens_total"] == sum(len(output.token_ids) for output in outputs)
    assert stats["specray_prefix_cache_queries_total"] == sum(len(prompts[seed]) for seed in counts.cached)
    assert stats["specray_prefix_cache_hits_total"] == sum(counts.cached.values())
    assert stats["specray_steps_total"] == counts.steps
    assert stats["specray_verify_steps_total"] == counts.verifies.total()
    assert stats["specray_spec_decode_num_drafts_total"] == counts.trees
    assert stats["specray_spec_decode_num_draft_tokens_total"] == counts.drafts.total()
    assert stats["specray_spec_decode_num_accepted_tokens_total"] == counts.accepted.total()
    assert stats["specray_spec_decode_num_accepted_tokens_per_pos_total"] == dict(counts.per_position)
    assert stats["specray_request_finished_total"] == {reason: reasons[reason] for reason in REASONS}
    assert reasons.total() == len(prompts)
    for output in outputs:
        if output.finish_reason is not None:
            seed, usage = int(output.request_id[1:]), output.usage
            assert usage.num_prompt_tokens == len(prompts[seed])
            assert usage.num_cached_tokens == counts.cached.get(seed, 0)
            assert (usage.num_verify_steps, usage.num_draft_tokens) == (counts.verifies[seed], counts.drafts[seed])
            assert usage.num_accepted == counts.accepted[seed]
            assert sum(k * count for k, count in enumerate(usage.accept_histogram)) == usage.num_accepted
            assert sum(usage.accept_histogram) <= usage.num_verify_steps
            # a request aborted while preempted is not entered again
            assert usage.num_preemptions in (preemptions.get(seed, 0), preemptions.get(seed, 0) + 1)
    assert sum(stats["specray_request_queue_time_seconds"].buckets) == len(counts.cached)
    assert sum(stats["specray_e2e_request_latency_seconds"].buckets) == len(prompts)
    assert sum(stats["specray_time_to_first_token_seconds"].buckets) == len(counts.first_tokens)
    for gauge in ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc"):
        assert stats[gauge] == 0


def test_every_preemption_is_counted() -> None:
    config = EngineConfig(page_size=4, max_running_requests=3, disable_radix_cache=True)
    executor = FakeExecutor(config, CONTEXT // 4 + 1, context_length=CONTEXT)
    engine = Engine(config, executor, TOKENIZER)
    for seed in range(5):
        executor.max_lengths[seed] = CONTEXT
        engine.add_request(request(seed, [2, 3, seed + 4] * 3))
    run_to_end(engine)
    engine.update_gauges()
    num_returns = executor.counts.entries.total() - len(executor.counts.entries)
    assert engine.stats.snapshot()["specray_num_preemptions_total"] == num_returns > 0
