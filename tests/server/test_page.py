"""The page's files as the server hands them out, without a browser."""

import re

import httpx
import pytest


@pytest.fixture(scope="module")
def page(served) -> httpx.Response:
    return httpx.get(served.base)


def test_the_page_allows_only_this_server(page):
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script>|<style>|style=|https?://", page.text)  # nothing that the policy forbids


def test_every_file_that_the_page_names_is_there(page, served):
    names = set(re.findall(r'(?:src|href)="web/([^"]+)"', page.text))
    assert {"main.js", "style.css", "icon.svg"} <= names
    seen = set()
    while names - seen:
        name = (names - seen).pop()
        answer = httpx.get(f"{served.base}/web/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["x-content-type-options"] == "nosniff"
        names |= set(re.findall(r'from "\./([^"]+)"', answer.text))
        seen.add(name)
    assert {"chat.js", "charts.js", "rounds.js", "api.js", "answer.js"} <= seen


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e", "app.py", ""])
def test_there_is_nothing_else(name, served):
    answer = httpx.get(f"{served.base}/web/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
