"""The page in a headless Chromium, against a real server over scripted ranks."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from specray.config import SpeculativeConfig
from specray.metrics import number
from tests.support.processes import wait_until
from tests.support.scripted_server import TEXT, byte_tokenizer
from tests.unit.server.page.conftest import NOT_INSTALLED, Running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, expect
else:
    expect = pytest.importorskip("playwright.sync_api", reason=NOT_INSTALLED).expect

NGRAM = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3).model_dump()
KEY = "k" * 32
PHONE = {"width": 360, "height": 740}
NUM_TOKENS = 40


@contextmanager
def opened(browser: "Browser", url: str, **options: Any) -> "Iterator[Page]":
    """The page, connected. Fails on errors in its scripts, and on requests to other servers."""
    context = browser.new_context(reduced_motion="reduce", **options)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(url) else problems.append(request.url))
    page.goto(url)
    yield page
    context.close()
    refusals = [text for text in problems if "status of 401" in text]  # Chromium reports each to the console
    assert problems == refusals


def ask(page: "Page", question: str = "hello", num_tokens: int = NUM_TOKENS, compare: bool = False) -> None:
    page.locator("details").evaluate("details => { details.open = true; }")
    page.fill("#max-tokens", str(num_tokens))
    page.set_checked("#compare", compare)
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")


def answer(page: "Page", place: int = 0) -> str:
    """The text of an answer, once it is complete."""
    page.wait_for_selector(".run .text")
    page.wait_for_selector("#send", state="visible")
    return page.locator(".run .text").nth(place).text_content() or ""


def expected_text(num_tokens: int = NUM_TOKENS, text: str = TEXT) -> str:
    data = (text * num_tokens).encode()[:num_tokens]  # every byte is a token
    return data.decode("utf-8", "replace")


def test_an_answer_shows_where_its_tokens_came_from(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, _), opened(browser, url) as page:
        expect(page.locator("#model")).to_have_text("toy, drafts by NGRAM")
        ask(page)
        assert answer(page) == expected_text()
        classes = page.locator(".text .t").evaluate_all("spans => spans.map((span) => span.classList[1])")
        assert classes == [("d1", "d2", "d0")[place % 3] for place in range(NUM_TOKENS - 1)] + ["d0"]
        assert (
            page.text_content("#accept-length") == "2.85"
        )  # 12 passes with three tokens and one with one, after the first
        assert page.text_content("#passes") == "14"
        assert page.text_content("#for-tokens") == f"for {NUM_TOKENS} tokens"
        assert float(page.text_content("#speed") or "") > 0


def test_several_drafters_are_named(browser: "Browser", running: Running) -> None:
    drafters = [{"name": name, "algorithm": "NGRAM", "num_draft_tokens": 3} for name in ("long", "short")]
    with running(speculative={"drafters": drafters}) as (url, _), opened(browser, url) as page:
        expect(page.locator("#model")).to_have_text("toy, drafts by long, short")


def test_the_tree_of_each_pass_can_be_seen(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, _), opened(browser, url) as page:
        ask(page)
        answer(page)
        page.locator(".text .t").nth(1).click()
        assert page.text_content("#tree-title") == "Draft tree, pass 1 of 14"
        kinds = page.locator("#tree rect").evaluate_all("nodes => nodes.map((node) => node.classList[1])")
        assert kinds == ["root", "rejected", "accepted", "accepted", "own"]
        labels = page.locator("#tree text").all_text_contents()
        assert labels[2:] == ["T", "h", "e"]
        sentence = (
            "3 drafted, 2 accepted, and 1 of the model\N{RIGHT SINGLE QUOTATION MARK}s own: 3 tokens in one pass."
        )
        assert page.text_content("#tree-caption") == sentence
        assert page.locator(".text .on").all_text_contents() == ["T", "h", "e"]
        page.focus("#step")
        page.keyboard.press("ArrowRight")
        assert page.text_content("#tree-title") == "Draft tree, pass 2 of 14"
        page.keyboard.press("End")
        assert page.text_content("#tree-caption") == "Nothing was drafted: the model wrote 1 token in this pass."


def test_the_comparison_shows_that_both_texts_are_equal(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, server), opened(browser, url) as page:
        with page.expect_request(lambda request: '"enabled":false' in (request.post_data or "")) as second:
            ask(page, compare=True)
        comparison = page.text_content(".comparison") or ""
        assert comparison.startswith(
            f"Identical: {len(expected_text())} characters, the same with and without speculation"
        )
        assert answer(page, 0) == answer(page, 1) == expected_text()
        assert set(page.locator(".text").nth(1).locator(".t").evaluate_all("s => s.map((t) => t.className)")) == {
            "t d0"
        }
        body = json.loads(second.value.post_data or "")
        assert body["speculative"] == {"trace": True, "enabled": False}
        assert server.router_pool.num_failovers == 0


@pytest.mark.parametrize("is_slower", [False, True])
def test_only_a_faster_run_stands_in_the_green_box(browser: "Browser", running: Running, is_slower: bool) -> None:
    script = """([fast, plain]) => import("/page/decoding.js").then(({ speedUp }) => speedUp(fast, plain))"""
    with running(speculative=NGRAM) as (url, _), opened(browser, url) as page:
        shown = page.evaluate(script, [80, 100] if is_slower else [150, 100])
        assert shown == (
            {"isSlower": True, "words": ", but only 0.80 times as fast with it"}
            if is_slower
            else {"isSlower": False, "words": ", 1.50 times as fast with it"}
        )
        ask(page, compare=True)
        page.wait_for_selector(".comparison")
        green = page.locator(".comparison").evaluate(
            "(box) => { box.className = 'comparison same'; return getComputedStyle(box).backgroundColor; }"
        )
        slower = page.locator(".comparison").evaluate(
            "(box) => { box.className = 'comparison same slower'; return getComputedStyle(box).backgroundColor; }"
        )
        assert green != slower


def test_the_last_tree_counts_tokens_up_to_the_end_of_the_answer(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, server), opened(browser, url) as page:
        server.ranks.script = [*byte_tokenizer().encode("four"), byte_tokenizer().eos_token_id]
        ask(page)  # three tokens a pass: the end token is the second one of the last pass
        assert answer(page) == "four"
        page.focus("#step")
        page.keyboard.press("End")
        assert page.text_content("#tree-caption") == "3 drafted, 2 accepted: 2 tokens up to the end of the answer."
        kinds = page.locator("#tree rect").evaluate_all("nodes => nodes.map((node) => node.classList[1])")
        assert sorted(kinds) == ["accepted", "accepted", "rejected", "root"]


def test_the_comparison_shows_where_texts_differ(browser: "Browser", running: Running) -> None:
    """The second answer is changed on its way."""
    with running(speculative=NGRAM) as (url, _), opened(browser, url) as page:

        def change(route: Any) -> None:
            reply = route.fetch()
            changed = '"enabled":false' in route.request.post_data
            route.fulfill(response=reply, body=reply.text().replace('"text":"T"', '"text":"X"') if changed else None)

        page.route("**/v1/chat/completions", change)
        ask(page, compare=True)
        comparison = "The texts differ from character 1 on. This is an error: please report it."
        assert page.text_content(".comparison") == comparison
        assert page.locator(".same").count() == 0


def test_text_of_the_model_is_never_html(browser: "Browser", running: Running) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}&lt; "
    with running(speculative=NGRAM) as (url, server), opened(browser, url) as page:
        server.ranks.script = byte_tokenizer().encode(attack)
        ask(page, question="<b>bold</b>", num_tokens=len(attack))
        assert answer(page) == attack
        assert page.text_content(".question") == "<b>bold</b>"
        assert page.locator("img, #log script, #log b").count() == 0


def test_a_server_with_keys_is_asked_with_the_users_key(browser: "Browser", running: Running, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    keys.chmod(0o600)
    with running(speculative=NGRAM, server={"api_key_file": str(keys)}) as (url, _), opened(browser, url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-title")).to_have_text("The server refused this key")
        page.fill("#key", KEY)
        page.click("#key-dialog button")
        page.wait_for_selector("#replicas tr")
        ask(page)
        assert answer(page) == expected_text()
        stored = page.evaluate(
            "[Object.values(sessionStorage), Object.values(localStorage), document.cookie, location.href]"
        )
        assert stored == [[KEY], [], "", f"{url}/"]
        assert KEY not in page.content()
        page.reload()
        page.wait_for_selector("#replicas tr")
        assert not page.locator("#key-dialog").is_visible()


def test_a_user_without_a_key_is_left_alone(browser: "Browser", running: Running, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    keys.chmod(0o600)
    with running(server={"api_key_file": str(keys)}) as (url, _), opened(browser, url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.press("Escape")
        expect(page.locator("#replicas-note")).to_contain_text("API key")
        page.wait_for_event("response", lambda response: response.url.endswith("/metrics"))  # the next poll
        assert not page.locator("#key-dialog").is_visible()
        page.click("#change-key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("toy, no drafter")


def test_replicas_are_listed_with_their_load(browser: "Browser", running: Running) -> None:
    with running(num_replicas=2, speculative=NGRAM) as (url, _), opened(browser, url) as page:
        page.wait_for_selector("#replicas tr")
        rows = [re.split(r"\s+", row.inner_text().strip()) for row in page.locator("#replicas tr").all()]
        assert rows == [[name, "0", "0", "\N{EN DASH}", "0", "0"] for name in ("replica-1", "replica-2")]


def test_a_stopped_answer_ends_at_the_server_too(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM, step_s=0.03) as (url, server), opened(browser, url) as page:
        ask(page, num_tokens=400)
        page.wait_for_selector(".text .t")
        page.click("#stop")
        assert page.text_content(".failure") == "Stopped."
        wait_until(lambda: number(server.router._engine.stats(), "specray_num_requests_running") == 0)
        assert server.ranks.num_steps < 400 / 3


def test_an_error_of_the_server_is_shown(browser: "Browser", running: Running) -> None:
    with running() as (url, _), opened(browser, url) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body='data: {"id":1'))
        ask(page)
        assert page.text_content(".failure") == "The connection was lost before the answer was complete."
        page.unroute("**/v1/chat/completions")
        ask(page, num_tokens=8)
        page.wait_for_selector("#send", state="visible")
        assert page.locator(".run .text").nth(1).text_content() == expected_text(8)


def test_the_page_fits_a_phone_in_the_dark(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, _), opened(browser, url, viewport=PHONE, color_scheme="dark") as page:
        ask(page, compare=True)
        page.wait_for_selector(".comparison")
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) == PHONE["width"]
        assert page.locator("#prompt").is_visible()
        page.reload()
        page.wait_for_selector("#start")
        last, composer = page.locator(".try").last.bounding_box(), page.locator("#composer").bounding_box()
        assert last
        assert composer
        assert last["y"] + last["height"] <= composer["y"] < PHONE["height"]  # suggestions are in view
        lightness = "[...getComputedStyle(document.body).{}.matchAll(/\\d+/g)].reduce((sum, [part]) => sum + +part, 0)"
        assert page.evaluate(lightness.format("backgroundColor")) < 100
        assert page.evaluate(lightness.format("color")) > 500


def test_the_first_paint_takes_less_than_a_second(browser: "Browser", running: Running) -> None:
    with running() as (url, _), opened(browser, url) as page:
        expect(page.locator("#model")).to_have_text("toy, no drafter")
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first contentful paint after {paint_ms:.0f} ms")
        assert paint_ms < 1000


def test_a_drawn_tree_has_its_nodes_in_cells_of_their_own(browser: "Browser", running: Running) -> None:
    random = Random(1)
    passes = []
    for size in range(1, 60):
        parents = [-1, *(random.randrange(node) for node in range(1, size))]
        accepted: list[int] = []
        while children := [node for node in range(size) if parents[node] == (accepted[-1] if accepted else 0)]:
            accepted.append(random.choice(children))
        passes.append({"tokens": ["t"] * size, "parents": parents, "accepted": accepted[: random.randrange(9)]})
    script = """(passes) => import("/page/decoding.js").then(({ treeLayout }) => passes.map((pass) => {
        const { nodes, numRows, numHidden } = treeLayout(pass, "own", 32);
        return { cells: nodes.map(({ depth, row, kind }) => [depth, row, kind]), numRows, numHidden };
    }))"""
    with running() as (url, _), opened(browser, url) as page:
        layouts = page.evaluate(script, passes)
    for drawn, layout in zip(passes, layouts, strict=True):
        cells = layout["cells"]
        assert len({(depth, row) for depth, row, _ in cells}) == len(cells)
        assert {row for _, row, _ in cells} == set(range(layout["numRows"]))
        path = sorted((depth, row) for depth, row, kind in cells if kind != "rejected")
        assert path == [(depth, 0) for depth in range(len(drawn["accepted"]) + 2)]  # straight, with both its ends
        assert len(cells) + layout["numHidden"] == len(drawn["tokens"]) + 1
        assert len(cells) <= 33


def test_every_control_has_a_name(browser: "Browser", running: Running) -> None:
    with running(speculative=NGRAM) as (url, _), opened(browser, url) as page:
        tree = page.locator("body").aria_snapshot()
        for part in (
            'textbox "Message"',
            'button "Send"',
            'switch "Run it again without',
            'slider "Pass"',
            'log "Conv',
        ):
            assert part in tree, tree
        unnamed = re.findall(r"^\s*- (?:button|textbox|slider|switch|spinbutton|table|img)(?: \[.*\])?:?$", tree, re.M)
        assert not unnamed
