"""The page of the server in headless Chromium, where both it and playwright are installed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_serve import Running

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no browser")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    running = Running(tmp_path, max_reply=12, api_key="secret")
    try:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            problems: list[Any] = []
            page.on("pageerror", lambda error: problems.append(error))
            page.goto(f"{running.url}/#key=secret")
            page.wait_for_selector("#legend span")
            yield page
            assert not problems
            browser.close()
    finally:
        running.close()


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")
    page.wait_for_function("!document.querySelector('.busy')")


def test_a_chat(page: Any) -> None:
    assert page.inner_text("h1") == "smollm2-135m"
    assert "empty 64" in page.inner_text("#legend")
    say(page, "Say <b>hello</b>.")
    say(page, "And again.")
    assert page.locator(".user").all_inner_texts() == ["Say <b>hello</b>.", "And again."]
    assert all(page.locator(".reply").all_inner_texts())
    filled = int(page.get_attribute("#slots", "aria-valuenow"))
    assert 40 < filled <= 64
    assert "seen" in page.inner_text("#numbers")
    page.reload()
    page.wait_for_selector("#legend span")
    assert page.locator(".reply").count() == 2
    assert int(page.get_attribute("#slots", "aria-valuenow")) == filled
    page.click("#new")
    assert page.locator(".reply").count() == 0


def test_without_the_key(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#")
    page.reload()
    page.wait_for_selector(".error")
    assert "#key=" in page.inner_text(".error")
