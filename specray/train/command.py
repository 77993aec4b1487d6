"""`specray train`: options, and from them a draft head or a token map.

Light to import, for the command line reads its options here before torch is needed. Not here: training (`trainer`),
making answers (`answers`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specray.cli.arguments import positive
from specray.errors import ConfigError
from specray.train.answer_options import AnswerOptions, add_answer_arguments

if TYPE_CHECKING:
    import torch

HELP = "Train a draft head or model for any served target, or count a token map, from answers the target writes itself."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to make", required=True, metavar="KIND", dest="kind")
    for kind, method in (("eagle3", "EAGLE-3 head"), ("eagle2", "EAGLE-2 head"), ("mtp", "MTP layer, as MiMo has it")):
        making = kinds.add_parser(kind, help=f"an {method}", description=f"Train an {method}.")
        add_answer_arguments(making)
        _add_training(making, kind)
    drafting = kinds.add_parser(
        "draft", help="a draft model out of the target's layers", description="Train a draft model (STANDALONE)."
    )
    add_answer_arguments(drafting)
    _add_training(drafting, "draft")
    mapping = kinds.add_parser(
        "token-map", help="ids by frequency, for speculative.token_map", description="Count the target's own tokens."
    )
    add_answer_arguments(mapping)
    mapping.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON, or torch-saved if it ends in .pt"
    )
    mapping.add_argument("--size", type=positive, default=8192, metavar="N", help="ids kept (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    answers = _answers(options)
    if options.kind == "token-map":
        return _make_token_map(options, answers)
    return _train(options, answers)


def _answers(options: argparse.Namespace) -> Path:
    """The folder of answers; made first, or completed, if the options say what to ask."""
    folder: Path = options.answers
    if options.prompts or options.self_prompts:
        from specray.train.answers import make_answers

        make_answers(AnswerOptions.of(options))
    return folder


def _add_training(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        required=True,
        dest="run_folder",
        metavar="FOLDER",
        help="checkpoint, log, plot and what was made; the same command goes on where it stopped",
    )
    add("--tokens", type=positive, required=True, metavar="N", help="positions to learn from in all; may change later")
    add("--max-minutes", type=float, metavar="M", help="checkpoint and stop after M minutes")
    if kind == "draft":
        _add_draft_options(parser)
    else:
        _add_head_options(parser, kind)
    add("--batch-tokens", type=positive, default=1024, metavar="N", help="positions of a batch (default: %(default)s)")
    add(
        "--max-length", type=positive, default=2048, metavar="N", help="longer sequences are cut (default: %(default)s)"
    )
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="the highest (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"), default="muon", help="muon: for the matrices (default: %(default)s)")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="of muon's matrices (default: %(default)s)")
    add("--warmup", type=float, default=0.02, metavar="X", help="share of --tokens (default: %(default)s)")
    add("--decay", type=float, default=0.25, metavar="X", help="last share of --tokens (default: %(default)s)")
    add("--clip", type=float, default=1.0, metavar="X", help="largest norm of the gradient (default: %(default)s)")
    add("--init-head", metavar="FOLDER", help="start from this head's weights")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the arithmetic; the weights that are trained stay float32 (default: %(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    add("--seed", type=int, default=0, help="of the start and of the order of the data (default: %(default)s)")
    add("--validate-every", type=positive, default=500_000, metavar="N", help="tokens (default: %(default)s)")
    add(
        "--checkpoint-minutes", type=float, default=10.0, metavar="M", help="between checkpoints (default: %(default)s)"
    )


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(unroll=1)  # a draft model has nothing of its last step but KV: every step is like the first
    add = parser.add_argument
    add(
        "--layers",
        default="4",
        metavar="N|LIST",
        help="layers of the target that are kept: so many, spaced evenly, or these, such as 0,9,29 "
        "(default: %(default)s)",
    )
    _add_train_vocab(parser)


def _add_head_options(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    add("--unroll", type=positive, default=3, metavar="N", help="draft steps trained together (default: %(default)s)")
    add(
        "--step-decay",
        type=float,
        default=0.8,
        metavar="X",
        help="weight of each step over that of the one before (default: %(default)s)",
    )
    if kind == "eagle3":
        add(
            "--draft-vocab-size",
            type=positive,
            default=8192,
            metavar="N",
            help="most frequent ids the head can draft (default: %(default)s)",
        )
    else:
        _add_train_vocab(parser)
    if kind == "eagle2":
        add("--bias", action="store_true", help="let fc have a bias")
    add("--intermediate-size", type=positive, metavar="N", help="width of the feed-forward (default: the target's)")
    add(
        "--start",
        choices=("identity", "linear"),
        default="identity",
        help="identity: fc passes the highest feature on; linear: it is fitted by least squares (default: %(default)s)",
    )


def _add_train_vocab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-vocab",
        type=positive,
        default=8192,
        dest="draft_vocab_size",
        metavar="N",
        help="most frequent ids trained on; serving uses all (default: %(default)s)",
    )


def _train(options: argparse.Namespace, answers: Path) -> int:
    import torch  # seconds that --help need not wait for

    from specray.train.settings import TrainSettings
    from specray.train.trainer import Trainer

    if options.threads:
        torch.set_num_threads(options.threads)
    names = TrainSettings.__dataclass_fields__
    settings = TrainSettings(**{name: value for name, value in vars(options).items() if name in names})
    trainer = Trainer(settings, answers, options.run_folder, _device(options.device))
    if trainer.run():
        print(f"done: the {'model' if options.kind == 'draft' else 'head'} is in {options.run_folder / 'head'}")
    else:
        seen = trainer.counters.tokens
        print(f"stopped after {seen:,} of {settings.tokens:,} tokens; run the same command again to go on")
    return 0


def _device(name: str) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch finds no GPU here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _make_token_map(options: argparse.Namespace, answers: Path) -> int:
    from specray.models.files import resolve_model
    from specray.models.registry import load_config
    from specray.train.batches import AnswerFolder
    from specray.train.token_map import frequent_ids, write_token_map

    folder = AnswerFolder(answers)
    config = load_config(resolve_model(folder.description["model"], None, "auto", progress=True))
    eos = config.eos_token_id
    forced = eos if isinstance(eos, list) else [eos] if eos is not None else []
    write_token_map(options.out, frequent_ids(folder, options.size, config.vocab_size, forced))
    print(f"wrote {options.size} ids to {options.out}")
    return 0
