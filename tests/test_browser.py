"""The pages of chat, viewer and explain on a phone; skipped where there is no playwright or Chromium."""

import json
import queue
import shutil
import threading

import pytest
from test_conversation import COUNT, FIRST, make_conversation
from test_viewer import record_of

from mtsql.extras import explain, viewer
from mtsql.extras.chat.server import Server

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

PHONE = {"viewport": {"width": 400, "height": 800}, "is_mobile": True, "has_touch": True}
TOO_WIDE = """[...document.querySelectorAll("html, body *")].filter(e => !e.closest(".result, .wide, .text")
    && Math.max(e.scrollWidth, e.getBoundingClientRect().right) > 401).map(e => e.outerHTML.slice(0, 80))"""
HOSTILE = '<b>bold</b><script>hacked = 1</script><img src="x" onerror="hacked = 1">' + "x" * 200
SQL = f"""SELECT 1 AS id, 2.5 AS size, 'a, "b"\nc' AS note UNION  SELECT 20, NULL, '{HOSTILE}'"""
SAVED = '\ufeffid,size,note\r\n1,2.5,"a, ""b""\nc"\r\n20,,"' + HOSTILE.replace('"', '""') + '"\r\n'


@pytest.fixture
def page():
    """A page that in the end is not too wide, has run nothing hostile and told the console of no error."""
    errors = []
    with sync_api.sync_playwright() as driver, driver.chromium.launch(executable_path=CHROMIUM) as browser:
        page = browser.new_page(permissions=["clipboard-read", "clipboard-write"], **PHONE)
        page.on("pageerror", lambda error: errors.append(error))
        page.on("console", lambda said: said.type == "error" and errors.append((said.text, said.location)))
        yield page
        assert [page.evaluate(TOO_WIDE), page.evaluate("window.hacked"), errors] == [[], None, []]


def test_the_chat(tiny, page, request):
    expect, said = sync_api.expect, queue.SimpleQueue()
    dialogue = make_conversation(tiny, [FIRST[2].replace(COUNT, f"SELECT [{HOSTILE}]")], iter(said.get, None))
    dialogue.ask("Who?", lambda event: None)
    with Server(dialogue, 0) as server:
        request.addfinalizer(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}")
        expect(page.locator(".turn p.fail")).to_have_text(f"It fails: no such column: {HOSTILE}")
        assert page.evaluate(TOO_WIDE) == []
        page.tap("#new")
        expect(page.locator("#turns")).to_be_empty()
        page.fill("#question", HOSTILE)
        page.tap("text=Ask")
        said.put(FIRST[0])
        expect(page.locator("details[open] dt").last).to_have_text("sees")
        expect(page.locator("#new")).to_be_disabled()
        other = page.context.browser.new_page(**PHONE)
        other.goto(page.url)
        other.tap("#new")
        expect(other.locator("p.fail")).to_have_text("the agent is still answering")
        said.put(FIRST[2].replace(COUNT, SQL))
        expect(page.locator(".turn details:not([open]) summary")).to_have_text("6 steps")
        assert [page.inner_text("#turns").count(text) for text in (SQL, HOSTILE)] == [1, 3]
        page.tap("text=Copy SQL")
        expect(page.locator("text=Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == SQL
        with page.expect_download() as download:
            page.tap("text=Save as CSV")
        assert download.value.path().read_bytes().decode() == SAVED
        sides = "cells => cells.map(cell => getComputedStyle(cell).textAlign)"
        assert page.locator("th, td").evaluate_all(sides) == ["right", "right", "left"] * 3
        page.tap(".turn summary")
        expect(page.locator(".steps")).to_be_visible()


def test_the_viewer(tmp_path, page):
    facts = [
        ("answered", 1, "easy", 0, 7, "a", "not in the other file"),
        ("no_action", 1, "hard", 0, 8, "b", "right there alone"),
        ("answered", 2, "hard", 1, 8, "a", "right in both"),
        ("no_action", 2, "extra", 0, 7, "b", "right there alone"),
    ]
    rows = [
        record_of(reward=n) | {"status": status, "turn_index": turn - 1, "hardness": hardness, "step": step}
        | {"scores": {"ex": ex}, "db_id": db_id, "example_id": str(n), "question": f"{n}{HOSTILE}"}
        for n, (status, turn, hardness, ex, step, db_id, _) in enumerate(facts)
    ]  # fmt: skip
    here, there, html = (tmp_path / name for name in ("here", "there" * 20, "page.html"))
    here.write_text("\n".join(map(json.dumps, rows)))
    there.write_text("\n".join(json.dumps(row | {"scores": {"ex": 1}}) for row in rows[1:]))
    viewer.main([str(here), "--html", str(html), "--beside", str(there)])
    page.goto(html.as_uri())
    listed, selects = page.locator("#list .text"), page.locator("select")
    sync_api.expect(selects).to_have_count(len(facts[0]))
    for select, values in zip(selects.all(), zip(*facts, strict=True), strict=True):
        for value in set(values):
            select.select_option(label=str(value))
            assert listed.all_text_contents() == [f"{n}{HOSTILE}" for n in range(4) if values[n] == value]
        select.select_option(label="all")
    for field, text, left in (("low", "1", [1, 2, 3]), ("high", "2", [1, 2]), ("search", "1<B>", [1])):
        page.fill(f"#{field}", text)
        assert listed.all_text_contents() == [f"{n}{HOSTILE}" for n in left]
    page.locator("#list li").tap()
    page.check("#colour")
    page.locator("[data-numbers]").first.tap()
    assert "%)" in page.locator(":focus").evaluate("token => getComputedStyle(token, '::after').content")


def test_one_step_explained(tmp_path, page):
    explain.main(*explain.own_options(["--html", str(tmp_path / "step.html")]))
    page.goto((tmp_path / "step.html").as_uri())
    page.locator(".token").first.tap()
    numbers = page.locator(".token").first.evaluate("token => getComputedStyle(token, '::after').content")
    assert all(f"{name} " in numbers for name in explain.TOKEN_HEADER[1:])
