"""Command-line arguments that several commands share."""

import argparse
import os

KEY_VARIABLE = "SPECRAY_API_KEY"


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add --api-key, whose default is the environment's key; None without either."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE),
        help=f"API key, if the server requires one (default: the environment variable {KEY_VARIABLE}, which other "
        "users of this machine cannot see)",
    )
