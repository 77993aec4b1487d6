"""`specray corpus build`: texts that are quoted often, as a file for `speculative.corpora`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specray.cli.arguments import positive
from specray.config import EMBEDDED_MODEL
from specray.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tqdm import tqdm

HELP = "Make a corpus of texts that answers quote often, so that n-grams are drafted from them."
MOST_TOKENS = 10_000_000
_LINES = 1000  # tokenized at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="what to do", required=True, metavar="ACTION")
    building = actions.add_parser("build", help="make a corpus of text files", description=HELP)
    add = building.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a text in UTF-8: documentation, code, standard answers")
    add("--out", type=Path, required=True, metavar="CORPUS", help="the file to write, for speculative.corpora")
    add(
        "--model",
        default=EMBEDDED_MODEL,
        help="target, whose tokenizer is used: embedded name, folder, .gguf file or hub name (default: %(default)s)",
    )
    most = "refuse longer texts (default: %(default)s); the file has 8 bytes for each token"
    add("--max-tokens", type=positive, default=MOST_TOKENS, metavar="N", help=most)


def run(options: argparse.Namespace) -> int:
    _check_files(options.files, options.out)  # before the tokenizer is loaded, which takes seconds
    from tqdm import tqdm

    from specray.models.files import resolve_model
    from specray.models.tokenizer import load_tokenizer
    from specray.spec_decode.corpus import tokenizer_digest, write_corpus

    is_terminal = sys.stderr.isatty()
    tokenizer = load_tokenizer(resolve_model(options.model, None, "auto", progress=is_terminal, option="--model"))
    total = sum(path.stat().st_size for path in options.files)
    with tqdm(total=total, desc="tokenizing", unit="B", unit_scale=True, disable=not is_terminal) as bar:
        texts, left = [], options.max_tokens
        for path in options.files:
            texts.append(list(islice(_tokens(path, tokenizer.backend_tokenizer, bar), left + 1)))
            if (left := left - len(texts[-1])) < 0:
                raise ConfigError(
                    f"{path}: the texts have more than --max-tokens {options.max_tokens}; raise it, or name fewer files"
                )
    if not any(texts):
        raise ConfigError(f"there is no text in {', '.join(map(str, options.files))}")
    num_tokens = write_corpus(options.out, texts, tokenizer_digest(tokenizer))
    print(f"{options.out}: {num_tokens:,} tokens of {len(texts)} files, {options.out.stat().st_size / 2**20:.1f} MB")
    return 0


def _check_files(files: Sequence[Path], out: Path) -> None:
    """ConfigError for what may never end, and for an `out` that is not a file or one of the texts."""
    for path in files:
        path.stat()
        if path.is_char_device() or path.is_block_device():
            raise ConfigError(f"{path} is a device; name files of text")
        if path.resolve().is_fifo():  # unlike /dev/fd/N of a shell's <(command), which has a writer already
            raise ConfigError(f"{path} is a named pipe; name files of text")
        if out.exists() and out.samefile(path):
            raise ConfigError(f"--out {out} is one of the texts; choose another file")
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out} is not a regular file; choose another one")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ConfigError(f"--out {out}: {folder} is not a folder; choose another one")


def _tokens(path: Path, tokenizer: "Tokenizer", bar: "tqdm[Any]") -> Iterator[int]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := "".join(islice(file, _LINES)):
                yield from tokenizer.encode(lines, add_special_tokens=False).ids
                bar.update(len(lines.encode()))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None
