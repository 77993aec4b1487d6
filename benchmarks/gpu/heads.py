"""The part `heads`: EAGLE-2 beside EAGLE-3 and plain decoding, one request at a time, of a real checkpoint.

The goals are the figures of SGLang's page for Llama 3.1 8B on MT-bench with one H100.
"""

import sys

from benchmarks.gpu.report import Cell, Checkpoints, Order, Report
from specray.bench.measure import Settings
from specray.bench.prompts import load_prompts
from specray.bench.report import ALL, summarise
from specray.bench.session import Session
from specray.bench.variants import PLAIN
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError

EAGLE2, EAGLE3 = "EAGLE-2", "EAGLE-3"
GOALS = {PLAIN: 158.0, EAGLE2: 244.0, EAGLE3: 373.0}  # tokens/s
HEADERS = ["variant", "tokens/s", "accept len", "x plain", "same as plain", "goal"]
MAX_TOKENS, TINY_TOKENS = 512, 8


def report(order: Order) -> Report:
    if order.checkpoints is None:
        raise ConfigError("the part `heads` measures a real checkpoint; name one with --target, --eagle2 and --eagle3")
    names, session = _session(order.checkpoints, order.device.type)
    prompts = load_prompts(order.checkpoints.prompts, 1 if order.is_tiny else None)
    settings = Settings(max_tokens=TINY_TOKENS if order.is_tiny else MAX_TOKENS, ignore_eos=order.is_tiny)
    found = summarise(session.compare(names, prompts, settings, progress=sys.stderr.isatty()))
    data = f"{len(prompts)} {'built-in prompts' if order.checkpoints.prompts is None else 'prompts of MT-bench'}"
    rows, cells = [], []
    for name in names:
        summary, goal = found[name][ALL], None if order.checkpoints.prompts is None else GOALS[name]
        rows.append(
            [
                name,
                f"{summary.output_tokens_per_s:.1f}",
                f"{summary.accept_length or 1:.2f}",
                f"{summary.ratio_to_plain or 1:.2f}",
                f"{summary.identical_to_plain or 1:.0%}",
                "" if goal is None else f">= {goal:.0f}",
            ]
        )
        title = f"Tokens a second of one request, {order.checkpoints.target}, {data}"
        cells.append(Cell(title, name, "measured", summary.output_tokens_per_s, "{:,.0f}", goal))
    return Report(HEADERS, rows, 1, f"{order.checkpoints.target}, {data}", cells)


def _session(checkpoints: Checkpoints, device: str) -> tuple[list[str], Session]:
    """(names of the variants, their session)."""
    session = Session(EngineConfig(model=checkpoints.target, device=device, max_running_requests=1))
    names = [PLAIN]
    for name, algorithm, head in ((EAGLE2, "EAGLE", checkpoints.eagle2), (EAGLE3, "EAGLE3", checkpoints.eagle3)):
        if head is not None:
            session.define(name, SpeculativeConfig(algorithm=algorithm, draft_model_path=head))
            names.append(name)
    return names, session
