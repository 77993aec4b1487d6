"""Take the pictures of the page: `python -m docs.tools.record_page docs/images`.

Serves configs/eagle3.yaml and drives a Chromium, whose program the variable CHROMIUM names, with playwright
(`make page-test` installs it). What the pictures show is a real run of the embedded model.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.local_server import LocalServer
from specray.cli.local_server import free_port

ROOT = Path(__file__).parents[2]
QUESTION = "Why is the sky blue?"
DESKTOP, PHONE = {"width": 1180, "height": 740}, {"width": 390, "height": 844}
ANSWER_MS = 120_000


def main() -> int:
    folder = Path(sys.argv[1])
    program = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    with LocalServer(ROOT / "configs" / "eagle3.yaml", free_port()) as server, sync_playwright() as playwright:
        server.wait_until_ready()
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        record(browser, server.url, folder / "page.png", compare=True, viewport=DESKTOP)
        record(browser, server.url, folder / "page-dark.png", viewport=DESKTOP, color_scheme="dark")
        record(browser, server.url, folder / "page-phone.png", viewport=PHONE)
        browser.close()
    return 0


def record(browser: Any, url: str, file: Path, compare: bool = False, **options: Any) -> None:
    """One complete answer, and the tree of its longest pass."""
    page = browser.new_page(**options)
    page.goto(url)
    page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("64")
    page.get_by_text("Options").click()
    page.get_by_role("switch").set_checked(compare)
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector(".comparison" if compare else "#send", state="visible", timeout=ANSWER_MS)
    page.wait_for_timeout(2500)  # until the replicas' next update
    deepest = page.locator(".run:first-child .t").evaluate_all(
        "spans => spans.map((span) => +/d(\\d)/.exec(span.className)[1]).reduce((best, d, i, all) => "
        "d > all[best] ? i : best, 0)"
    )
    page.locator(".run:first-child .t").nth(deepest).click()
    page.screenshot(path=file)
    Image.open(file).quantize(128).save(file, optimize=True)
    print(file, page.locator(".comparison, .note").all_text_contents())
    page.close()


if __name__ == "__main__":
    sys.exit(main())
