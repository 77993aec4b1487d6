import pytest

from specray.bench.measure import Key, Record
from specray.bench.report import depth_table, identical_share, speed_ratios, summarise, to_json, to_table
from specray.bench.variants import Run, TimedReply
from specray.outputs import RequestUsage
from specray.tables import format_table


def usage(num_verify_steps: int, num_accepted: int) -> RequestUsage:
    num_tokens = num_verify_steps + num_accepted
    histogram = (1, 0, 1) if num_accepted == 2 else (num_verify_steps,)
    return RequestUsage(1, 0, num_tokens, num_verify_steps, 9, num_accepted, 0, histogram)


def record(variant: str, chunk: int, tokens: list[int], seconds: float, counts: RequestUsage | None) -> Record:
    run = Run([TimedReply(tokens, ttft=0.1, seconds=seconds, usage=counts)], seconds, [0.1, 0.3])
    return Record(variant, Key("chat" if chunk == 0 else "copy", chunk, repeat=0, turn=0), run)


RECORDS = [
    record("ngram", 0, [1, 2, 3, 4], 0.5, usage(2, 2)),
    record("ngram", 1, [1, 2, 3, 9], 1.0, usage(4, 0)),
    record("plain", 0, [1, 2, 3, 4], 1.0, usage(4, 0)),
    record("plain", 1, [1, 2, 3, 4], 1.0, usage(4, 0)),
    record("transformers", 0, [1, 2, 3, 4], 2.0, None),
]


def test_plain_comes_first() -> None:
    assert list(summarise(RECORDS)) == ["plain", "ngram", "transformers"]


def test_figures_of_a_variant() -> None:
    ngram = summarise(RECORDS)["ngram"]
    assert ngram["chat"].output_tokens_per_s == 8.0
    assert ngram["chat"].ratio_to_plain == 2.0
    assert ngram["chat"].accept_length == 2.0
    assert ngram["chat"].ttft_ms == pytest.approx(100)
    assert ngram["chat"].tpot_ms == pytest.approx(1000 * 0.4 / 3)
    assert ngram["all"].accept_length == pytest.approx(1 + 2 / 6)
    assert ngram["all"].host_share == pytest.approx(0.2)
    assert ngram["all"].identical_to_plain == 0.5
    assert (ngram["all"].num_requests, ngram["all"].num_output_tokens) == (2, 8)


def test_acceptance_at_each_depth_is_of_all_trees_together() -> None:
    ngram = summarise(RECORDS)["ngram"]
    assert (ngram["chat"].accept_histogram, ngram["all"].accept_histogram) == ([1, 0, 1], [5, 0, 1])
    assert ngram["all"].acceptance_per_depth == pytest.approx([1 / 6, 1.0])


def test_depth_table_has_the_drafting_variants_only() -> None:
    lines = (depth_table(summarise(RECORDS)) or "").splitlines()
    assert lines[2].split() == ["|", "plain", "|", "8", "|", "0%", "|", "-", "|"]
    assert lines[3].split() == ["|", "ngram", "|", "6", "|", "17%", "|", "100%", "|"]
    assert len(lines) == 4
    assert depth_table(summarise([r for r in RECORDS if r.variant == "transformers"])) is None


def test_speeds_are_compared_run_by_run() -> None:
    assert speed_ratios(RECORDS, "ngram", "plain") == [2.0, 1.0]


def test_the_baseline_has_no_accept_length() -> None:
    assert summarise(RECORDS)["transformers"]["all"].accept_length is None


def test_without_plain_there_are_no_ratios() -> None:
    ngram = summarise([r for r in RECORDS if r.variant == "ngram"])["ngram"]["all"]
    assert (ngram.ratio_to_plain, ngram.identical_to_plain) == (None, None)


def test_variants_can_be_compared_with_any_other() -> None:
    assert identical_share([r for r in RECORDS if r.key.chunk == 0], "ngram", "transformers") == 1.0


def test_json_has_the_documented_fields() -> None:
    variants = to_json(summarise(RECORDS))
    promised = {"output_tokens_per_s", "ttft_ms", "tpot_ms", "accept_length", "host_share", "identical_to_plain"}
    assert promised <= set(variants["plain"])
    assert promised <= set(variants["plain"]["categories"]["chat"])


def test_table_has_a_row_for_each_variant_and_category() -> None:
    lines = to_table(summarise(RECORDS)).splitlines()
    assert len(lines) == 2 + 3 + 3 + 1  # a single category needs no row for all of them
    assert len({len(line) for line in lines}) == 1


def test_numbers_are_aligned_to_the_right() -> None:
    assert format_table(["a", "b"], [["x", "10"], ["yy", "9"]], num_text_columns=1) == (
        "| a  |  b |\n| -- | -: |\n| x  | 10 |\n| yy |  9 |"
    )
