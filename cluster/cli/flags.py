"""Command line flags generated from a configuration tree, and flags merged back into the tree.

`tp_size` becomes --tp-size and `speculative.num_steps` --speculative-num-steps. The tree validates the values.
"""

import argparse
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import chain
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specray.errors import ConfigError

# Names of SGLang's and vLLM's for options that have another name here.
ALIASES = {
    "model": ("--model-path",),
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "context_length": ("--max-model-len",),
    "hf_overrides": ("--json-model-override-args",),
    "mem_fraction_static": ("--mem-fraction",),
    "server.served_model_name": ("--served-model-name",),
    "server.any_model_name": ("--any-model-name",),
    "server.log_level": ("--log-level",),
    "server.tool_call_parser": ("--tool-call-parser",),
    "server.reasoning_parser": ("--reasoning-parser",),
    "server.otlp_traces_endpoint": ("--otlp-traces-endpoint",),
}

SEVERAL = {"server.served_model_name"}  # options whose flags take several values, as in vLLM, or one with commas


class Flag(NamedTuple):
    """One option of the tree."""

    path: tuple[str, ...]  # names from the root down
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        return "--" + "-".join(self.path).replace("_", "-"), *ALIASES.get(self.dotted, ())

    @property
    def types(self) -> list[Any]:
        """Types that a value may have, and the values of a Literal; without None."""
        return [kind for kind in dict.fromkeys(_alternatives(self.field.annotation)) if kind is not NoneType]

    def parse(self, text: str) -> Any:
        """A value parsed as YAML, except for options that hold only text. A list may be written with commas alone."""
        value = self._parse(text)
        if isinstance(value, str) and self.types == [list] and not value.startswith("["):
            return [part.strip() for part in value.split(",")]
        return value

    def _parse(self, text: str) -> Any:
        if text == "null" or not all(kind is str or isinstance(kind, str) for kind in self.types):
            try:
                return yaml.safe_load(text)
            except yaml.YAMLError:
                return text
        return text

    @property
    def default(self) -> str:
        """The default as YAML has it."""
        default = self.field.get_default(call_default_factory=True)
        default = list(default) if isinstance(default, tuple) else default
        return str(default).lower() if isinstance(default, bool) else "null" if default is None else str(default)

    @property
    def help(self) -> str:
        return f"{self.field.description or ''} (default: {self.default})".strip().replace("%", "%%")


def flags(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Flag]:
    """All options of the tree below `model`, in order."""
    for name, field in model.model_fields.items():
        group = _group(field)
        if group is None:
            yield Flag((*path, name), field)
        else:
            yield from flags(group, (*path, name))


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Add a flag per option, under its group's heading. Flags that are not given are absent from the namespace."""
    headings: dict[str, Any] = {}
    for flag in flags(model):
        title = flag.path[0] if len(flag.path) > 1 else "engine"
        if title not in headings:
            headings[title] = parser.add_argument_group(f"{title} options")
        _add(headings[title], flag)


def given(options: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """Values of the flags on the command line, by dotted name."""
    values = {flag.dotted: vars(options)[flag.dotted] for flag in flags(model) if flag.dotted in vars(options)}
    return {name: list(chain(*value)) if name in SEVERAL else value for name, value in values.items()}


def overridden(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` with `values`, given by dotted name, set."""
    copy = deepcopy(dict(tree))
    for dotted, value in values.items():
        *groups, name = dotted.split(".")
        part = copy
        for group in groups:
            part = part.setdefault(group, {})
            if not isinstance(part, dict):
                raise ConfigError(f"{group}={part!r} has no option {name}; make it a mapping of options")
        part[name] = value
    return copy


def _add(group: Any, flag: Flag) -> None:
    common: dict[str, Any] = {"dest": flag.dotted, "default": argparse.SUPPRESS, "help": flag.help}
    if flag.types == [bool]:
        group.add_argument(*flag.names, action=argparse.BooleanOptionalAction, **common)
    elif flag.dotted in SEVERAL:
        group.add_argument(*flag.names, nargs="+", type=flag.parse, metavar="NAME", **common)
    else:
        group.add_argument(*flag.names, type=flag.parse, metavar=_metavar(flag.types), **common)


def _metavar(types: list[Any]) -> str:
    if words := [kind for kind in types if isinstance(kind, str)]:
        return f"{{{','.join(words)}}}"
    return next((name for kind, name in ((str, "TEXT"), (float, "X"), (int, "N")) if kind in types), "YAML")


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a group of options; None for an option."""
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not NoneType]
    is_group = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)
    return kinds[0] if is_group else None


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The members of nested unions without their bounds, and a Literal's values; list for list[X]."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin is Literal:
        yield from get_args(annotation)
    elif origin is None or (isinstance(origin, type) and not get_args(annotation)):
        yield annotation
    elif origin in (list, dict, tuple, set, frozenset):
        yield origin
    else:
        for part in get_args(annotation):
            yield from _alternatives(part)
