"""Figures of records, as tables and JSON: medians, and sums of counts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from specray.bench.measure import Key, Record
from specray.bench.variants import PLAIN, Run, TimedReply
from specray.outputs import acceptance_per_depth, add_histograms
from specray.tables import format_table

ALL = "all"
HEADERS = ("variant", "prompts", "tok/s", "x plain", "TTFT ms", "TPOT ms", "accept len", "host share", "same as plain")


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one variant over some prompts; None where the variant does not have them."""

    output_tokens_per_s: float  # prefill included; median over runs
    ratio_to_plain: float | None  # median over pairs of runs of the same prompts
    ttft_ms: float | None
    tpot_ms: float | None
    accept_length: float | None  # tokens per verify step, bonus included
    accept_histogram: list[int]  # [k]: verified trees with drafts of which exactly k were accepted
    acceptance_per_depth: list[float]  # trees accepted to this depth, of those accepted to the one above
    host_share: float | None  # the host's share of a step's time, median over steps
    identical_to_plain: float | None  # share of answers whose tokens equal plain decoding's
    num_requests: int
    num_output_tokens: int


def summarise(records: Sequence[Record]) -> dict[str, dict[str, Summary]]:
    """variant -> category -> figures; the category `all` has all prompts."""
    plain = {record.key: record.run for record in records if record.variant == PLAIN}
    variants: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        groups = variants.setdefault(record.variant, {ALL: []})
        groups[ALL].append(record)
        groups.setdefault(record.key.category, []).append(record)
    return {
        variant: {name: _summary(group, plain) for name, group in groups.items()}
        for variant, groups in sorted_variants(variants)
    }


def identical_share(records: Sequence[Record], variant: str, base: str) -> float:
    """Share of the answers of `variant` whose tokens equal those of `base`."""
    share = _identical(_pairs(records, variant, base))
    assert share is not None, f"{variant} and {base} were compared"
    return share


def whole_speed(run: Run) -> float:
    """Output tokens/s of a whole run."""
    return run.tokens_per_s


def speed_ratios(
    records: Sequence[Record], variant: str, base: str, speed: Callable[[Run], float] = whole_speed
) -> list[float]:
    """The speed of `variant` over that of `base`, for each run of the same prompts."""
    return [speed(run) / speed(base_run) for run, base_run in _pairs(records, variant, base)]


def to_json(summaries: dict[str, dict[str, Summary]]) -> dict[str, Any]:
    """`arms.<name>` holds the figures over all prompts, and under `categories` the same for each category."""
    variants = {}
    for variant, groups in summaries.items():
        categories = {name: asdict(summary) for name, summary in groups.items() if name != ALL}
        variants[variant] = {**asdict(groups[ALL]), "categories": categories}
    return variants


def to_table(summaries: dict[str, dict[str, Summary]]) -> str:
    rows = []
    for variant, groups in summaries.items():
        names = [name for name in groups if name != ALL]
        rows += [_row(variant, name, groups[name]) for name in (names if len(names) == 1 else [*names, ALL])]
    return format_table(HEADERS, rows)


def depth_table(summaries: dict[str, dict[str, Summary]]) -> str | None:
    """Acceptance at each depth, given that the depth above was accepted; None if nothing was drafted."""
    drafting = {variant: groups[ALL] for variant, groups in summaries.items() if groups[ALL].accept_histogram}
    if not drafting:
        return None
    num_depths = max(len(summary.acceptance_per_depth) for summary in drafting.values())
    headers = ["accepted at depth, given the depth above", "trees", *(str(depth + 1) for depth in range(num_depths))]
    rows = []
    for variant, summary in drafting.items():
        shares = [f"{share:.0%}" for share in summary.acceptance_per_depth]
        rows.append([variant, str(sum(summary.accept_histogram)), *shares, *["-"] * (num_depths - len(shares))])
    return format_table(headers, rows, num_text_columns=1)


def sorted_variants(variants: dict[str, Any]) -> list[tuple[str, Any]]:
    """Plain first, then by name."""
    return sorted(variants.items(), key=lambda item: (item[0] != PLAIN, item[0]))


def _summary(records: Sequence[Record], plain: dict[Key, Run]) -> Summary:
    runs = [record.run for record in records]
    replies = [reply for run in runs for reply in run.replies]
    pairs = [(record.run, plain[record.key]) for record in records if record.key in plain]
    histogram = add_histograms(reply.usage.accept_histogram for reply in replies if reply.usage is not None)
    return Summary(
        output_tokens_per_s=median(run.tokens_per_s for run in runs),
        ratio_to_plain=_median(run.tokens_per_s / base.tokens_per_s for run, base in pairs),
        ttft_ms=_median(1000 * reply.ttft for reply in replies),
        tpot_ms=_median(1000 * reply.tpot for reply in replies if reply.tpot is not None),
        accept_length=_accept_length(replies),
        accept_histogram=histogram,
        acceptance_per_depth=acceptance_per_depth(histogram),
        host_share=_median(share for run in runs for share in run.host_shares),
        identical_to_plain=_identical(pairs),
        num_requests=len(replies),
        num_output_tokens=sum(len(reply.token_ids) for reply in replies),
    )


def _pairs(records: Sequence[Record], variant: str, base: str) -> list[tuple[Run, Run]]:
    bases = {record.key: record.run for record in records if record.variant == base}
    return [(record.run, bases[record.key]) for record in records if record.variant == variant]


def _accept_length(replies: Sequence[TimedReply]) -> float | None:
    usages = [reply.usage for reply in replies if reply.usage is not None]
    num_verify_steps = sum(usage.num_verify_steps for usage in usages)
    return 1 + sum(usage.num_accepted for usage in usages) / num_verify_steps if num_verify_steps else None


def _identical(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    same = [
        reply.token_ids == base.token_ids
        for run, base_run in pairs
        for reply, base in zip(run.replies, base_run.replies, strict=True)
    ]
    return sum(same) / len(same) if same else None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _row(variant: str, category: str, summary: Summary) -> list[str]:
    return [
        variant,
        f"{category} ({summary.num_requests})",
        f"{summary.output_tokens_per_s:.1f}",
        _cell(summary.ratio_to_plain, "{:.2f}"),
        _cell(summary.ttft_ms, "{:.0f}"),
        _cell(summary.tpot_ms, "{:.1f}"),
        _cell(summary.accept_length, "{:.2f}"),
        _cell(summary.host_share, "{:.1%}"),
        _cell(summary.identical_to_plain, "{:.0%}"),
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
