"""Prometheus alert rules as data, and the file generated from them."""

from typing import Any, NamedTuple

import yaml

from specray.dashboard.panels import (
    DRAFTER_INFO,
    DRAFTS,
    GENERATED,
    accept_length,
    gauge,
    own_accept_length,
    own_rate,
    rate,
    shadow_accept_length,
)


class Alert(NamedTuple):
    """Fires after its expression has returned a series for the time `after`."""

    name: str
    expression: str
    after: str
    severity: str
    summary: str
    advice: str


ALERTS = (
    Alert(
        "SpecRayDraftsRefused",
        f"{accept_length('replica', window='5m')} and {gauge('specray_acceptance_collapsed', 'replica')} > 0"
        f" and {rate(DRAFTS, 'replica', window='5m')} > 0",
        "5m",
        "warning",
        "Drafts of {{ $labels.replica }} are hardly ever accepted: accept length {{ $value | printf `%.2f` }}.",
        "Plain decoding would be as fast or faster. Is the draft head the one of this target? `specray tune` finds "
        "a tree that pays, if one does; POST /admin/drafter replaces the drafter, or turns it off, while serving.",
    ),
    Alert(
        "SpecRayShadowIsBetter",
        f"{shadow_accept_length('drafter, replica', '30m')} > on (replica) group_left () "
        f"1.05 * ({own_accept_length('replica', '30m')})"
        f" and {own_rate('specray_shadow_trees_total', 'drafter, replica', '30m')} > 0.2",
        "15m",
        "info",
        "The shadow drafter {{ $labels.drafter }} of {{ $labels.replica }} would be accepted more: accept length "
        "{{ $value | printf `%.2f` }}, 5 % above that of the drafters in use.",
        'If it drafts as fast (panel "Time of drafting by drafter"), give it to all requests: POST /admin/drafter with '
        '{"action": "promote", "name": "..."}.',
    ),
    Alert(
        "SpecRayQueueLong",
        f"{gauge('specray_num_requests_waiting', 'replica')} > {gauge('specray_num_requests_running', 'replica')}",
        "5m",
        "warning",
        "More requests wait for {{ $labels.replica }} than it computes.",
        "A new request waits for a whole batch to end. Add replicas, or raise max_running_requests if KV blocks are "
        "free.",
    ),
    Alert(
        "SpecRayRefusing",
        f"{rate('specray_requests_refused_total', 'replica', window='5m')} > 0",
        "1m",
        "warning",
        "{{ $labels.replica }} refuses requests because its queue is full.",
        "Clients get 429. Add replicas, or raise max_queued_requests if they can wait.",
    ),
    Alert(
        "SpecRayStalled",
        f"{gauge('specray_num_requests_running', 'replica')} > 0 and {rate(GENERATED, 'replica', window='2m')} == 0",
        "1m",
        "critical",
        "{{ $labels.replica }} has running requests and has emitted no token for minutes.",
        "A rank hangs, or a prompt takes that long. See the log of the ranks.",
    ),
    Alert(
        "SpecRayErrors",
        f"""{rate("specray_request_finished_total", "replica", '{finished_reason="error"}', window="5m")} > 0""",
        "0m",
        "critical",
        "Requests on {{ $labels.replica }} end with an error of ours.",
        "The router's log has the reason.",
    ),
    Alert(
        "SpecRayNoEngine",
        f"count by (application) ({DRAFTER_INFO} offset 10m) unless count by (application) ({DRAFTER_INFO})",
        "1m",
        "critical",
        "{{ $labels.application }} had an engine ten minutes ago and has none now.",
        "It was shut down, or cannot start again; `serve status` shows the reason.",
    ),
)


HEADER = "# Made by `specray dashboard --write`; edits here would be lost.\n"


def rules_yaml() -> str:
    """The file's text; deterministic."""
    rules = [_rule(alert) for alert in ALERTS]
    return HEADER + yaml.safe_dump({"groups": [{"name": "specray", "rules": rules}]}, sort_keys=False, width=120)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.after,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.advice},
    }
