"""The table of all metrics, which exporters and dashboards read; `specray.engine.stats` counts them.

Metrics are counters and not averages, so that PromQL can take rates of them: accept length = 1 + rate(accepted) /
rate(verify_steps). Acceptance at position p, given that position p - 1 was accepted, is rate(per_pos{position="p"}) /
rate(per_pos{position="p-1"}); at position 0 it is rate(per_pos{position="0"}) / rate(drafts).

`* on (replica) group_left (drafter) (ray_specray_drafter_info == 1)` adds the drafter's name as a label to any of these
in Ray's metrics. Several drafters of one engine have one joined name there; `specray_drafter_*` tell them apart.
`specray.dashboard` has the expressions.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import Literal, NamedTuple

from specray.outputs import FinishReason
from specray.step import DraftFault, StepTimes

SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metric(NamedTuple):
    """One time series family. `label` is the only label, where there is one; its values are bounded.

    `label_values` are exported as zero from the start, because a rate misses the increment that a series begins with.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    label_values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = SECONDS_BUCKETS  # upper bounds of a histogram's buckets


REASONS = tuple(reason.value for reason in FinishReason)
FAULTS = tuple(fault.value for fault in DraftFault if fault is not DraftFault.LATE)
METRICS = (
    Metric(
        "specray_drafter_info", "gauge", "1 for the drafting method in use (or none), 0 for earlier ones.", "drafter"
    ),
    Metric(
        "specray_acceptance_collapsed",
        "gauge",
        "1 while its unlimited drafts are hardly ever accepted.",
        "drafter",
    ),
    Metric(
        "specray_verification_is_lossy",
        "gauge",
        "1 if thresholds accept tokens that the target did not sample, else 0.",
    ),
    Metric(
        "specray_acceptance_is_simulated", "gauge", "1 if acceptance is simulated and the output meaningless, else 0."
    ),
    Metric("specray_cpu_kernels_absent", "gauge", "1 if a CPU computes without the CPU kernels, far slower, else 0."),
    Metric("specray_num_requests_running", "gauge", "Requests being computed."),
    Metric("specray_num_requests_waiting", "gauge", "Requests in the queue."),
    Metric("specray_kv_cache_usage_perc", "gauge", "Share of KV blocks held by running requests, 0 to 1."),
    Metric("specray_kv_cache_cached_perc", "gauge", "Share of KV blocks kept for prefix reuse only, 0 to 1."),
    Metric("specray_prompt_tokens_total", "counter", "Prompt tokens of admitted requests."),
    Metric("specray_generation_tokens_total", "counter", "Tokens emitted."),
    Metric("specray_prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("specray_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("specray_num_preemptions_total", "counter", "Number of times a running request was preempted."),
    Metric("specray_request_finished_total", "counter", "Requests ended.", "finished_reason", REASONS),
    Metric("specray_requests_refused_total", "counter", "Requests refused because the queue was full."),
    Metric(
        "specray_suspect_requests_total",
        "counter",
        "Requests that ran alone at first, because another engine had ended while it computed them.",
    ),
    Metric(
        "specray_poison_requests_total",
        "counter",
        "Requests given up with an error, because engines ended while they computed them.",
    ),
    Metric("specray_audit_requests_total", "counter", "Finished requests computed again without drafts, and compared."),
    Metric(
        "specray_audit_mismatches_total",
        "counter",
        "Audited requests whose text depended on their drafts, which is an error.",
        "drafter",
    ),
    Metric("specray_steps_total", "counter", "Engine steps."),
    Metric(
        "specray_step_seconds_total",
        "counter",
        "Time in steps, by part: host, prepare, forward, verify, draft.",
        "phase",
        ("host", *StepTimes._fields),
    ),
    Metric(
        "specray_verify_steps_total",
        "counter",
        "Trees verified, including those without drafts; one per request and step after the first token.",
    ),
    Metric(
        "specray_drafted_seconds_total",
        "counter",
        "Time of decode steps with drafts, for batch sizes whose plain steps were measured.",
    ),
    Metric(
        "specray_drafted_plain_seconds_total",
        "counter",
        "Time that plain decode steps would have taken to generate the tokens of these steps.",
    ),
    Metric("specray_draft_budget_tokens_total", "counter", "Draft tokens that steps were allowed, root not counted."),
    Metric("specray_spec_decode_num_drafts_total", "counter", "Verified trees with at least one draft token."),
    Metric("specray_spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified, root not counted."),
    Metric("specray_spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted, bonus not counted."),
    Metric(
        "specray_spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted at each depth, from 0.",
        "position",
    ),
    Metric(
        "specray_draft_faults_total",
        "counter",
        "Steps in which drafts were missing because a drafter was frozen, gone, sent invalid data or had logits that "
        "are not finite.",
        "kind",
        FAULTS,
    ),
    Metric(
        "specray_late_drafts_total",
        "counter",
        "Steps that did not wait for their drafts, because the drafter took longer than usual. It goes on.",
    ),
    # Only with several drafters.
    Metric("specray_drafter_requests_total", "counter", "Requests that were given this drafter.", "drafter"),
    Metric(
        "specray_drafter_verify_steps_total",
        "counter",
        "Steps in which requests of this drafter, without a grammar or prediction, may have drafts.",
        "drafter",
    ),
    Metric("specray_drafter_draft_tokens_total", "counter", "Draft tokens verified in these steps.", "drafter"),
    Metric("specray_drafter_accepted_tokens_total", "counter", "Draft tokens accepted in these steps.", "drafter"),
    Metric("specray_drafter_seconds_total", "counter", "Time spent in this drafter, shadow included.", "drafter"),
    Metric("specray_drafter_faults_total", "counter", "Steps in which this drafter could not draft.", "drafter"),
    Metric("specray_shadow_trees_total", "counter", "Trees of a shadow drafter compared with the text.", "drafter"),
    Metric("specray_shadow_draft_tokens_total", "counter", "Draft tokens of these trees, root not counted.", "drafter"),
    Metric(
        "specray_shadow_accepted_tokens_total",
        "counter",
        "Draft tokens of these trees that the target would have accepted.",
        "drafter",
    ),
    # Gauges, because they begin anew when another drafter becomes the shadow or the default.
    Metric(
        "specray_shadow_pair_requests",
        "gauge",
        "Finished requests whose shadow trees were compared with those verified in their place.",
        "drafter",
    ),
    Metric("specray_shadow_pair_trees", "gauge", "Trees of these requests.", "drafter"),
    Metric("specray_shadow_pair_gain", "gauge", "Accepted tokens of these trees, less those verified.", "drafter"),
    Metric("specray_shadow_pair_gain_squares", "gauge", "Sum of the squares of each request's gain.", "drafter"),
    Metric(
        "specray_shadow_gain_lower_bound",
        "gauge",
        "The accept length of the shadow is longer by at least this, with 95 % confidence; 0 while unknown.",
        "drafter",
    ),
    Metric("specray_time_to_first_token_seconds", "histogram", "From arrival in the engine to the first token."),
    Metric("specray_time_per_output_token_seconds", "histogram", "Mean gap between a finished request's tokens."),
    Metric("specray_inter_token_latency_seconds", "histogram", "Gap between a request's steps with output."),
    Metric("specray_request_queue_time_seconds", "histogram", "From arrival to the first step."),
    Metric("specray_e2e_request_latency_seconds", "histogram", "From arrival in the engine to the last token."),
    Metric("specray_request_prompt_tokens", "histogram", "Prompt tokens of a finished request.", bounds=TOKENS_BUCKETS),
    Metric(
        "specray_request_generation_tokens",
        "histogram",
        "Generated tokens of a finished request.",
        bounds=TOKENS_BUCKETS,
    ),
)


class HistogramSnapshot(NamedTuple):
    buckets: list[int]  # count of each bucket, not cumulative
    total: float
    bounds: tuple[float, ...] = SECONDS_BUCKETS

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of observations up to it), as in Prometheus."""
        bounds = (*(f"{bound:g}" for bound in self.bounds), "+Inf")
        return list(zip(bounds, accumulate(self.buckets), strict=True))


# name -> value, name -> label value -> value, or name -> histogram; plain data
Snapshot = dict[str, float | dict[str, float] | HistogramSnapshot]


def number(snapshot: Snapshot, name: str) -> float:
    """The value of a metric without a label."""
    value = snapshot[name]
    assert isinstance(value, int | float), name
    return value


def labelled(value: float | dict[str, float]) -> Iterable[tuple[str, float]]:
    """(label value, number); a metric without a label has one pair with an empty label value."""
    return value.items() if isinstance(value, dict) else [("", value)]
