"""`specray train`: trains a head or draft model, or writes a token map.

torch is imported only when a command runs, so that the command line starts quickly.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specray.bench.plots import can_plot
from specray.cli.arguments import add_number, not_negative, number_above_0, number_from_0, positive, share
from specray.config import EMBEDDED_MODEL
from specray.errors import ConfigError
from specray.train.answer_options import AnswerOptions, add_answer_arguments
from specray.train.process import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from specray.train.settings import TrainSettings

HEADS = {
    "eagle3": "an EAGLE-3 head",
    "parallel": "a P-EAGLE head, which drafts all levels in one pass (PARALLEL)",
    "dflash": "a DFlash head, which drafts a block in one pass (DFLASH)",
    "dspark": "a DSpark head, which drafts a block in one pass and chooses each token by the one before (DSPARK)",
    "eagle2": "an EAGLE-2 head",
    "mtp": "an MTP layer in MiMo's layout",
}
_BLOCKS = ("dflash", "dspark")
HELP = "Train a draft head or model for any native target, or write a token map, from the target's own answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to make", required=True, metavar="KIND", dest="kind")
    for kind, method in HEADS.items():
        making = kinds.add_parser(kind, help=method, description=f"Train {method}.")
        add_answer_arguments(making)
        _add_training(making, kind)
    drafting = kinds.add_parser(
        "draft", help="a draft model made of the target's layers", description="Train a draft model (STANDALONE)."
    )
    add_answer_arguments(drafting)
    _add_training(drafting, "draft")
    mapping = kinds.add_parser(
        "token-map",
        help="ids by frequency, for speculative.token_map",
        description="Rank token ids by their frequency in the target's answers.",
    )
    add_answer_arguments(mapping)
    mapping.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON, or torch-saved if it ends in .pt"
    )
    add_number(mapping, "--size", positive, 8192, "ids kept")


def run(options: argparse.Namespace) -> int:
    keep_freed_memory()
    if options.kind == "token-map":
        return _make_token_map(options, _answers(options))
    _check_training(options)  # generating answers may take hours
    return _train(options, _answers(options))


def _check_training(options: argparse.Namespace) -> None:
    """ConfigError if no answers could make these options of training valid."""
    from specray.models.files import resolve_model
    from specray.models.registry import load_config
    from specray.train.draft_model import kept_layers
    from specray.train.export import init_head_width
    from specray.train.run_files import read_checkpoint
    from specray.train.target import check_native
    from specray.train.token_map import check_draft_vocab_size
    from specray.train.trainer import check_resumable

    settings = _settings(options)
    if options.kind == "parallel" and settings.unroll < 2:
        raise ConfigError(
            f"--unroll {settings.unroll} trains no mask, of which a P-EAGLE head has one for each level "
            "after the first; give 2 or more"
        )
    if options.kind in _BLOCKS and settings.unroll < 2:
        raise ConfigError(f"--unroll {settings.unroll} is a block of one token, which needs no block; give 2 or more")
    if settings.weight_decay and settings.optimizer != "muon":
        raise ConfigError(
            f"--weight-decay {settings.weight_decay:g} is an option of Muon; leave it out, or set --optimizer muon"
        )
    if settings.init_head and settings.start != "identity":
        raise ConfigError(f"--start {settings.start} has no effect with --init-head; leave one of them out")
    _device(options.device)
    if (saved := read_checkpoint(options.run_folder)) is not None:
        check_resumable(settings, saved, options.run_folder)
    else:
        init_head_width(settings)
    if not (options.prompts or options.self_prompts):
        return  # no answers are generated, so the trainer will say the rest at once
    name = options.model or EMBEDDED_MODEL
    config = load_config(resolve_model(name, None, "auto", progress=True))
    check_native(name, config)
    if options.kind == "draft":
        kept_layers(settings.layers, config.num_hidden_layers)
    check_draft_vocab_size(settings.draft_vocab_size, config.vocab_size)


def _answers(options: argparse.Namespace) -> Path:
    """The folder of answers, after generating missing ones if the options ask for it."""
    from specray.train.shards import read_description

    folder: Path = options.answers
    if options.from_log:
        if options.prompts or options.self_prompts:
            raise ConfigError("--from-log adds no answers to prompts; leave --prompts and --self-prompts out")
        from specray.train.from_log import add_logged

        add_logged(options.from_log, folder, options.model or EMBEDDED_MODEL)
    elif options.prompts or options.self_prompts:
        from specray.train.answers import make_answers

        make_answers(AnswerOptions.of(options))
    elif options.model is not None and (made := read_description(folder)["model"]) != options.model:
        raise ConfigError(
            f"--model {options.model}: the answers in {folder} are those of {made}; leave --model out, or give "
            "--prompts or --self-prompts and another folder"
        )
    return folder


def _add_training(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        required=True,
        dest="run_folder",
        metavar="FOLDER",
        help="folder for checkpoint, log, plot and result; the same command resumes an interrupted run",
    )
    add(
        "--tokens",
        type=positive,
        required=True,
        metavar="N",
        help="total training positions; may change when a run resumes",
    )
    add("--max-minutes", type=number_from_0, metavar="M", help="save a checkpoint and stop after M minutes")
    if kind == "draft":
        _add_draft_options(parser)
    else:
        _add_head_options(parser, kind)
    add_number(parser, "--batch-tokens", positive, 1024, "positions in a batch")
    add_number(parser, "--max-length", positive, 2048, "truncate longer sequences")
    add_number(parser, "--learning-rate", number_above_0, 1e-3, "highest learning rate", "X")
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="muon",
        help="muon applies to matrices, the rest uses AdamW (default: %(default)s)",
    )
    add_number(parser, "--weight-decay", number_from_0, 0.0, "weight decay of Muon's matrices", "X")
    add_number(parser, "--warmup", share, 0.02, "warm-up as a share of --tokens", "X")
    add_number(parser, "--decay", share, 0.25, "decay as the last share of --tokens", "X")
    add_number(parser, "--clip", number_above_0, 1.0, "maximum gradient norm", "X")
    other = {"parallel": "; it may be an EAGLE-3 head", "mtp": "; it may be an EAGLE-2 head"}.get(kind, "")
    add("--init-head", metavar="FOLDER", help=f"start from this head's weights, or a packaged one's by its name{other}")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of the arithmetic; trained weights stay float32 (default: %(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    add(
        "--seed",
        type=not_negative,
        default=0,
        help="seed of the initialization and of the data order (default: %(default)s)",
    )
    add_number(parser, "--validate-every", positive, 500_000, "in tokens")
    add_number(parser, "--checkpoint-minutes", number_from_0, 10.0, "minutes between checkpoints", "M")


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(unroll=1)  # a draft model's steps depend on each other only through KV
    add = parser.add_argument
    add(
        "--layers",
        default="4",
        metavar="N|LIST",
        help="layers of the target to keep: a number of evenly spaced ones or a list such as 0,9,29 "
        "(default: %(default)s)",
    )
    _add_train_vocab(parser)


def _add_head_options(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    steps = 5 if kind in ("parallel", *_BLOCKS) else 3
    add_number(parser, "--unroll", positive, steps, "draft steps per training step")
    add_number(
        parser, "--step-decay", number_above_0, 0.8, "weight of each draft step relative to the previous one", "X"
    )
    add_number(
        parser,
        "--total-variation",
        share,
        0.0,
        "weight of the total variation distance in the loss; the rest is cross-entropy",
        "X",
    )
    if kind in ("eagle3", "parallel", *_BLOCKS):
        add_number(parser, "--draft-vocab-size", positive, 8192, "most frequent ids the head can draft")
        add_number(
            parser,
            "--num-layers",
            positive,
            2 if kind in _BLOCKS else 1,
            "decoder layers of the head; layers that --init-head does not have start as nearly the identity",
        )
    else:
        _add_train_vocab(parser)
    if kind == "dspark":
        add_number(parser, "--markov-rank", positive, 64, "rank of the Markov rows")
    if kind == "eagle2":
        add("--bias", action="store_true", help="give fc a bias")
    add(
        "--intermediate-size",
        type=positive,
        metavar="N",
        help="width of the feed-forward (default: that of --init-head, or the target's)",
    )
    add(
        "--weights",
        choices=("bfloat16", "int8"),
        default="bfloat16",
        help="type of the matrices in the result; int8 (compressed-tensors) takes half the space (default: "
        "%(default)s)",
    )
    if kind in _BLOCKS:
        return
    add(
        "--start",
        choices=("identity", "linear"),
        default="identity",
        help="identity: fc passes the hidden state on; linear: fc is fitted by least squares (default: %(default)s)",
    )


def _add_train_vocab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-vocab",
        type=positive,
        default=8192,
        dest="draft_vocab_size",
        metavar="N",
        help="train on the N most frequent ids; serving uses all (default: %(default)s)",
    )


def _train(options: argparse.Namespace, answers: Path) -> int:
    import torch  # takes seconds, which --help does not need

    from specray.train.run_files import NO_PLOT
    from specray.train.trainer import Trainer

    if not can_plot():
        print(NO_PLOT)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = _settings(options)
    trainer = Trainer(settings, answers, options.run_folder, _device(options.device))
    if trainer.run():
        print(f"done: the {'model' if options.kind == 'draft' else 'head'} is in {options.run_folder / 'head'}")
    else:
        seen = trainer.counters.tokens
        print(f"stopped after {seen:,} of {settings.tokens:,} tokens; run the same command again to resume")
    return 0


def _settings(options: argparse.Namespace) -> "TrainSettings":
    from specray.models.files import embedded_heads, resolve_model
    from specray.train.settings import TrainSettings

    names = TrainSettings.__dataclass_fields__
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.init_head in embedded_heads():
        given["init_head"] = str(resolve_model(options.init_head, None, "auto", progress=False))
    return TrainSettings(**given)


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
