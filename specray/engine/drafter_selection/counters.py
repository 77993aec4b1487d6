"""The counters of several drafters."""

from collections.abc import Iterable

from specray.engine.stats import EngineStats
from specray.metrics import METRICS
from specray.step import DrafterUse


def name_drafters(stats: EngineStats, names: Iterable[str]) -> None:
    """Start their series at zero."""
    for metric in METRICS:
        if metric.label == "drafter" and metric.kind == "counter":
            series = stats.labelled[metric.name]
            series |= {name: 0.0 for name in names if name not in series}


def count_drafter_tree(stats: EngineStats, drafter: str, num_draft_tokens: int, num_accepted: int) -> None:
    """Count one verified tree."""
    stats.add_labelled("specray_drafter_verify_steps_total", drafter)
    stats.add_labelled("specray_drafter_draft_tokens_total", drafter, num_draft_tokens)
    stats.add_labelled("specray_drafter_accepted_tokens_total", drafter, num_accepted)


def count_drafter_use(stats: EngineStats, use: DrafterUse) -> None:
    """Count what a drafter did for a step."""
    stats.add_labelled("specray_drafter_seconds_total", use.drafter, use.seconds + use.shadow_seconds)
    stats.add_labelled("specray_drafter_faults_total", use.drafter, use.num_faults)
    stats.add_labelled("specray_shadow_trees_total", use.drafter, use.num_shadow_trees)
    stats.add_labelled("specray_shadow_draft_tokens_total", use.drafter, use.num_shadow_drafts)
    stats.add_labelled("specray_shadow_accepted_tokens_total", use.drafter, use.num_shadow_accepted)
