"""What a type of weights costs in quality: `python -m benchmarks.quality`.

Every position of a fixed English text is predicted from the text before it, in float32 and in each other type.
Perplexity is exp of the mean negative log-likelihood. Agreement is the share of positions with the same likeliest token
as in float32 with the same weights. The text is documentation that comes with Python (`pydoc_data.topics`).
"""

import argparse
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from specray.bench.machine import one_line
from specray.config import EMBEDDED_MODEL, EngineConfig
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.models.gguf_blocks import BLOCKS_FILE
from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.tables import format_table
from specray.worker.local import LocalExecutor

WINDOW = 1024  # positions of a piece of text


class Case(NamedTuple):
    """A row of the table. `is_rounded_again`: the weights of a GGUF file are rounded anew, instead of kept."""

    name: str
    options: dict[str, Any]
    is_rounded_again: bool = False


REFERENCE = Case("float32", {"dtype": "float32"})
CASES = [
    Case("bfloat16", {"dtype": "bfloat16"}),
    Case("auto (the file's own blocks)", {"dtype": "bfloat16", "quantization": "auto"}),
    Case("int8", {"dtype": "bfloat16", "quantization": "int8"}, is_rounded_again=True),
    Case("int4", {"dtype": "bfloat16", "quantization": "int4"}, is_rounded_again=True),
]


class Predictions(NamedTuple):
    best: Tensor  # int64 [positions]
    loss: float  # mean negative log-likelihood of the text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="embedded name, folder or .gguf file (%(default)s)")
    parser.add_argument("--windows", type=int, default=8, help=f"pieces of {WINDOW} positions (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.windows < 1:
        parser.error(f"--windows={options.windows} is not positive")
    folder = resolve_model(options.model, None, "auto", progress=True)
    with tqdm(total=options.windows * (1 + len(CASES)), desc="predicting", unit="window", leave=False) as bar:
        reference = predictions(REFERENCE, folder, options.windows, bar)
        rows = [[REFERENCE.name, f"{_perplexity(reference):.3f}", "100 %"]]
        for case in CASES:
            found = predictions(case, folder, options.windows, bar)
            agreement = (found.best == reference.best).double().mean()
            rows.append([case.name, f"{_perplexity(found):.3f}", f"{100 * agreement:.1f} %"])
    print(format_table(("weights", "perplexity", "same likeliest token as float32"), rows))
    print(f"\n{len(reference.best)} positions; {one_line()}")
    return 0


def predictions(case: Case, folder: Path, num_windows: int, bar: "tqdm[Any]") -> Predictions:
    with _weights(case, folder) as model, LLM(EngineConfig(model=str(model), **case.options)) as llm:
        token_ids = llm.tokenizer.encode(_text(), add_special_tokens=False)
        best, losses = [], []
        for first in range(0, num_windows * WINDOW, WINDOW):
            window = torch.tensor(token_ids[first : first + WINDOW + 1])
            assert len(window) == WINDOW + 1, "the text is too short"
            logits = _logits(llm, window[:-1])
            best.append(logits.argmax(-1))
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
            bar.update()
        return Predictions(torch.cat(best), float(torch.stack(losses).mean()))


@torch.inference_mode()
def _logits(llm: LLM, token_ids: Tensor) -> Tensor:
    """float32 [T, V] after each token of one request."""
    assert isinstance(llm.engine.executor, LocalExecutor)
    model = llm.engine.executor.worker.model
    shape, places = model.shape, torch.arange(len(token_ids))
    dtype, device = model.embedding.weight.dtype, torch.device("cpu")
    pool = make_pool(shape.num_layers, len(token_ids), shape.num_local_kv_heads, shape.head_dim, dtype, device)
    attend = make_backend("auto", pool, shape.num_local_heads).plan(
        AttentionBatch([len(token_ids)], [len(token_ids)], places[None], places, [(0, 0)])
    )
    hidden, _ = model(token_ids, places, attend)
    return model.logits(hidden)


@contextmanager
def _weights(case: Case, folder: Path) -> Iterator[Path]:
    """The model's folder, without the blocks of a GGUF file where weights are to be rounded anew."""
    if not case.is_rounded_again:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="specray-quality-") as name:
        for path in folder.iterdir():
            if path.name != BLOCKS_FILE:
                (Path(name) / path.name).symlink_to(path)
        yield Path(name)


def _text() -> str:
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def _perplexity(found: Predictions) -> float:
    return float(torch.tensor(found.loss).exp())


if __name__ == "__main__":
    sys.exit(main())
