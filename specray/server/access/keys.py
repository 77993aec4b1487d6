"""API keys: reading a key file, and looking up the owner of a key.

A key file has one line `NAME KEY` per key. Blank lines and lines that start with # are skipped. A NAME may have several
keys, so that keys can be rotated. The name is the tenant, which fair queueing and prefix cache isolation are based on.
`auth` decides which routes require a key.
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
KEY = re.compile(r"[!-~]+")  # printable ASCII without spaces


class _KeyEntry(NamedTuple):
    name: str
    digest: bytes  # SHA-256 of the key


class KeyRing:
    """Keys and the names of their owners. Stores digests only; the time of a lookup does not depend on the key."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """`pairs` of (name, key)."""
        self._entries = [_KeyEntry(name, _digest(key.encode())) for name, key in pairs]

    @classmethod
    def read(cls, path: str, option: str) -> Self:
        """Read a key file. Raise ConfigError, which names `option` and never a key, if it cannot be used."""
        file = Path(path)
        try:
            mode = file.stat().st_mode
            text = file.read_bytes()[:MAX_FILE_BYTES].decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it contains characters other than ASCII"
            raise ConfigError(f"{option}={path}: cannot be read: {reason}; provide an ASCII file of keys") from None
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{option}={path}: the file is accessible to other users; run chmod o-rwx on it")
        return cls(_parse(text, f"{option}={path}"))

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self._entries}

    def owner(self, key: bytes) -> str | None:
        """The owner of a key, or None if the key is unknown. Always compares all keys, for constant time."""
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
        raise ConfigError(f"{where} has no keys; write one line NAME KEY per key")
    if len({key for _, key in pairs}) < len(pairs):
        raise ConfigError(f"{where} has a key twice; use a different key on every line")
    return pairs


def _pair(words: list[str], where: str) -> tuple[str, str]:
    if len(words) != 2:
        raise ConfigError(f"{where} has {len(words)} words; write NAME KEY")
    name, key = words
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits, dots, underscores or dashes")
    if len(key) < MIN_KEY_LENGTH or not KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: the key of {name} has {len(key)} characters; it needs at least {MIN_KEY_LENGTH}, all "
            "printable ASCII. Generate one with: openssl rand -hex 32"
        )
    return name, key
