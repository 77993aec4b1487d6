"""The page's files: headers, keys, the switch that turns it off, and what the files may contain."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from specray.server.routes.page import FILES, FOLDER
from tests.support.scripted_server import Serve

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}


def test_every_file_is_served_with_a_strict_policy(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            for path, (name, media_type) in FILES.items():
                reply = await server.http.get(path)
                assert reply.status_code == 200
                assert reply.text == TEXTS[name]
                assert reply.headers["content-type"].startswith(media_type)
                assert reply.headers["x-content-type-options"] == "nosniff"
                policy = reply.headers["content-security-policy"].split("; ")
                assert policy[0] == "default-src 'none'"
                assert "require-trusted-types-for 'script'" in policy
                assert not re.search(r"unsafe|https?:|data:|\*", reply.headers["content-security-policy"])
                head = await server.http.head(path)
                assert (head.status_code, head.content) == (200, b"")

    asyncio.run(scenario())


def test_the_page_needs_no_key_and_its_data_does(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {'a' * 32}\n")
    keys.chmod(0o600)

    async def scenario() -> None:
        async with serve(server={"api_key_file": str(keys)}) as server:
            assert {(await server.http.get(path)).status_code for path in FILES} == {200}
            for path in (
                "/metrics",
                "/v1/speculation/capabilities",
                "/page",
                "/page/",
                "/page/none",
                "/page/page.css/x",
            ):
                assert (await server.http.get(path)).status_code == 401, path
            assert (await server.http.post("/v1/chat/completions", json={})).status_code == 401

    asyncio.run(scenario())


def test_the_page_can_be_turned_off(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {'a' * 32}\n")
    keys.chmod(0o600)

    async def scenario(options: dict[str, object], status: int) -> None:
        async with serve(server={"ui": False} | options) as server:
            assert {(await server.http.get(path)).status_code for path in FILES} == {status}
            assert (await server.http.get("/livez")).status_code == 200

    asyncio.run(scenario({}, 404))
    asyncio.run(scenario({"api_key_file": str(keys)}, 401))


def test_the_page_works_below_a_prefix(serve: Serve) -> None:
    """Its links are relative to `/` of the application; its script finds the API relative to itself."""
    links = re.findall(r'(?:href|src)="([^"]+)"', TEXTS["index.html"])
    assert {f"/{link}" for link in links} < set(FILES)

    async def scenario() -> None:
        async with serve() as server:
            transport = httpx.ASGITransport(server.app, root_path="/models")
            async with httpx.AsyncClient(transport=transport, base_url="http://test/models/") as http:
                assert {(await http.get(link)).status_code for link in ["", *links]} == {200}

    asyncio.run(scenario())


def test_every_file_is_small_and_served() -> None:
    assert set(TEXTS) == {name for name, _ in FILES.values()}
    assert sum(len(text.encode()) for text in TEXTS.values()) < 33_000


@pytest.mark.parametrize("name", [name for name in TEXTS if not name.endswith(".svg")])
def test_a_file_neither_loads_from_elsewhere_nor_makes_html_of_text(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", text
    )
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son[a-z]+=|\sstyle=|javascript:", text)
