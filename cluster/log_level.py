"""The log level of an application's processes, from `server.log_level`."""

import logging
import os
from collections.abc import Iterable

VARIABLE = "SPECRAY_LOG_LEVEL"  # carries the level to ranks and drafters
_LOGGERS = ("ray.serve", "cluster", "specray")


def most_verbose(levels: Iterable[str]) -> str:
    """The level that processes shared by several applications have."""
    return min(levels, key=lambda level: logging.getLevelNamesMapping()[level.upper()])


def set_log_level(level: str) -> None:
    """Set the level of this process's loggers; `level` is a name in lower case."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("ray.serve").addFilter(_is_readable)


def _is_readable(record: logging.LogRecord) -> bool:
    """False for messages of Serve that show its objects, which tell only its developers something."""
    return " object at 0x" not in record.getMessage()


def set_log_level_from_environment() -> None:
    """Set the level that the engine passed to this process, if it passed one."""
    if level := os.environ.get(VARIABLE):
        set_log_level(level)
