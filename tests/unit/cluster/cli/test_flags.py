"""Flags are generated from the configuration tree, and their values merged into it."""

import argparse
from typing import Annotated, Literal

import pytest
from pydantic import Field

from cluster.cli.flags import add_flags, flags, given, overridden
from cluster.config import AppConfig
from specray.config import Options
from specray.errors import ConfigError


class Inner(Options):
    depth: Annotated[int, Field(ge=1)] | None = Field(None, description="How deep: 100 % of it.")


class Tree(Options):
    """Every kind of option."""

    name: str = Field("x", description="A name.")
    token: str | None = Field(None, description="Text, or nothing.")
    mode: Literal["auto", "off"] = Field("auto", description="A word.")
    window: int | Literal["auto"] = Field("auto", description="A number or a word.")
    share: float | None = Field(None, description="A share.")
    quick: bool = Field(False, description="A switch.")
    rates: list[float] = Field([], description="Numbers.")
    inner: Inner = Inner()
    optional: Inner | None = Field(None, description="A group that may be missing.")


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Tree)
    return given(parser.parse_args(arguments), Tree)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--name 12", {"name": "12"}),
        ("--token true", {"token": "true"}),
        ("--token null", {"token": None}),
        ("--mode off", {"mode": "off"}),  # YAML would read false
        ("--window 3", {"window": 3}),
        ("--window auto", {"window": "auto"}),
        ("--share 0.5", {"share": 0.5}),
        ("--quick", {"quick": True}),
        ("--no-quick", {"quick": False}),
        ("--rates [1.5,2]", {"rates": [1.5, 2]}),
        ("--rates 1.5,2", {"rates": ["1.5", "2"]}),
        ("--rates [", {"rates": "["}),  # pydantic reports the error
        ("--inner-depth 4 --name y", {"name": "y", "inner.depth": 4}),
        ("--optional-depth=2", {"optional.depth": 2}),
        ("", {}),
    ],
)
def test_values_are_parsed_as_yaml(arguments: str, expected: dict[str, object]) -> None:
    assert parsed(*arguments.split()) == expected


def test_values_override_a_copy_of_the_tree() -> None:
    tree = {"name": "a", "inner": {"depth": 1}}
    changed = overridden(tree, {"inner.depth": 2, "optional.depth": 3, "name": "b"})
    assert Tree.model_validate(changed) == Tree(name="b", inner=Inner(depth=2), optional=Inner(depth=3))
    assert tree == {"name": "a", "inner": {"depth": 1}}


def test_a_group_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="inner=3 has no option depth"):
        overridden({"inner": 3}, {"inner.depth": 2})


def test_help_has_groups_descriptions_and_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Tree)
    text = " ".join(parser.format_help().split())
    assert "engine options: --name TEXT A name. (default: x)" in text
    assert "--mode {auto,off} A word. (default: auto)" in text
    assert "--quick, --no-quick A switch. (default: false)" in text
    assert "inner options: --inner-depth N How deep: 100 % of it. (default: null)" in text


def test_every_option_of_an_application_has_unique_flags() -> None:
    names = [name for flag in flags(AppConfig) for name in flag.names]
    assert len(names) == len(set(names))
    documented = {"algorithm", "num-steps", "eagle-topk", "num-draft-tokens", "draft-model-path", "token-map"}
    assert {f"--speculative-{name}" for name in documented} <= set(names)
    assert {"--model", "--model-path", "--tp-size", "--dtype", "--page-size", "--server-drain-s"} <= set(names)


def test_every_default_can_be_set_by_its_flag() -> None:
    """Written as text and parsed again, every default has its value and type."""
    parser = argparse.ArgumentParser()
    add_flags(parser, AppConfig)
    for flag in flags(AppConfig):
        default = flag.field.get_default(call_default_factory=True)
        default = list(default) if isinstance(default, tuple) else default  # as YAML writes it
        if flag.types == [bool]:
            name = flag.names[0] if default else f"--no-{flag.names[0][2:]}"
            arguments = [name]
        else:
            arguments = [f"{flag.names[0]}={'null' if default is None else default}"]
        assert given(parser.parse_args(arguments), AppConfig) == {flag.dotted: default}
