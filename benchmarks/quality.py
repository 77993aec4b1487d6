"""The loss of quality by each type of weights: `python -m benchmarks.quality`.

Every position of a fixed English text is predicted from the text before it, in float32 and in each other type.
Perplexity is exp of the mean negative log-likelihood. Agreement is the share of positions with the same top-1 token
as in float32 with the same weights. The text, `quality.txt`, was written for this purpose. The figures of the default
model and text are saved in `benchmarks/results`.

A GGUF file's weights are rounded already, often in the groups of 32 inputs that int4 has, so that int4 would hardly
change them. Types that round anew therefore read a copy with the channels in another order. It computes the same
function, but the weights of a group come from many groups of the file.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PretrainedConfig

from benchmarks.results import Result, commit_here, save
from specray.bench.machine import one_line
from specray.config import EMBEDDED_MODEL, EngineConfig
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.models.gguf_blocks import BLOCKS_FILE
from specray.models.registry import load_config
from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.ops.cpu.library import kernels
from specray.tables import format_table
from specray.worker.local import LocalExecutor
from specray.worker.memory_plan import kv_dtype

TEXT = Path(__file__).with_suffix(".txt")
TABLE = "Quality of types"
COLUMNS = {"perplexity": "{:.3f}", "same top-1 token as float32": "{:.1%}"}  # and the forms of their figures
WINDOW = 512  # tokens of a piece of text, which is a prompt of its own


class Case(NamedTuple):
    """A row of the table. `is_rounded_again`: the weights of a GGUF file are rounded anew, instead of kept."""

    name: str
    options: dict[str, Any]
    is_rounded_again: bool = False


REFERENCE = Case("float32", {"dtype": "float32"})
CASES = [
    Case("bfloat16", {"dtype": "bfloat16"}),
    Case("bfloat16, KV cache in int8", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    Case("auto: the GGUF file's own 4-bit blocks", {"dtype": "bfloat16", "quantization": "auto"}),
    Case("int8", {"dtype": "bfloat16", "quantization": "int8"}, is_rounded_again=True),
    Case("int4", {"dtype": "bfloat16", "quantization": "int4"}, is_rounded_again=True),
]


class Predictions(NamedTuple):
    best: Tensor  # int64 [positions]
    losses: Tensor  # float32 [positions], negative log-likelihood of the text

    @property
    def perplexity(self) -> float:
        return float(self.losses.double().mean().exp())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="embedded name, folder or .gguf file (%(default)s)")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text to predict (default: quality.txt)")
    parser.add_argument("--machine", metavar="NAME", help="name in benchmarks/results (default: the processor's)")
    options = parser.parse_args(argv)
    folder, text = resolve_model(options.model, None, "auto", progress=True), options.text.read_text(encoding="utf-8")
    # Without the CPU kernels there is no KV cache in int8.
    cases = [case for case in CASES if "kv_cache_dtype" not in case.options or kernels() is not None]
    with tqdm(desc="predicting", unit="position", leave=False) as bar:
        reference = predictions(REFERENCE, folder, text, bar)
        bar.total = (1 + len(cases)) * len(reference.best)
        figures = {REFERENCE.name: (reference.perplexity, 1.0)}
        for case in cases:
            found = predictions(case, folder, text, bar)
            figures[case.name] = found.perplexity, float((found.best == reference.best).double().mean())
    rows = [
        [name, *(form.format(value) for form, value in zip(COLUMNS.values(), values, strict=True))]
        for name, values in figures.items()
    ]
    print(format_table(("weights", *COLUMNS), rows))
    print(f"\n{len(reference.best)} positions; {one_line()}")
    if (options.model, options.text) == (EMBEDDED_MODEL, TEXT):
        print(f"saved in {save(options.machine, list(results(figures)))}")
    return 0


def results(figures: Mapping[str, Sequence[float]]) -> Iterator[Result]:
    """The cells of the documentation's table, from the values of each row."""
    commit = commit_here()
    for row, values in figures.items():
        for (column, form), value in zip(COLUMNS.items(), values, strict=True):
            yield Result(table=TABLE, row=row, column=column, value=value, form=form, commit=commit)


def predictions(case: Case, folder: Path, text: str, bar: "tqdm[Any]") -> Predictions:
    with _weights(case, folder) as model, LLM(EngineConfig(model=str(model), **case.options)) as llm:
        token_ids = torch.tensor(llm.tokenizer.encode(text, add_special_tokens=False))
        best, losses = [], []
        for window in torch.split(token_ids, WINDOW):
            logits = _logits(llm, window)[:-1]
            best.append(logits.argmax(-1))
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
            bar.update(len(logits))
        return Predictions(torch.cat(best), torch.cat(losses))


@torch.inference_mode()
def _logits(llm: LLM, token_ids: Tensor) -> Tensor:
    """float32 [T, V] after each token of one request."""
    assert isinstance(llm.engine.executor, LocalExecutor)
    model = llm.engine.executor.worker.model
    shape, places = model.shape, torch.arange(len(token_ids))
    dtype, device = kv_dtype(llm.engine.config, model.embedding.weight.dtype), torch.device("cpu")
    pool = make_pool(shape.num_layers, len(token_ids), shape.num_local_kv_heads, shape.head_dim, dtype, device)
    attend = make_backend("auto", pool, shape.num_local_heads).plan(
        AttentionBatch([len(token_ids)], [len(token_ids)], places[None], places, [(0, 0)])
    )
    hidden, _ = model(token_ids, places, attend)
    return model.logits(hidden)


@contextmanager
def _weights(case: Case, folder: Path) -> Iterator[Path]:
    """The model's folder; a reordered copy of a GGUF file's where its weights are to be rounded anew."""
    if not case.is_rounded_again or not (folder / BLOCKS_FILE).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="specray-quality-") as name:
        copy = Path(name)
        for path in folder.iterdir():
            if path.suffix != ".safetensors":
                (copy / path.name).symlink_to(path)
        weights = reordered(load_file(folder / "model.safetensors"), load_config(folder))
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        yield copy


def reordered(weights: dict[str, Tensor], config: PretrainedConfig) -> dict[str, Tensor]:
    """A Llama's weights with channels in another order: of the residual stream, feed-forwards and value heads."""
    if config.model_type != "llama":
        raise SystemExit(f"error: channels are reordered for GGUF files of llama models only, not {config.model_type}")
    generator = torch.Generator().manual_seed(0)
    stream = torch.randperm(config.hidden_size, generator=generator)
    num_heads, num_kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    result = {name: weight if name.endswith(_WRITERS) else weight[..., stream] for name, weight in weights.items()}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        inner = torch.randperm(config.intermediate_size, generator=generator)
        in_head = torch.stack([torch.randperm(dim, generator=generator) for _ in range(num_kv_heads)])
        values = _flat(in_head)
        attended = _flat(in_head.repeat_interleave(num_heads // num_kv_heads, 0))
        for part, order in (("mlp.gate_proj", inner), ("mlp.up_proj", inner), ("self_attn.v_proj", values)):
            result[f"{layer}{part}.weight"] = result[f"{layer}{part}.weight"][order]
        for part, order in (("mlp.down_proj", inner), ("self_attn.o_proj", attended)):
            result[f"{layer}{part}.weight"] = weights[f"{layer}{part}.weight"][:, order][stream]
    return {name: weight.contiguous() for name, weight in result.items()}


_WRITERS = ("mlp.down_proj.weight", "self_attn.o_proj.weight")  # matrices whose outputs are the residual stream's


def _flat(in_head: Tensor) -> Tensor:
    """Channels of all heads from those of each, int64 [heads, dim]."""
    return (in_head + in_head.shape[1] * torch.arange(len(in_head))[:, None]).flatten()


if __name__ == "__main__":
    sys.exit(main())
