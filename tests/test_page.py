"""The page of the server in headless Chromium, where that is installed. A picture of it goes to build/page.png."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_stream.native import library
from tests.browser import CHROMIUM, Page
from tests.served import Running

ROOT = Path(__file__).parents[1]
VENDOR = ROOT / "h2o_stream" / "serve" / "page" / "vendor"

with_chromium = pytest.mark.skipif(CHROMIUM is None or library.loaded() is None, reason="there is no Chromium")

REPLY = """Two **ways**:

1. A loop.
2. `sum`

| way | lines |
| --- | ----: |
| loop | 3 |

```python
def total(numbers: list[int]) -> int:
    return sum(numbers)  # <b>
```

<script>window.bad = 1</script> <img src=x onerror="window.bad = 1"> [a link](https://example.org)
[bad](javascript:window.bad=1) ![picture](https://example.org/x.png)
"""


NEVER_DONE = """async (url, { signal }) => new Response(new ReadableStream({ start(stream) {
    signal.addEventListener("abort", () => stream.error(signal.reason));
    stream.enqueue(new TextEncoder().encode('data: {"choices": [{"delta": {"content": "Once upon"}}]}\\n\\n'));
} }))"""
"""A `fetch` whose reply never ends."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("served"), max_reply=12, api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(server: Running, browser: Page) -> Iterator[Page]:
    browser.open(f"{server.url}/#key=secret")
    browser.run("localStorage.clear(), sessionStorage.clear()")
    browser.open(f"{server.url}/#key=secret")
    yield browser
    assert not browser.problems


def say(page: Page, text: str) -> None:
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.wait("document.querySelector('.assistant .text')?.innerText && !document.querySelector('.busy')")


@with_chromium
def test_chats(page: Page, server: Running) -> None:
    assert page.texts("h1") == ["smollm2-135m"]
    assert "empty 64" in page.texts("#legend")[0]
    say(page, "Say <b>hello</b>.")
    say(page, "And again.")
    assert page.texts(".said") == ["Say <b>hello</b>.", "And again."]
    replies = page.texts(".assistant .text")
    assert len(replies) == 2
    assert all(replies)
    filled = page.run("+document.getElementById('slots').getAttribute('aria-valuenow')")
    assert 40 < filled <= 64
    assert "seen" in page.texts("#numbers")[0]

    page.click(".tools button", "Regenerate")
    page.wait("document.querySelector('.tools span')?.innerText == '2 of 2' && !document.querySelector('.busy')")
    page.click(".tools button", "‹")
    assert page.texts(".assistant .text") == replies

    page.run("document.querySelector('.user .tools button').click()")
    page.run("document.querySelector('.edited textarea').select()")
    page.type("Say goodbye.")
    page.wait("document.querySelector('.assistant .text')?.innerText && !document.querySelector('.busy')")
    assert page.texts(".said") == ["Say goodbye."]
    assert page.texts("#chats .name") == ["Say goodbye.", "Say <b>hello</b>."]

    page.open(f"{server.url}/#key=secret")
    assert page.texts(".said") == ["Say goodbye."]
    page.click("#chats .name", "hello")
    assert page.texts(".assistant .text") == replies
    page.click("#new")
    assert page.texts(".said") == []
    page.run("document.querySelector('#chats li:last-child .quiet').click()")
    page.wait("document.querySelectorAll('#chats li').length == 2")


@with_chromium
def test_what_the_server_knows_is_not_sent_again(page: Page, server: Running) -> None:
    noting = "(...given) => (asked.push(JSON.parse(given[1].body)), fetched(...given))"
    page.run(f"window.asked = [], window.fetched = fetch, window.fetch = {noting}, 0")
    sizes = "asked.map(body => [body.messages.length, 'previous_response_id' in body])"
    say(page, "Say hello.")
    say(page, "And again.")
    assert page.run(sizes) == [[1, False], [1, True]]
    server.service.store._by_id.clear()
    say(page, "And again, please.")
    assert page.run(sizes)[2:] == [[1, True], [5, False]]
    assert all("404" in problem for problem in page.problems)  # which browsers report as one
    page.problems.clear()
    assert len(page.texts(".assistant .text")) == 3
    long = "userMessage('x'.repeat(2 ** 21)), replyMessage('y'.repeat(2 ** 21)), userMessage('z')"
    page.run(f"chat.messages.push({long}), 0")
    assert page.run("sent(undefined, true).messages.length") == 1


@with_chromium
def test_markdown(page: Page, server: Running) -> None:
    """It is rendered, and nothing in it runs or is fetched."""
    message = {"role": "assistant", "versions": [{"content": REPLY, "thinking": "Let me think."}], "at": 0}
    chat = {"id": "1", "changed": 1, "messages": [{"role": "user", "content": "How do I add numbers?"}, message]}
    page.run(f"localStorage.setItem('h2o-chat-1', {json.dumps(json.dumps(chat))})")
    page.open(f"{server.url}/#key=secret")
    page.screenshot(ROOT / "build" / "page.png")
    assert page.texts(".text ol li") == ["A loop.", "sum"]
    assert page.texts(".text td") == ["loop", "3"]
    assert page.run("getComputedStyle(document.querySelector('td:last-child')).textAlign") == "right"
    assert page.texts(".hljs-keyword")[0] == "def"
    assert "# <b>" in page.texts(".code pre")[0]
    assert page.run("[...document.querySelectorAll('.text a')].map(x => [x.protocol, x.rel])") == [
        ["https:", "noopener noreferrer"]] * 2  # fmt: skip
    assert page.run("document.querySelectorAll('.text :is(img, script, b)').length") == 0
    assert page.run("window.bad") is None
    page.run("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); }")
    page.click(".copy")
    page.wait("document.querySelector('.copy').innerText == 'Copied'")
    assert page.run("copied[0]").startswith("def total")
    assert page.texts("summary") == ["Thinking"]


@with_chromium
def test_a_reply_is_stopped_and_errors_are_said(page: Page, server: Running) -> None:
    page.run(f"window.fetch = {NEVER_DONE}; 0")
    page.run("document.getElementById('text').focus()")
    page.type("Tell me.")
    page.wait("document.querySelector('.busy .text')?.innerText.includes('Once upon')")
    assert page.texts("#send") == ["Stop"]
    page.type("Typed meanwhile")
    page.run("document.querySelector('.user .tools button').click()")
    page.run("document.querySelector('.edited textarea').value = 'Tell us.'")
    page.click("#send")
    page.wait("!document.querySelector('.busy')")
    assert page.texts(".assistant .text") == ["Once upon"]
    assert page.run("[...document.querySelectorAll('textarea')].map(x => x.value)") == ["Tell us.", "Typed meanwhile"]
    page.open(f"{server.url}/#key=secret")
    assert page.texts(".assistant .text") == ["Once upon"]
    page.open(f"{server.url}/#")
    assert "#key=" in page.texts(".error")[0]
    page.problems.clear()  # the status 401


def test_vendored_files_are_what_their_list_says() -> None:
    listed = json.loads((VENDOR / "vendor.json").read_text())
    for entry in listed:
        assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert (VENDOR / entry["file"].replace(".min.js", ".LICENSE.txt")).exists()
    assert {entry["file"] for entry in listed} == {path.name for path in VENDOR.glob("*.js")}
