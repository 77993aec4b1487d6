"""The references of the configuration and of the HTTP API are what the code defines."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.routing import APIRoute

from cluster.config import AppConfig
from docs.tools.api_reference import BODIES, LETTERS, fields_of, filled
from docs.tools.api_reference import COMMAND as API_COMMAND
from docs.tools.configuration_reference import COMMAND, reference
from specray.server.app import create_app

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), f"run: {COMMAND}"


def api_page() -> str:
    return (ROOT / "docs/api.md").read_text(encoding="utf-8")


def test_the_tables_of_the_api_page_are_up_to_date() -> None:
    assert api_page() == filled(api_page()), f"run: {API_COMMAND}"


def table_of(kind: str) -> str:
    return api_page().partition(f"<!-- {kind} -->")[2].partition("<!-- end -->")[0]


@pytest.mark.parametrize("name", BODIES)
def test_the_api_page_lists_every_field(name: str) -> None:
    """In the body's own table, or in the common one with the body's letter."""
    common = [line for line in table_of("common").splitlines() if LETTERS.get(name, "-") in line.split(" | ")[-1]]
    rows = "\n".join([table_of(f"fields {name}"), *common])
    assert fields_of(BODIES[name]).keys() == BODIES[name].model_fields.keys()
    assert [field for field in BODIES[name].model_fields if f"`{field}`" not in rows] == []


def test_the_api_page_names_every_route() -> None:
    app = create_app(SimpleNamespace(config=AppConfig(), tracer=None))  # type: ignore[arg-type]
    paths = {route.path.replace(":path", "") for route in app.routes if isinstance(route, APIRoute)}
    assert [path for path in sorted(paths) if path not in api_page()] == []
