"""A configuration tree as command line flags, and flags back into the tree. Pure: the tree is all there is to know.

`tp_size` is --tp-size, `speculative.num_steps` is --speculative-num-steps; an option that is added to the tree has its
flag at once. Bounds and combinations are the tree's own business, and so are the words in which it refuses them.
"""

import argparse
from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specray.errors import ConfigError

# Names under which SGLang's and vLLM's users know an option that has another place here.
ALIASES = {
    "model": ("--model-path",),
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "context_length": ("--max-model-len",),
    "mem_fraction_static": ("--mem-fraction",),
    "server.served_model_name": ("--served-model-name",),
    "server.log_level": ("--log-level",),
}


class Flag(NamedTuple):
    """One option of the tree: its names from the root down."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        return "--" + "-".join(self.path).replace("_", "-"), *ALIASES.get(self.dotted, ())

    @property
    def types(self) -> list[Any]:
        """What a value may be: types, and the values of a Literal. null is not among them."""
        return [kind for kind in dict.fromkeys(_alternatives(self.field.annotation)) if kind is not NoneType]

    def parse(self, text: str) -> Any:
        """A value as YAML would read it; text stays text where nothing else is possible."""
        if text == "null" or not all(kind is str or isinstance(kind, str) for kind in self.types):
            try:
                return yaml.safe_load(text)
            except yaml.YAMLError:
                return text
        return text

    @property
    def help(self) -> str:
        default = self.field.get_default(call_default_factory=True)
        shown = str(default).lower() if isinstance(default, bool) else "null" if default is None else str(default)
        return f"{self.field.description or ''} (default: {shown})".strip().replace("%", "%%")


def flags(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every option of the tree below `model`, in its order."""
    for name, field in model.model_fields.items():
        group = _group(field)
        if group is None:
            yield Flag((*path, name), field)
        else:
            yield from flags(group, (*path, name))


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """A flag for each option, under its group's heading. Only flags that are given are in what the parser returns."""
    headings: dict[str, Any] = {}
    for flag in flags(model):
        title = flag.path[0] if len(flag.path) > 1 else "engine"
        if title not in headings:
            headings[title] = parser.add_argument_group(f"{title} options")
        _add(headings[title], flag)


def given(options: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """What the command line says, by dotted name."""
    said = vars(options)
    return {flag.dotted: said[flag.dotted] for flag in flags(model) if flag.dotted in said}


def overridden(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree of mappings with `values`, by dotted name, in their places."""
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
    else:
        group.add_argument(*flag.names, type=flag.parse, metavar=_metavar(flag.types), **common)


def _metavar(types: list[Any]) -> str:
    if words := [kind for kind in types if isinstance(kind, str)]:
        return f"{{{','.join(words)}}}"
    return next((name for kind, name in ((str, "TEXT"), (float, "X"), (int, "N")) if kind in types), "YAML")


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that holds options of its own, or null."""
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not NoneType]
    is_group = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)
    return kinds[0] if is_group else None


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The members of unions within unions, bounds taken off, and a Literal's values; of list[X], list."""
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
