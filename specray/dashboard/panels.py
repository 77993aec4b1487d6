"""The panels of the dashboard in one table: title, description, unit and PromQL.

They read Ray's metrics (`ray_specray_…`) and not the ingress's /metrics. Each node exports the engines that run on it,
so the labels `replica` and `instance` (the node) distinguish them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

WINDOW = "$__rate_interval"  # filled in by Grafana with at least four scrape intervals
PREFIX = "ray_"  # added by Ray to each name
DRAFTER_INFO = f"{PREFIX}specray_drafter_info"
NUM_DEPTHS = 8  # deepest position shown; the EAGLE trees of configs/ end at 5

TOKENS_PER_SECOND = "suffix: tokens/s"
PER_MINUTE = "suffix: /min"

# Ray's own metrics that the panels use.
RAY_METRICS = frozenset(
    {
        "ray_node_cpu_utilization",
        "ray_node_mem_total",
        "ray_node_mem_used",
        "ray_serve_deployment_replica_healthy",
        "ray_serve_deployment_replica_starts_total",
        "ray_serve_num_http_error_requests_total",
    }
)


class Query(NamedTuple):
    """Curves: one for each series of the expression, named by `legend` with its labels filled in."""

    expression: str
    legend: str

    def over(self, window: str) -> str:
        """The expression for Prometheus, with Grafana's WINDOW replaced."""
        return self.expression.replace(WINDOW, window)

    def name(self, labels: Mapping[str, str]) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), self.legend)


class Panel(NamedTuple):
    title: str
    unit: str  # as Grafana names it
    description: str
    queries: tuple[Query, ...]
    stacked: bool = False
    is_main: bool = False  # drawn by `specray dashboard --png`
    is_number: bool = False  # shown as the last value instead of curves


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False  # others open with a click, and are not queried before


def rate(name: str, by: str, where: str = "", window: str = WINDOW) -> str:
    """Rate of one of our counters, summed by labels, which may include `drafter`."""
    each = f"rate({PREFIX}{name}{where}[{window}])"
    if "drafter" in by.split(", "):
        each = f"{each} * on (replica) group_left (drafter) ({DRAFTER_INFO} == 1)"
    return f"sum by ({by}) ({each})"


def own_rate(name: str, by: str, window: str = WINDOW) -> str:
    """Rate of a counter that has the label `drafter` itself, because an engine has several drafters."""
    return f"sum by ({by}) (rate({PREFIX}{name}[{window}]))"


def own_accept_length(by: str, window: str = WINDOW) -> str:
    """Accept length of the requests that have one of several drafters."""
    accepted, steps = "specray_drafter_accepted_tokens_total", "specray_drafter_verify_steps_total"
    return f"1 + {own_rate(accepted, by, window)} / {own_rate(steps, by, window)}"


def shadow_accept_length(by: str, window: str = WINDOW) -> str:
    """What the accept length of a shadow drafter would be if it were verified."""
    accepted, trees = "specray_shadow_accepted_tokens_total", "specray_shadow_trees_total"
    return f"1 + {own_rate(accepted, by, window)} / {own_rate(trees, by, window)}"


def gauge(name: str, by: str) -> str:
    return f"sum by ({by}) ({PREFIX}{name})"


def accept_length(by: str, window: str = WINDOW) -> str:
    return f"1 + {rate(ACCEPTED, by, window=window)} / {rate(VERIFY_STEPS, by, window=window)}"


def _conditional_acceptance(depth: int) -> str:
    """Share of drafts accepted at a depth, of those accepted at the depth before (at depth 1: of all)."""
    return f"{_accepted_at(depth)} / {_accepted_at(depth - 1) if depth > 1 else rate(DRAFTS, 'drafter')}"


def _accepted_at(depth: int) -> str:
    return rate(PER_DEPTH, "drafter", f'{{position="{depth - 1}"}}')


def _speed_up(node_cost: str) -> str:
    """Tokens per step, times the share of a step's time that a plain step would take."""
    steps = rate(STEP_SECONDS, "drafter")
    return f"({accept_length('drafter')}) * (1 - ({rate(STEP_SECONDS, 'drafter', DRAFTING)}{node_cost}) / {steps})"


def _quantiles(name: str) -> tuple[Query, ...]:
    buckets = rate(f"{name}_bucket", "le")
    return tuple(Query(f"histogram_quantile({share / 100:g}, {buckets})", f"p{share}") for share in (50, 95))


ALLOWED = "specray_draft_budget_tokens_total"
ACCEPTED = "specray_spec_decode_num_accepted_tokens_total"
DRAFTS = "specray_spec_decode_num_drafts_total"
DRAFT_TOKENS = "specray_spec_decode_num_draft_tokens_total"
GENERATED = "specray_generation_tokens_total"
PER_DEPTH = "specray_spec_decode_num_accepted_tokens_per_pos_total"
STEP_SECONDS = "specray_step_seconds_total"
STEPS = "specray_steps_total"
VERIFY_STEPS = "specray_verify_steps_total"

DRAFTING = '{phase="draft"}'
TREE_WORK = '{phase=~"forward|verify"}'
EACH_NODE_COSTS = (
    f" + {rate(STEP_SECONDS, 'drafter', TREE_WORK)} * {rate(DRAFT_TOKENS, 'drafter')}"
    f" / ({rate(DRAFT_TOKENS, 'drafter')} + {rate(VERIFY_STEPS, 'drafter')})"
)

HEALTHY_ENGINES = 'ray_serve_deployment_replica_healthy{deployment="Router"}'
FAILED = rate("specray_request_finished_total", "", '{finished_reason="error"}')

OVERVIEW = Row(
    "Overview",
    (
        Panel("Engines now", "none", "Healthy ones.", (Query(f"sum({HEALTHY_ENGINES})", "engines"),), is_number=True),
        Panel(
            "Load now",
            "none",
            "Requests that run and that wait.",
            (
                Query(gauge("specray_num_requests_running", ""), "running"),
                Query(gauge("specray_num_requests_waiting", ""), "waiting"),
            ),
            is_number=True,
        ),
        Panel(
            "Throughput",
            TOKENS_PER_SECOND,
            "Tokens emitted by all engines.",
            (Query(rate(GENERATED, ""), "tokens"),),
            is_number=True,
        ),
        Panel(
            "Accept length of all engines",
            "none",
            "Tokens emitted per verified tree, bonus included; 1 is plain decoding.",
            (Query(accept_length(""), "accept length"),),
            is_number=True,
        ),
        Panel(
            "First token, 95th percentile",
            "s",
            "From arrival in the engine.",
            _quantiles("specray_time_to_first_token_seconds")[1:],
            is_number=True,
        ),
        Panel(
            "Failed requests",
            PER_MINUTE,
            "Requests that ended with a server error.",
            (Query(f"60 * {FAILED} or vector(0)", "failed"),),
            is_number=True,
        ),
    ),
    is_open=True,
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Accept length by drafter",
            "none",
            "Tokens emitted per verified tree, bonus included; 1 is plain decoding.",
            (Query(accept_length("drafter"), "{{drafter}}"),),
            is_main=True,
        ),
        Panel(
            "Accept length by replica",
            "none",
            "The same for each engine. A replica with a lower value serves other prompts or has another draft head.",
            (Query(accept_length("drafter, replica"), "{{drafter}} {{replica}}"),),
            is_main=True,
        ),
        Panel(
            "Conditional acceptance by depth",
            "percentunit",
            "Share of draft tokens accepted at a depth, given that the one before was. Trees should end where "
            "it falls.",
            tuple(
                Query(_conditional_acceptance(depth), f"{{{{drafter}}}} depth {depth}")
                for depth in range(1, NUM_DEPTHS + 1)
            ),
            is_main=True,
        ),
        Panel(
            "Draft budget",
            "none",
            "Draft tokens for each request and step: allowed by the budget, and verified. With `budget: auto` they "
            "fall when the batch grows or drafts are refused, down to none.",
            (
                Query(f"{rate(ALLOWED, 'drafter')} / {rate(VERIFY_STEPS, 'drafter')}", "{{drafter}} allowed"),
                Query(f"{rate(DRAFT_TOKENS, 'drafter')} / {rate(VERIFY_STEPS, 'drafter')}", "{{drafter}} verified"),
            ),
            is_main=True,
        ),
        Panel(
            "Wasted verify tokens",
            TOKENS_PER_SECOND,
            "Draft tokens the target computed and refused. All but one path of a tree are wasted, and free only while "
            "the target waits for memory.",
            (Query(f"{rate(DRAFT_TOKENS, 'drafter')} - {rate(ACCEPTED, 'drafter')}", "{{drafter}}"),),
            is_main=True,
        ),
        Panel(
            "Speed-up over plain, estimated",
            "none",
            "Accept length times the share of a step's time that a plain step would take. That share is not measured, "
            "so there are two bounds: `at most` assumes that draft nodes cost the target nothing (bound by memory), "
            "`at least` that each costs as much as a token (bound by arithmetic). Drafting time counts in full, even "
            "where it overlaps with other work, and prompts computed in the same steps distort both. `specray bench` "
            "measures the speed-up.",
            (
                Query(_speed_up(""), "{{drafter}} at most"),
                Query(_speed_up(EACH_NODE_COSTS), "{{drafter}} at least"),
            ),
            is_main=True,
        ),
        Panel(
            "Tokens per second of step time",
            TOKENS_PER_SECOND,
            "Tokens emitted for each second spent in steps. Compares replicas with and without drafts if their "
            "machines, prompts and batches are equal; larger batches raise it.",
            (Query(f"{rate(GENERATED, 'drafter')} / {rate(STEP_SECONDS, 'drafter')}", "{{drafter}}"),),
        ),
    ),
    is_open=True,
)

SEVERAL_DRAFTERS = Row(
    "Several drafters",
    (
        Panel(
            "Accept length by one of several drafters",
            "none",
            "Tokens emitted per verified tree of each drafter's requests. A drafter whose requests are easier has a "
            "higher value.",
            (Query(own_accept_length("drafter"), "{{drafter}}"),),
        ),
        Panel(
            "Share of requests by drafter",
            "percentunit",
            "How requests were assigned: by name, by `default_drafter`, or by tokens per second.",
            (
                Query(
                    f"{own_rate('specray_drafter_requests_total', 'drafter')} / on () group_left () "
                    f"sum(rate({PREFIX}specray_drafter_requests_total[{WINDOW}]))",
                    "{{drafter}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Draft tokens by drafter",
            TOKENS_PER_SECOND,
            "Verified and accepted draft tokens.",
            (
                Query(own_rate("specray_drafter_draft_tokens_total", "drafter"), "{{drafter}} verified"),
                Query(own_rate("specray_drafter_accepted_tokens_total", "drafter"), "{{drafter}} accepted"),
            ),
        ),
        Panel(
            "Accept length of the shadow",
            "none",
            "What a shadow drafter's accept length would be, and that of the drafters that are verified. Promote the "
            "shadow if it stays above and drafts as fast.",
            (
                Query(shadow_accept_length("drafter"), "{{drafter}} (shadow)"),
                Query(
                    f"1 + sum(rate({PREFIX}specray_drafter_accepted_tokens_total[{WINDOW}]))"
                    f" / sum(rate({PREFIX}specray_drafter_verify_steps_total[{WINDOW}]))",
                    "verified",
                ),
            ),
        ),
        Panel(
            "Time of drafting by drafter",
            "percentunit",
            "Seconds spent drafting per second, shadow included.",
            (Query(own_rate("specray_drafter_seconds_total", "drafter"), "{{drafter}}"),),
        ),
        Panel(
            "Faults by drafter",
            PER_MINUTE,
            "Steps in which one of several drafters could not draft. The others' drafts were verified.",
            (Query(f"60 * {own_rate('specray_drafter_faults_total', 'drafter')}", "{{drafter}}"),),
        ),
    ),
)

STEP_TIME = Row(
    "Steps",
    (
        Panel(
            "Time of a step by part",
            "s",
            "Mean over all engines: the host's scheduling and text, and the ranks' preparing, target forward, "
            "verifying and drafting.",
            (
                Query(
                    f"{rate(STEP_SECONDS, 'phase')} / on () group_left () sum(rate({PREFIX}{STEPS}[{WINDOW}]))",
                    "{{phase}}",
                ),
            ),
            stacked=True,
            is_main=True,
        ),
        Panel(
            "Time of a step by replica",
            "s",
            "Mean of each engine.",
            (
                Query(
                    f"{rate(STEP_SECONDS, 'drafter, replica')} / {rate(STEPS, 'drafter, replica')}",
                    "{{drafter}} {{replica}}",
                ),
            ),
        ),
        Panel(
            "Share of time in steps",
            "percentunit",
            "1: the engine is never idle. Low values: it waits for requests.",
            (Query(rate(STEP_SECONDS, "drafter, replica"), "{{drafter}} {{replica}}"),),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "s",
            "From arrival in the engine.",
            _quantiles("specray_time_to_first_token_seconds"),
            is_main=True,
        ),
        Panel(
            "Time per output token",
            "s",
            "Mean gap between a request's tokens, counted when it ends.",
            _quantiles("specray_time_per_output_token_seconds"),
            is_main=True,
        ),
        Panel(
            "Time in queue",
            "s",
            "From arrival to the first step.",
            _quantiles("specray_request_queue_time_seconds"),
        ),
        Panel(
            "Time of a request",
            "s",
            "From arrival in the engine to the last token.",
            _quantiles("specray_e2e_request_latency_seconds"),
        ),
    ),
)

LOAD = Row(
    "Load",
    (
        Panel(
            "Tokens emitted",
            TOKENS_PER_SECOND,
            "By replica.",
            (Query(rate(GENERATED, "drafter, replica"), "{{drafter}} {{replica}}"),),
            is_main=True,
        ),
        Panel(
            "Requests",
            "none",
            "Running and waiting requests, by replica.",
            (
                Query(gauge("specray_num_requests_running", "replica"), "{{replica}} running"),
                Query(gauge("specray_num_requests_waiting", "replica"), "{{replica}} waiting"),
            ),
            is_main=True,
        ),
        Panel(
            "KV blocks",
            "percentunit",
            "Blocks of running requests, and blocks kept only for prefix reuse, which are evicted when needed.",
            (
                Query(gauge("specray_kv_cache_usage_perc", "replica"), "{{replica}} held"),
                Query(gauge("specray_kv_cache_cached_perc", "replica"), "{{replica}} cached"),
            ),
            is_main=True,
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            "Share of prompt tokens that were found in the prefix cache.",
            (
                Query(
                    f"{rate('specray_prefix_cache_hits_total', 'replica')}"
                    f" / {rate('specray_prefix_cache_queries_total', 'replica')}",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens",
            TOKENS_PER_SECOND,
            "Of admitted requests, cached ones included, by replica.",
            (Query(rate("specray_prompt_tokens_total", "replica"), "{{replica}}"),),
        ),
    ),
)

FAULTS = Row(
    "Faults",
    (
        Panel(
            "Requests ended",
            PER_MINUTE,
            "By reason: stop and length are complete answers, abort is a client that disconnected, error is a server "
            "error.",
            (
                Query(
                    f"60 * {rate('specray_request_finished_total', 'finished_reason')}",
                    "{{finished_reason}}",
                ),
            ),
            is_main=True,
        ),
        Panel(
            "Refused and preempted",
            PER_MINUTE,
            "Requests refused for a full queue (429), and running requests that were preempted for lack of KV blocks.",
            (
                Query(f"60 * {rate('specray_requests_refused_total', 'replica')}", "{{replica}} refused"),
                Query(f"60 * {rate('specray_num_preemptions_total', 'replica')}", "{{replica}} preempted"),
            ),
        ),
        Panel(
            "Suspected requests",
            PER_MINUTE,
            "Requests that an engine computed when it ended: run alone at first in the next one (suspected), and those "
            "that were given up with an error because that one ended, too.",
            (
                Query(f"60 * {rate('specray_suspect_requests_total', 'replica')}", "{{replica}} suspected"),
                Query(f"60 * {rate('specray_poison_requests_total', 'replica')}", "{{replica}} given up"),
            ),
        ),
        Panel(
            "Drafter faults",
            PER_MINUTE,
            "Steps in which drafts were missing, by reason. All reasons but `no_handshake` and `member_nan` (one of "
            "several drafters) end the drafter, and a new one is started. Steps that did not wait for late drafts are "
            "no faults: the drafter goes on.",
            (
                Query(f"60 * {rate('specray_draft_faults_total', 'kind')}", "{{kind}}"),
                Query(f"60 * {rate('specray_late_drafts_total', 'replica')}", "{{replica}} late, no fault"),
            ),
        ),
        Panel(
            "Output that is not the target's own",
            "none",
            "1 where thresholds accept tokens that the target did not sample (lossy), or acceptance is simulated.",
            (
                Query(gauge("specray_verification_is_lossy", "replica"), "{{replica}} lossy"),
                Query(gauge("specray_acceptance_is_simulated", "replica"), "{{replica}} simulated"),
            ),
        ),
        Panel(
            "HTTP errors",
            PER_MINUTE,
            "Replies with an error status, as clients saw them.",
            (
                Query(
                    f"60 * sum by (error_code) (rate(ray_serve_num_http_error_requests_total[{WINDOW}]))",
                    "{{error_code}}",
                ),
            ),
        ),
        Panel(
            "Engines",
            "none",
            "Healthy now, and started since their node joined. A start without one more healthy engine is a restart.",
            (
                Query(f"sum by (application) ({HEALTHY_ENGINES})", "{{application}} healthy"),
                Query(
                    'sum by (application) (ray_serve_deployment_replica_starts_total{deployment="Router"})',
                    "{{application}} started",
                ),
            ),
        ),
    ),
)

NODES = Row(
    "Nodes",
    (
        Panel(
            "Tokens emitted by node",
            TOKENS_PER_SECOND,
            "By the engines whose router runs there.",
            (Query(rate(GENERATED, "instance"), "{{instance}}"),),
        ),
        Panel(
            "Requests by node",
            "none",
            "Running and waiting requests.",
            (
                Query(
                    f"{gauge('specray_num_requests_running', 'instance')}"
                    f" + {gauge('specray_num_requests_waiting', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Processor use by node",
            "percentunit",
            "As reported by Ray.",
            (Query("sum by (instance) (ray_node_cpu_utilization) / 100", "{{instance}}"),),
        ),
        Panel(
            "Memory use by node",
            "percentunit",
            "As reported by Ray.",
            (Query("sum by (instance) (ray_node_mem_used) / sum by (instance) (ray_node_mem_total)", "{{instance}}"),),
        ),
    ),
)

ROWS = (OVERVIEW, SPECULATION, SEVERAL_DRAFTERS, STEP_TIME, LATENCY, LOAD, FAULTS, NODES)
