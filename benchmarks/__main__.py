"""`make bench`: measures figures on this machine, prints them as one table and saves them in `benchmarks/results`.

Rows use `specray.bench` with interleaved variants. It takes tens of minutes and needs an idle machine. Each figure is
printed and saved as soon as it is measured; `--only` measures the others after an interruption.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import budget, drafters, eagle, production, quantised, results, servers, structured
from benchmarks.figure import CONCURRENCY, FULL, QUICK, Effort, Figure, Section, mt_bench_prompts, prompts_of
from specray.bench import machine
from specray.bench.command import engine_config
from specray.bench.measure import Settings
from specray.bench.prompts import load_prompts
from specray.bench.report import identical_share, speed_ratios, summarise
from specray.bench.session import Session
from specray.bench.variants import PLAIN, TRANSFORMERS
from specray.config import SpeculativeConfig
from specray.errors import SpecRayError
from specray.tables import format_table

NGRAM, SUFFIX = "ngram", "ngram-suffix"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    effort = (QUICK if options.quick else FULL)._replace(mt_bench=options.mt_bench, accept_tree=options.accept_tree)
    commit = results.commit_here()
    figures: list[Figure] = []
    saved, failed = None, False
    for section in SECTIONS:
        try:  # keep the figures of other sections if one fails
            for figure in _measured(section, effort, options.only):
                figures.append(figure)
                print(f"{figure.what}: {figure.form.format(figure.measured)}", file=sys.stderr, flush=True)
                if not options.quick:
                    saved = results.save(options.machine, [figure.result(commit)])
        except (SpecRayError, OSError) as error:
            print(f"error: {', '.join(section.names)}: {error}", file=sys.stderr)
            failed = True
    headers = ("figure", "reached", "measured", "goal")
    print(f"\n{format_table(headers, [figure.row() for figure in figures])}\n\n{machine.one_line()}")
    if saved is not None:
        print(f"saved in {saved}")
    return int(failed)


def _measured(section: Section, effort: Effort, only: set[str] | None) -> Iterator[Figure]:
    wanted = set(section.names) if only is None else only.intersection(section.names)
    return section.measure(effort, wanted) if wanted else iter(())


def exactness(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    del wanted  # both rows come from one comparison
    session = _session("float32")
    variants = [TRANSFORMERS, PLAIN, NGRAM]
    records = session.compare(variants, load_prompts(limit=effort.num_exact), Settings(max_tokens=64), progress=True)
    for variant in (PLAIN, NGRAM):
        what = f"answers equal to transformers' in float32, {effort.num_exact} prompts x 64 tokens, {variant}"
        yield Figure(what, identical_share(records, variant, TRANSFORMERS), 1.0, "{:.0%}")


def in_process(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    session = _session("bfloat16")
    if "plain" in wanted:
        yield from _against_transformers(session, effort)
    if "ngram" in wanted:
        yield from _speculation(session, effort)
    if "concurrent" in wanted:
        yield _concurrency(session, effort)


def _against_transformers(session: Session, effort: Effort) -> Iterator[Figure]:
    prompts, settings = prompts_of("chat", effort.num_chat), Settings(max_tokens=effort.max_tokens)
    records = session.compare([PLAIN, TRANSFORMERS], prompts, settings, progress=True)
    summaries = summarise(records)
    plain, yardstick = summaries[PLAIN]["all"], summaries[TRANSFORMERS]["all"]
    assert plain.host_share is not None, "the engine has steps"
    assert yardstick.ratio_to_plain is not None, "plain was measured"
    yield Figure("plain decoding, output tokens/s", plain.output_tokens_per_s, None, "{:.1f}")
    yield Figure("plain decoding / transformers' generate", 1 / yardstick.ratio_to_plain, 1.5)
    yield Figure("host share of a step, in process", plain.host_share, 0.08, "{:.1%}", at_most=True)


def _speculation(session: Session, effort: Effort) -> Iterator[Figure]:
    counts = {"copy": effort.num_copy, "code": effort.num_code, "chat": effort.num_chat}
    prompts = [prompt for category, count in counts.items() for prompt in prompts_of(category, count)]
    session.define(SUFFIX, SpeculativeConfig(algorithm="NGRAM", ngram_match_type="SUFFIX"))
    summaries = summarise(
        session.compare([PLAIN, NGRAM, SUFFIX], prompts, Settings(max_tokens=effort.max_tokens), progress=True)
    )
    for variant, match in ((NGRAM, "BFS"), (SUFFIX, "SUFFIX")):
        for category, title, bound in (
            ("copy", "copy-heavy prompts", 1.8),
            ("code", "code-like prompts", 1.3),
            ("chat", "open chat", 0.97),
        ):
            summary = summaries[variant][category]
            assert summary.ratio_to_plain is not None, "plain was measured"
            what = f"NGRAM {match} / plain, {title} (accept length {summary.accept_length:.2f})"
            yield Figure(what, summary.ratio_to_plain, bound)


def _concurrency(session: Session, effort: Effort) -> Figure:
    """Measured alternately, because one comparison has one concurrency."""
    settings = Settings(max_tokens=effort.max_tokens, ignore_eos=True)
    many = Settings(concurrency=CONCURRENCY, max_tokens=effort.max_tokens, ignore_eos=True)
    prompts = prompts_of("chat", 2 * CONCURRENCY)
    ratios = []
    for _ in range(effort.rounds):
        one = summarise(session.compare([PLAIN], prompts[:2], settings, progress=True))[PLAIN]["all"]
        all_ = summarise(session.compare([PLAIN], prompts, many, progress=True))[PLAIN]["all"]
        ratios.append(all_.output_tokens_per_s / one.output_tokens_per_s)
    return Figure.of(f"{CONCURRENCY} concurrent requests / 1, output tokens/s, plain", ratios, 5.0)


def int8(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """Measured alternately, because one comparison has one target."""
    del wanted
    usual, small = _session("bfloat16"), _session("bfloat16", quantization="int8")
    small.define(eagle.EAGLE3, eagle.served(eagle.EAGLE3))
    (prompts, data), settings = mt_bench_prompts(effort), Settings(max_tokens=effort.max_tokens)
    ratios, gains = [], []
    for number in range(effort.rounds):
        part = prompts[number :: effort.rounds]
        base = summarise(usual.compare([PLAIN], part, settings, progress=True))[PLAIN]["all"]
        records = small.compare([PLAIN, eagle.EAGLE3], part, settings, progress=True)
        mine = summarise(records)[PLAIN]["all"]
        ratios.append(mine.output_tokens_per_s / base.output_tokens_per_s)
        gains += speed_ratios(records, eagle.EAGLE3, PLAIN)
    yield Figure.of(f"int8 / bfloat16, plain decoding, {data}", ratios, 1.5)
    yield Figure.of(f"EAGLE-3 / plain, both in int8, {data}", gains, 1.5)


SECTIONS = (
    Section(("exact-ngram",), exactness),
    Section(("plain", "ngram", "concurrent"), in_process),
    *eagle.SECTIONS,
    *budget.SECTIONS,
    *drafters.SECTIONS,
    *production.SECTIONS,
    Section(("int8",), int8),
    *quantised.SECTIONS,
    *servers.SECTIONS,
    *structured.SECTIONS,
)
ROWS = [name for section in SECTIONS for name in section.names]


def _session(dtype: str, quantization: str | None = None) -> Session:
    config = engine_config(None, CONCURRENCY, dtype=dtype, quantization=quantization)
    return Session(config, progress=sys.stderr.isatty())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure the figures of the documentation.")
    add = parser.add_argument
    add("--quick", action="store_true", help="a few tokens of everything, to test the benchmark itself")
    add("--only", type=_rows, metavar="A,B", help=f"only these rows, of {', '.join(ROWS)}")
    add(
        "--mt-bench",
        type=Path,
        metavar="FILE",
        help="MT-bench's questions as JSON Lines (default: built-in prompts, which the rows then name)",
    )
    add("--accept-tree", metavar="STEPS-TOPK-N", help="tree of the accept-length rows (default: that of configs/)")
    add("--machine", metavar="NAME", help="name in benchmarks/results (default: the processor and its cores)")
    return parser


def _rows(text: str) -> set[str]:
    names = {name.strip() for name in text.split(",")}
    if unknown := names.difference(ROWS):
        raise argparse.ArgumentTypeError(f"there is no row {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
