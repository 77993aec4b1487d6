"""The training loop of one head or draft model on one device.

A run folder contains `checkpoint.pt`, `log.jsonl` (losses and validation metrics), `plot.png` and `head/` (the head of
the last checkpoint, as the engine loads it).
"""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specray.errors import ConfigError
from specray.train.batches import (
    AnswerFolder,
    BatchStream,
    Collate,
    HiddenStates,
    Progress,
    stored_hidden_states,
)
from specray.train.block_head import TrainedBlockHead
from specray.train.draft_model import TrainedDraftModel, kept_layers
from specray.train.export import export_head, init_head_ids, init_head_width, load_exported
from specray.train.heads import (
    TrainedEagle2Head,
    TrainedEagle3Head,
    TrainedHead,
    TrainedMtpHead,
    TrainedParallelHead,
)
from specray.train.hidden_states import HiddenStateComputer
from specray.train.initialization import fit_mask, is_eagle2, start_from_eagle2, start_linear
from specray.train.learner import Learner, autocast
from specray.train.process import Interrupts
from specray.train.run_files import (
    CHECKPOINT,
    LOG,
    append_log,
    cut_log,
    last_validation,
    plot_run,
    read_checkpoint,
    read_log,
    write_checkpoint,
)
from specray.train.settings import Counters, TrainSettings
from specray.train.target import Target, load_target
from specray.train.token_map import frequent_ids
from specray.train.validation import DEPTHS, Validator

HEAD = "head"
_SHOWN_STEPS = 20  # the progress bar shows the mean over these steps


class Trainer:
    """One run. The constructor loads the target and the run's checkpoint, if there is one."""

    def __init__(self, settings: TrainSettings, answers: Path, run: Path, device: torch.device) -> None:
        self._settings = settings
        self._run = run
        self._folder = AnswerFolder(answers)
        dtype = _resolve_dtype(settings.dtype, device)
        positions = settings.max_length + max(settings.unroll, DEPTHS)
        self._target = load_target(self._folder.description["model"], dtype, device, positions)
        columns = _head_columns(settings.kind, self._folder)
        source = _hidden_states(self._folder, settings.max_length)
        self._collate = Collate(columns, self._folder.hidden_size, settings.max_length, dtype, device, source)
        run.mkdir(parents=True, exist_ok=True)
        saved = read_checkpoint(run)
        if saved is not None:
            check_resumable(settings, saved, run)
            _check_same_answers(self._folder, saved["answers"], run)
        torch.manual_seed(settings.seed)
        self.head = _build_head(settings, self._folder, self._target, saved)
        if saved is None:
            self._start()
        self._learner = Learner(self.head, self._target, settings, self._collate)
        self._validator = Validator(self._folder, self._target, self._collate)
        self.counters = Counters(**saved["counters"]) if saved else Counters(tokens_before=self._tokens_before())
        cut_log(run, self.counters.all_tokens)
        progress = Progress(**saved["progress"]) if saved else Progress()
        if saved is not None:
            self._restore(saved)
        self._stream = BatchStream(self._folder, progress, settings.seed, settings.batch_tokens, settings.max_length)
        self._seen = last_validation(run)
        self._recent: list[Tensor] = []  # metrics of the steps since the last line of the log
        self._resumed_at = time.monotonic() - self.counters.seconds

    def run(self) -> bool:
        """Train for `tokens` tokens. False if --max-minutes ended the run before.

        Ctrl-C saves a checkpoint after the current step and raises KeyboardInterrupt.
        """
        counters, total = self.counters, self._settings.tokens
        clock = _Clock(self._settings)
        bar = tqdm(total=total, initial=counters.tokens, desc=self._settings.kind, unit="token", unit_scale=True)
        with bar, Interrupts() as interrupts:
            while counters.tokens < total and not clock.is_over() and not interrupts.requested:
                bar.update(self._step())
                self._show(bar)
                if counters.tokens >= min(counters.next_validation, total):
                    self._validate(bar)
                if clock.wants_checkpoint():
                    self._save()
            self._save()
            if interrupts.requested:
                raise KeyboardInterrupt
        return counters.tokens >= total

    def _tokens_before(self) -> int:
        """Training tokens of the head that this new run starts from. Copies its log to the run."""
        (self._run / LOG).unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
        if self._settings.init_head is None or not (Path(self._settings.init_head) / LOG).is_file():
            return 0
        shutil.copyfile(Path(self._settings.init_head) / LOG, self._run / LOG)
        lines = read_log(self._run)
        return int(lines[-1]["tokens"]) if lines else 0

    def _step(self) -> int:
        count, figures = self._learner.learn(next(self._stream), self._settings.rate(self.counters.tokens))
        self._recent.append(figures)
        self.counters.steps += 1
        self.counters.tokens += count
        self.counters.seconds = time.monotonic() - self._resumed_at
        return count

    def _show(self, bar: "tqdm[Any]") -> None:
        loss, *shares = torch.stack(self._recent[-_SHOWN_STEPS:]).mean(0).tolist()
        accept = {"accept": f"{self._seen['validation']['accept_length']:.2f}"} if self._seen else {}
        tops = "/".join(f"{share:.2f}" for share in shares)
        bar.set_postfix({"loss": f"{loss:.3f}", "top1": tops, **accept}, refresh=False)

    def _validate(self, bar: "tqdm[Any]") -> None:
        counters, every = self.counters, self._settings.validate_every
        counters.next_validation = (counters.tokens // every + 1) * every
        bar.set_description(f"{self._settings.kind}, validating")
        with autocast(self._collate):
            figures = self._validator(self.head)
        bar.set_description(self._settings.kind)
        loss, *shares = torch.stack(self._recent).mean(0).tolist() if self._recent else (None,)
        line = {
            **asdict(counters),
            "tokens": counters.all_tokens,
            "learning_rate": self._settings.rate(counters.tokens),
            "loss": loss,
            "train_top1": shares,
            "validation": figures.as_dict() if figures else None,
        }
        append_log(self._run, line)
        self._seen = last_validation(self._run)
        self._recent = self._recent[-1:]  # for the progress bar
        plot_run(self._run)

    def _save(self) -> None:
        """Write the checkpoint, then the exported head."""
        content = {
            "settings": asdict(self._settings),
            "answers": _identity(self._folder),
            "draft_ids": self.head.draft_ids,
            "head": self.head.state_dict(),
            "optimizer": self._learner.optimizer.state_dict(),
            "progress": asdict(self._stream.progress),
            "counters": asdict(self.counters),
            "rng": torch.get_rng_state(),
        }
        write_checkpoint(self._run, content)
        export_head(self._run / HEAD, self.head, self._target, self._settings, self._folder, self.counters, self._seen)

    def _start(self) -> None:
        if self._settings.start == "linear" and not isinstance(self.head, TrainedDraftModel):
            start_linear(self.head, self._target, self._folder, self._collate)
        has_mask = False
        if self._settings.init_head:
            source = Path(self._settings.init_head)
            if isinstance(self.head, TrainedMtpHead) and is_eagle2(source):
                start_from_eagle2(self.head, source, self._target, self._folder, self._collate)
            else:
                has_mask = load_exported(self.head, source)
        if isinstance(self.head, TrainedParallelHead) and not has_mask:
            fit_mask(self.head, self._target, self._folder, self._collate, self._settings.unroll - 1)

    def _restore(self, saved: dict[str, Any]) -> None:
        try:
            self.head.load_state_dict(saved["head"])
            self._learner.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"{self._run / CHECKPOINT} is of another version of the trainer ({why}); to continue, use another "
                f"run folder and --init-head {self._run / HEAD}"
            ) from None
        torch.set_rng_state(saved["rng"].cpu())


def check_resumable(settings: TrainSettings, saved: dict[str, Any], run: Path) -> None:
    """ConfigError if the content of the run's checkpoint does not continue with these settings."""
    if name := settings.changed(saved["settings"]):
        raise ConfigError(
            f"{run / CHECKPOINT} was made with {name}={saved['settings'][name]!r}, and now it is "
            f"{getattr(settings, name)!r}; use the same option to resume, or another run folder"
        )


class _Clock:
    """Schedules checkpoints and the end of the run by wall-clock time."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self._began = self._saved_at = time.monotonic()

    def is_over(self) -> bool:
        minutes = self._settings.max_minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def wants_checkpoint(self) -> bool:
        """True once every `checkpoint_minutes`."""
        now = time.monotonic()
        if now - self._saved_at < 60 * self._settings.checkpoint_minutes:
            return False
        self._saved_at = now
        return True


def _identity(folder: AnswerFolder) -> dict[str, Any]:
    """The description of a folder of answers, without what may change as it grows."""
    return {name: value for name, value in folder.description.items() if name != "self_prompts"}


def _check_same_answers(folder: AnswerFolder, saved: dict[str, Any], run: Path) -> None:
    """ConfigError if the checkpoint was trained on another folder: its counts of visits belong to those shards."""
    own = _identity(folder)
    if changed := [name for name in own if own[name] != saved.get(name)]:
        raise ConfigError(
            f"{run / CHECKPOINT} was trained on other answers than {folder.path} holds ({', '.join(changed)} differ); "
            f"to continue with these, use another run folder and --init-head {run / HEAD}"
        )


def _build_head(
    settings: TrainSettings, folder: AnswerFolder, target: Target, saved: dict[str, Any] | None
) -> TrainedHead | TrainedDraftModel:
    """An initialized head, as large as that of the checkpoint `saved`.

    Without one, its draft vocabulary is counted from the current answers; a head that goes on with a log keeps its own,
    because a log may have few tokens.
    """
    width = init_head_width(settings) if saved is None else _ffn_size(saved["head"])
    ffn_size = settings.intermediate_size or width or target.shape.ffn_size
    shape = replace(target.shape, ffn_size=ffn_size, num_layers=settings.num_layers)
    if saved is None:
        draft_ids = init_head_ids(settings) if folder.is_log else None
        if draft_ids is None:
            draft_ids = frequent_ids(folder, settings.draft_vocab_size, shape.vocab_size, target.eos_ids)
    else:
        draft_ids = saved["draft_ids"]
    ids = draft_ids.cpu().sort().values
    aux_layers = folder.aux_hidden_state_layers[:-1]
    head: TrainedHead | TrainedDraftModel
    match settings.kind:
        case "draft":
            head = TrainedDraftModel(target, ids, kept_layers(settings.layers, target.shape.num_layers))
        case "eagle2":
            head = TrainedEagle2Head(shape, ids, target, settings.bias)
        case "mtp":
            head = TrainedMtpHead(shape, ids, target)
        case "parallel":
            head = TrainedParallelHead(shape, ids, target, aux_layers, next(iter(target.eos_ids), 0))
        case "dflash" | "dspark":
            mask = next(iter(target.eos_ids), 0)
            head = TrainedBlockHead(shape, ids, target, aux_layers, mask, settings.unroll, settings.markov_rank)
        case _:
            head = TrainedEagle3Head(shape, ids, target, aux_layers)
    head.to(target.device)
    head.start_from(target)
    return head


def _ffn_size(weights: dict[str, Tensor]) -> int:
    return next(len(weight) for name, weight in weights.items() if name.endswith("mlp.gate_proj.weight"))


def _head_columns(kind: str, folder: AnswerFolder) -> slice:
    """The head's input columns: the final state for EAGLE-2 and MTP, all others for EAGLE-3, none for a draft model."""
    last = (len(folder.aux_hidden_state_layers) - 1) * folder.hidden_size
    own = {"eagle2": slice(last, None), "mtp": slice(last, None), "draft": slice(0, 0)}
    return own.get(kind, slice(0, last))


def _hidden_states(folder: AnswerFolder, max_length: int) -> HiddenStates:
    if folder.stores_hidden_states:
        return stored_hidden_states
    described = folder.description
    return HiddenStateComputer(described["model"], described["dtype"], described["aux_hidden_state_layers"], max_length)


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 if the hardware multiplies it faster than float32."""
    if name == "auto":
        quick = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if quick else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
