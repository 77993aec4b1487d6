"""The training loop: one head, one device, from a folder of answers to a served head.

A run folder holds `checkpoint.pt` (all that is needed to go on), `log.jsonl` (losses and validations), `plot.png` and
`head/` (what the engine serves, as of the last checkpoint). Not here: options (`command`), the files of a head
(`export`), what is learnt from a batch (`unroll`, `loss`).
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specray.errors import ConfigError
from specray.train.batches import AnswerFolder, BatchStream, Progress, collate
from specray.train.export import export_head, load_exported
from specray.train.heads import Eagle2Head, Eagle3Head
from specray.train.loss import soft_cross_entropy, soft_labels
from specray.train.optimizer import Optimizer, learning_rate
from specray.train.plot import plot_run
from specray.train.shards import Answer
from specray.train.target import load_target
from specray.train.token_map import frequent_ids
from specray.train.unroll import lessons, unroll
from specray.train.validation import Validation, Validator

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything a run depends on besides its data; the meaning of each is in `specray train eagle3 --help`."""

    kind: str  # eagle3 or eagle2
    tokens: int
    unroll: int = 3
    step_decay: float = 0.8
    draft_vocab_size: int = 8192
    batch_tokens: int = 2048
    max_length: int = 2048
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    warmup: float = 0.02
    decay: float = 0.25
    clip: float = 1.0
    seed: int = 0
    bias: bool = False
    start: str = "identity"
    init_head: str | None = None
    dtype: str = "auto"
    validate_every: int = 500_000
    checkpoint_minutes: float = 10.0
    max_minutes: float | None = None

    def same_run(self, other: dict[str, Any]) -> str | None:
        """The first option that must not change when a run goes on, but did."""
        return next((name for name in ("kind", "seed", "bias") if other[name] != getattr(self, name)), None)


@dataclass(slots=True)
class Counters:
    """How far a run is; in every checkpoint."""

    steps: int = 0
    tokens: int = 0  # positions that taught, those seen twice counted twice
    next_validation: int = 0
    seconds: float = 0.0


class Trainer:
    """One run. Building it loads the target and, where the run folder has one, the checkpoint."""

    def __init__(self, settings: TrainSettings, answers: Path, run: Path, device: torch.device) -> None:
        self.settings = settings
        self.run_folder = run
        self._device = device
        self._folder = AnswerFolder(answers)
        self._dtype = _resolve_dtype(settings.dtype, device)
        self.target = load_target(self._folder.description["model"], self._dtype, device, settings.max_length)
        run.mkdir(parents=True, exist_ok=True)
        saved = _read_checkpoint(run / CHECKPOINT, device)
        if saved is not None and (name := settings.same_run(saved["settings"])):
            raise ConfigError(
                f"{run / CHECKPOINT} was made with {name}={saved['settings'][name]!r}, and now it is "
                f"{getattr(settings, name)!r}; use the same option to go on, or another run folder"
            )
        self._prepare(saved)

    def run(self) -> bool:
        """Train until the budget is spent; False if --max-minutes ended it before. Ctrl-C checkpoints, then raises."""
        settings, counters = self.settings, self.counters
        began = saved_at = time.monotonic()
        with tqdm(total=settings.tokens, initial=counters.tokens, desc=settings.kind, unit="token", unit_scale=True,
                  smoothing=0.1) as bar:  # fmt: skip
            try:
                while counters.tokens < settings.tokens:
                    bar.update(self._train(next(self._stream)))
                    now = time.monotonic()
                    if counters.tokens >= counters.next_validation:
                        self._validate(bar)
                    if now - saved_at > 60 * settings.checkpoint_minutes:
                        self._save(began)
                        began = saved_at = now
                    if settings.max_minutes is not None and now - self._started > 60 * settings.max_minutes:
                        break
                    self._show(bar)
                self._validate(bar)
            finally:
                self._save(began)
        return counters.tokens >= settings.tokens

    def _prepare(self, saved: dict[str, Any] | None) -> None:
        settings = self.settings
        self._started = time.monotonic()
        torch.manual_seed(settings.seed)
        if saved is None:
            count = settings.draft_vocab_size
            ids = frequent_ids(self._folder, count, self.target.shape.vocab_size, self.target.eos_ids)
        else:
            ids = saved["draft_ids"].cpu()
        ids = ids.sort().values
        num_features = len(self._folder.feature_layers) - 1
        self.head: Eagle2Head | Eagle3Head = (
            Eagle2Head(self.target.shape, ids, settings.bias)
            if settings.kind == "eagle2"
            else Eagle3Head(self.target.shape, ids, num_features)
        )
        self.head.to(self._device)
        self.head.start_from(self.target, settings.start)
        size = self._folder.hidden_size
        # EAGLE-2 reads the final state, the last columns; EAGLE-3 all columns before.
        last = num_features * size
        self._columns = slice(last, None) if settings.kind == "eagle2" else slice(0, last)
        if saved is None and settings.init_head:
            load_exported(self.head, Path(settings.init_head))
        self._optimizer = Optimizer(self.head, settings.optimizer, settings.learning_rate)
        progress, self.counters = Progress(), Counters()
        if saved is not None:
            self.head.load_state_dict(saved["head"])
            self._optimizer.load_state_dict(saved["optimizer"])
            progress, self.counters = Progress(**saved["progress"]), Counters(**saved["counters"])
            torch.set_rng_state(saved["rng"].cpu())
        self._stream = BatchStream(self._folder, progress, settings.seed, settings.batch_tokens, settings.max_length)
        self._validator = Validator(self._folder, self.target, self._columns, settings.max_length, self._dtype)
        self._shown: dict[str, str] = {}
        self._smooth: list[Tensor] = []  # [loss, top-1 by step …] of the batches since the last log line

    def _train(self, answers: list[Answer]) -> int:
        """One step of the optimizer; the positions that taught."""
        settings, head = self.settings, self.head
        batch = collate(
            answers, self._columns, self._folder.hidden_size, settings.max_length, self._dtype, self._device
        )
        taught = lessons(batch, self._usable_ids())
        count = len(taught.final)
        if count == 0:
            return 0
        with torch.no_grad():
            labels = soft_labels(taught.final, self._label_rows())
        with self._autocast():
            steps = list(unroll(head, self.target, batch, taught, settings.unroll))
            weights = [settings.step_decay**depth for depth in range(len(steps))]
            importance = [
                torch.full((len(step.lessons),), weight / (sum(weights) * max(len(step.lessons), 1)))
                for weight, step in zip(weights, steps, strict=True)
            ]
            loss, agrees = soft_cross_entropy(
                torch.cat([step.outputs for step in steps]).to(self._dtype),
                head.output_weight.to(self._dtype),
                labels,
                torch.cat([step.lessons for step in steps]),
                torch.cat(importance).to(self._device),
            )
        loss.backward()  # type: ignore[no-untyped-call]
        rate = learning_rate(settings, self.counters.tokens)
        self._optimizer.step(rate, settings.clip)
        shares = [part.float().mean() for part in agrees.split([len(step.lessons) for step in steps])]
        self._smooth.append(torch.stack((loss.detach(), *shares)).cpu())
        self.counters.steps += 1
        self.counters.tokens += count
        return count

    def _usable_ids(self) -> Tensor:
        if not hasattr(self, "_usable"):
            self._usable = torch.zeros(self.target.shape.vocab_size, dtype=torch.bool, device=self._device)
            self._usable[self.head.draft_ids] = True
        return self._usable

    def _label_rows(self) -> Tensor:
        """The target's own output rows of the draft vocabulary."""
        if not hasattr(self, "_rows"):
            self._rows = self.target.head[self.head.draft_ids]
        return self._rows

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16)

    def _validate(self, bar: "tqdm[Any]") -> None:
        settings, counters = self.settings, self.counters
        every = settings.validate_every
        counters.next_validation = (counters.tokens // every + 1) * every
        bar.set_description(f"{settings.kind} validation")
        with self._autocast():
            figures = self._validator(self.head)
        bar.set_description(settings.kind)
        self._log(figures)
        if figures is not None:
            self._shown["accept"] = f"{figures.accept_length:.2f}"
            plot_run(self.run_folder)

    def _log(self, figures: Validation | None) -> None:
        mean = torch.stack(self._smooth).mean(0).tolist() if self._smooth else []
        self._smooth.clear()
        line = {
            "tokens": self.counters.tokens,
            "steps": self.counters.steps,
            "seconds": round(self.counters.seconds + time.monotonic() - self._started, 1),
            "learning_rate": learning_rate(self.settings, self.counters.tokens),
            "loss": round(mean[0], 4) if mean else None,
            "train_top1": [round(share, 4) for share in mean[1:]],
            "validation": figures.as_dict() if figures else None,
        }
        with (self.run_folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _show(self, bar: "tqdm[Any]") -> None:
        if not self._smooth:
            return
        recent = torch.stack(self._smooth[-20:]).mean(0).tolist()
        shares = [*recent[1:]]
        tops = "/".join(f"{share:.2f}" for share in shares)
        bar.set_postfix({"loss": f"{recent[0]:.3f}", "top1": tops, **self._shown}, refresh=False)

    def _save(self, began: float) -> None:
        """The checkpoint first, then the head that is served; both appear whole or not at all."""
        del began
        seconds = self.counters.seconds + time.monotonic() - self._started
        content = {
            "settings": asdict(self.settings),
            "draft_ids": self.head.draft_ids,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self._stream.progress),
            "counters": {**asdict(self.counters), "seconds": seconds},
            "rng": torch.get_rng_state(),
        }
        path = self.run_folder / CHECKPOINT
        unfinished = path.with_name(f".{CHECKPOINT}.tmp")
        torch.save(content, unfinished)
        os.replace(unfinished, path)
        export_head(
            self.run_folder / HEAD, self.head, self.target, self.settings, self._folder,
            {**asdict(self.counters), "seconds": seconds}, last_validation(self.run_folder),
        )  # fmt: skip


def last_validation(run: Path) -> dict[str, Any] | None:
    """The newest log line that has validation figures."""
    lines = [line for line in read_log(run) if line["validation"]]
    return lines[-1] if lines else None


def read_log(run: Path) -> Iterable[dict[str, Any]]:
    path = run / LOG
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _read_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable checkpoint ({error}); delete it to start again") from None
    return content


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it faster than float32."""
    if name == "auto":
        quick = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_has_bfloat16()
        return torch.bfloat16 if quick else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())
