"""Command-line arguments that several commands share."""

import argparse
import os
from collections.abc import Callable
from math import inf, nan
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "SPECRAY_API_KEY"


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def number_above_0(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (number := _number(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def number_from_0(text: str) -> float:
    """A finite number of at least 0."""
    if not 0 <= (number := _number(text)) < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def add_number(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    name: str,
    type: Callable[[str], float],
    default: float,
    help: str,
    metavar: str = "N",
) -> None:
    """Add an option that takes a number; its help ends with the default."""
    parser.add_argument(name, type=type, default=default, metavar=metavar, help=f"{help} (default: %(default)s)")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def server_url(text: str) -> str:
    """The address of a server, from one that may have no scheme or be that of its API, as clients of OpenAI's take."""
    url = text if "://" in text else f"http://{text}"
    if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a server, such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add --url."""
    parser.add_argument("--url", type=server_url, default=DEFAULT_URL, help="URL of the server (default: %(default)s)")


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add --api-key, whose default is the environment's key; None without either."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE),
        help=f"API key, if the server requires one (default: the environment variable {KEY_VARIABLE}, which other "
        "users of this machine cannot see)",
    )
