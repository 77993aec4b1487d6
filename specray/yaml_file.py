"""Reading a YAML file of options, with errors that name the file and the place."""

from pathlib import Path
from typing import Any

import yaml

from specray.errors import ConfigError


def read_mapping(path: Path, content: str) -> dict[str, Any]:
    """The mapping in a YAML file. OSError if it cannot be read, ConfigError if it has no mapping.

    `content` says in errors what the file must have.
    """
    try:
        with path.open(encoding="utf-8") as file:  # a stream, so that YAML's own messages name the file
            document = yaml.safe_load(file)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} contains a {type(document).__name__}; it must be a mapping with {content}")
    return document
