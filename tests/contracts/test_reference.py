"""The references of the configuration and of the HTTP API are what the code defines."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.routing import APIRoute

from cluster.api.app import create_app
from cluster.api.reference import BODIES, fields_of, filled
from cluster.api.reference import COMMAND as API_COMMAND
from cluster.cli.reference import COMMAND, reference
from cluster.config import AppConfig

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), f"run: {COMMAND}"


def api_page() -> str:
    return (ROOT / "docs/api.md").read_text(encoding="utf-8")


def test_the_tables_of_the_api_page_are_up_to_date() -> None:
    assert api_page() == filled(api_page()), f"run: {API_COMMAND}"


@pytest.mark.parametrize("name", BODIES)
def test_the_api_page_lists_every_field(name: str) -> None:
    table = api_page().partition(f"<!-- fields {name} -->")[2].partition("<!-- end -->")[0]
    assert fields_of(BODIES[name]).keys() == BODIES[name].model_fields.keys()
    assert all(f"| `{field}` |" in table for field in BODIES[name].model_fields)


def test_the_api_page_names_every_route() -> None:
    app = create_app(SimpleNamespace(config=AppConfig(), tracer=None))  # type: ignore[arg-type]
    paths = {route.path.replace(":path", "") for route in app.routes if isinstance(route, APIRoute)}
    assert [path for path in sorted(paths) if path not in api_page()] == []
