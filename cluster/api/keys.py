"""API keys: a file of them, and whose a key is.

A file has a line `NAME KEY` for each key, blank lines and lines that begin with # aside; a NAME may have several keys,
so that one can be replaced by another. The name is the tenant: its share of the engine, its cache, its place in the
queue. Not here: which routes need a key (`auth`).
"""

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from specray.errors import ConfigError

MIN_KEY_LENGTH = 16
MAX_FILE_BYTES = 2**20
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-~]+")  # what can stand in a header, without blanks


class _Entry(NamedTuple):
    name: str
    digest: bytes  # SHA-256 of the key


class KeyRing:
    """Keys and the names of their owners. Only digests are kept, and how long a look-up takes tells nothing of them."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """`pairs` of (name, key)."""
        self._entries = [_Entry(name, _digest(key.encode())) for name, key in pairs]

    @classmethod
    def read(cls, path: str, option: str) -> Self:
        """The keys in a file; ConfigError, which names `option` and never a key, if it cannot be used."""
        file = Path(path)
        try:
            mode = file.stat().st_mode
            text = file.read_bytes()[:MAX_FILE_BYTES].decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it has characters other than ASCII"
            raise ConfigError(f"{option}={path}: cannot be read: {why}; it has to be a text file of keys") from None
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{option}={path}: every user of this machine can open it; run chmod o-rwx on it")
        return cls(_parse(text, f"{option}={path}"))

    def owner(self, key: bytes) -> str | None:
        """The name that a key belongs to, None for no key of ours. All keys are looked at, whichever fits."""
        digest, found = _digest(key), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _parse(text: str, where: str) -> list[tuple[str, str]]:
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    pairs = [_pair(words, f"{where}, line {number}") for number, words in lines if words and words[0][0] != "#"]
    if not pairs:
        raise ConfigError(f"{where} has no key; write a line NAME KEY for each")
    if len({key for _, key in pairs}) < len(pairs):
        raise ConfigError(f"{where} has a key twice; give every line a key of its own")
    return pairs


def _pair(words: list[str], where: str) -> tuple[str, str]:
    if len(words) != 2:
        raise ConfigError(f"{where} has {len(words)} words; write NAME KEY")
    name, key = words
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name has to be 1 to 64 letters, digits, dots, underscores and dashes")
    if len(key) < MIN_KEY_LENGTH or not KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: the key of {name} has {len(key)} characters; it needs {MIN_KEY_LENGTH} or more, all printable. "
            "Make one with: openssl rand -hex 32"
        )
    return name, key
