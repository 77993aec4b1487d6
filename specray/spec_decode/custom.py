"""Drafters named by their import path, `package.module:Class`. `drafter` has the interface that they implement."""

from importlib import import_module

from specray.config import MAX_TREE_NODES, SpeculativeConfig
from specray.errors import ConfigError

_METHODS = ("propose", "release")
_ATTRIBUTES = ("max_draft_tokens", "aux_hidden_state_layers", "reads_next_token")


def check_custom(config: SpeculativeConfig) -> None:
    """ConfigError if the class named by `algorithm` cannot be imported or has no methods of a drafter."""
    load_custom(config.algorithm or "")


def load_custom(path: str) -> type:
    """The class at an import path. Importing runs its module's code. Raises ConfigError."""
    module_name, _, class_name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise _error(path, "is not an import path", "write it as package.module:Class")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the module raises
        raise _error(
            path,
            f"cannot be imported ({type(error).__name__}: {error})",
            "correct the name, or add the folder that has the module to PYTHONPATH, on every node",
        ) from error
    loaded = getattr(module, class_name, None)
    if loaded is None:
        raise _error(path, f"does not exist: {module.__file__} has no {class_name}", "correct the name")
    if not isinstance(loaded, type):
        raise _error(path, f"is of type {type(loaded).__name__} and not a class", "name the drafter's class")
    if missing := [name for name in _METHODS if not callable(getattr(loaded, name, None))]:
        raise _error(
            path,
            f"is not a drafter, because it lacks {', '.join(missing)}",
            "implement specray.spec_decode.drafter.Drafter",
        )
    return loaded


def check_attributes(path: str, drafter: object, num_layers: int) -> None:
    """ConfigError if an attribute of a drafter is missing or invalid for a target of `num_layers`."""
    if missing := [name for name in _ATTRIBUTES if not hasattr(drafter, name)]:
        raise _error(
            path,
            f"lacks {', '.join(missing)}",
            "set it on the class or in its constructor (see specray.spec_decode.drafter)",
        )
    most, layers, reads_next_token = (getattr(drafter, name) for name in _ATTRIBUTES)
    if type(most) is not int or not 1 <= most < MAX_TREE_NODES:
        raise _error(path, f"has max_draft_tokens={most!r}", f"set it to an int from 1 to {MAX_TREE_NODES - 1}")
    if not isinstance(layers, tuple) or not all(type(layer) is int and -1 <= layer <= num_layers for layer in layers):
        raise _error(
            path, f"has aux_hidden_state_layers={layers!r}", f"set it to a tuple of ints from -1 to {num_layers}"
        )
    if type(reads_next_token) is not bool:
        raise _error(path, f"has reads_next_token={reads_next_token!r}", "set it to True or False")


def _error(path: str, reason: str, change: str) -> ConfigError:
    return ConfigError(f"speculative.algorithm={path!r} {reason}; {change}")
