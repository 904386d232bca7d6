"""The page in headless Chromium, against a real server over a tiny model."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dspark.drafters.factory import make_drafter
from dspark.engine.engine import Engine

from .conftest import Served, serving, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")

DESK = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
WAIT = 60_000  # milliseconds: a browser on a busy core is slow to begin
CONTRAST = """
selectors => selectors.map(selector => {
  const light = colour => {
    const [r, g, b] = colour.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const parsed = words => words.match(/[\\d.]+/g).map(Number);
  let node = document.querySelector(selector);
  const text = light(parsed(getComputedStyle(node).color));
  let back = [0, 0, 0, 0];
  for (; node && back[3] === 0; node = node.parentElement) {
    const found = parsed(getComputedStyle(node).backgroundColor);
    back = found.length === 3 ? [...found, 1] : found;
  }
  const [low, high] = [text, light(back.slice(0, 3))].sort((a, b) => a - b);
  return (high + .05) / (low + .05);
})
"""


@dataclass
class Watched:
    """A page, and what it did."""

    page: "playwright.Page"
    base: str
    asked: list = field(default_factory=list)  # requests
    faults: list[str] = field(default_factory=list)  # of the console, and errors of scripts

    def open(self) -> None:
        self.page.set_default_timeout(WAIT)
        self.page.on("request", lambda request: self.asked.append(request))
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.goto(self.base)

    def wait_state(self, state: str = "live") -> None:
        self.page.wait_for_selector(f"#state[data-state={state}]")

    def set(self, name: str, value: object) -> None:
        """Fill a field of the settings."""
        if self.page.get_attribute("#settings", "open") is None:
            self.page.click("summary")
        self.page.fill(f"#{name}", str(value))

    def ask(self, text: str) -> None:
        """Type and send a message; wait for the end of the answer."""
        answers = self.page.locator(".turn.assistant:not(.busy)")
        done = answers.count()
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        answers.nth(done).wait_for()

    def bodies(self) -> list[dict]:
        """What chat completions were asked for with."""
        return [request.post_data_json for request in self.asked if request.url.endswith("/v1/chat/completions")]

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as run:
        running = run.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Watched]]:
    """open_page(base, **context) -> a page in a profile of its own; it must not have asked anyone else."""
    opened = []

    def make(base: str, **context: object) -> Watched:
        watched = Watched(browser.new_context(**{"viewport": DESK, **context}).new_page(), base)
        opened.append(watched)
        watched.open()
        return watched

    yield make
    for watched in opened:
        watched.page.context.close()
        assert {re.match(r"https?://[^/]+", request.url)[0] for request in watched.asked} == {watched.base}


@pytest.fixture(scope="module")
def confident(make_engine, target) -> Iterator[Served]:
    """A server whose drafter gives confidences; rounds take their time, so that there is something to see."""
    config = make_engine().drafter.config.model_copy(update={"enable_confidence_head": True})
    engine = make_engine()
    engine = Engine(target, make_drafter(config, target.decoder).prepare(), engine.settings)
    step = engine.step

    def slowly() -> list:
        time.sleep(0.01)
        return step()

    engine.step = slowly
    with serving(engine) as running:
        yield running
        running.engine.check_integrity()


def test_a_message_is_typed_the_answer_streams_and_the_strip_fills(confident, open_page):
    view = open_page(confident.base)
    view.wait_state()
    assert view.text("#strip-text") == "no rounds yet"
    for name, value in (("max-tokens", 40), ("temperature", 2), ("seed", 7)):  # so hot, the drafter is often right
        view.set(name, value)
    view.page.evaluate("""() => {
        window.pieces = 0;
        new MutationObserver(() => { window.pieces += 1; })
            .observe(document.getElementById("log"), { childList: true, subtree: true });
    }""")
    view.ask("abc")
    assert view.page.evaluate("window.pieces") > 4  # the answer came bit by bit

    (asked,) = view.bodies()
    del asked["stream"], asked["stream_options"]
    again = confident.client().chat.completions.with_raw_response.create(
        **{k: asked.pop(k) for k in ("model", "messages")}, extra_body=asked
    )
    answer = again.http_response.json()
    assert view.page.text_content(".turn.assistant .words") == answer["choices"][0]["message"]["content"]
    spans = view.page.eval_on_selector_all(
        ".turn.assistant .words span", "all => all.map(s => [s.className, s.textContent])"
    )
    names = {"prefill": "plain"}
    tokens = [(names.get(t["origin"], t["origin"]), t["text"].lstrip()) for t in answer["choices"][0]["tokens"]]
    assert [tuple(span) for span in spans] == [token for token in tokens if token[1]]

    figures = answer["speculative"]
    view.page.locator("#strip g").nth(figures["rounds"] - 1).wait_for()
    assert figures["accepted"] > 0
    assert view.page.locator("#strip rect.accepted").count() >= figures["accepted"]
    assert view.page.locator("#strip rect.bonus").count() >= figures["rounds"] - 1  # the last one may be cut
    counted = "[document.querySelectorAll('#strip g').length, document.querySelector('#strip-text').textContent]"
    num_rounds, told = view.page.evaluate(counted)  # at once: more rounds may come
    assert told.startswith(f"{num_rounds} rounds: ")
    for name in ("positions", "confidence", "budget", "speed"):
        assert re.search(r"\d", view.page.get_attribute(f"#{name} svg", "aria-label")), name
    assert "tok/s" in view.text(".turn.assistant .facts")
    assert not view.faults


def test_the_keyboard_is_enough(confident, open_page):
    view = open_page(confident.base)
    view.wait_state()
    keys = view.page.keyboard
    view.page.focus(".skip")
    reached = []
    while not reached or reached[-1] != "summary":
        keys.press("Tab")
        reached.append(view.page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    assert reached == ["new", "log", "button", "button", "button", "message", "send", "summary"]
    keys.press("Enter")
    for name in ("mode", "temperature", "max-tokens", "seed", "system", "key"):
        keys.press("Tab")
        assert view.page.evaluate("document.activeElement.id") == name
        if name == "max-tokens":
            keys.press("Control+A")
            keys.type("500")
    for _ in range(8):
        keys.press("Shift+Tab")
    assert view.page.evaluate("document.activeElement.id") == "message"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    assert view.page.input_value("#message") == "one\ntwo"
    keys.press("Enter")
    view.page.wait_for_selector(".turn.busy .words span")
    keys.press("Escape")
    view.page.wait_for_selector(".turn.assistant:not(.busy)")
    assert view.text(".turn.assistant .facts") == "stopped"
    wait_for(lambda: not confident.engine.has_work())
    assert view.page.evaluate("document.activeElement.id") == "message"
    assert view.bodies()[0]["messages"][-1]["content"] == "one\ntwo"
    assert view.bodies()[0]["max_tokens"] == 500
    assert not view.faults


def test_turns_follow_each_other_and_a_new_chat_forgets_them(confident, open_page):
    view = open_page(confident.base)
    view.wait_state()
    view.set("max-tokens", 6)
    view.set("system", "be short")
    view.ask("first")
    view.ask("second")
    roles = [message["role"] for message in view.bodies()[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    said = view.page.text_content(".turn.assistant .words")
    assert view.bodies()[1]["messages"][2]["content"] == said
    view.page.click("#new")
    assert view.page.locator(".turn").count() == 0
    view.page.click("#examples button >> nth=0")
    view.page.wait_for_selector(".turn.assistant:not(.busy)")
    assert len(view.bodies()[2]["messages"]) == 2


def test_speculation_is_compared_with_plain_decoding(confident, open_page):
    view = open_page(confident.base)
    view.wait_state()
    view.set("max-tokens", 20)
    view.ask("abc")
    view.page.click(".compare")
    view.page.wait_for_selector(".comparison .facts span")
    assert [body["speculative"].get("mode") for body in view.bodies()] == [None, "off"]
    assert view.text(".comparison .facts") == "the same text"
    label = view.page.get_attribute("#speed svg", "aria-label")
    found = re.fullmatch(
        r"with speculation ([\d.]+) tokens a second, without ([\d.]+) tokens a second, "
        r"([\d.]+)× the speed without speculation",
        label,
    )
    on, off, ratio = map(float, found.groups())
    assert ratio == pytest.approx(on / off, rel=0.05)
    assert view.page.locator(".comparison svg rect").count() == 2
    # And plain answers are painted as such.
    view.page.select_option("#mode", "off")
    view.ask("def")
    kinds = view.page.eval_on_selector_all(
        ".turn.assistant:last-of-type .words span", "all => [...new Set(all.map(s => s.className))]"
    )
    assert kinds == ["plain"]


def test_an_api_key_is_asked_for_and_kept_in_memory_alone_and_no_rounds_are_needed(make_engine, open_page):
    with serving(make_engine(), api_key="opens sesame", round_events=0) as locked:
        view = open_page(locked.base)
        view.wait_state("key")
        view.page.fill("#message", "abc")
        view.page.press("#message", "Enter")
        assert view.page.evaluate("document.activeElement.id") == "key"
        view.page.keyboard.type("wrong")
        view.page.keyboard.press("Tab")
        view.page.wait_for_timeout(200)
        view.wait_state("key")
        view.page.fill("#key", "opens sesame")
        view.page.press("#key", "Tab")
        view.wait_state()
        view.ask("abc")
        assert view.page.text_content(".turn.assistant .words")
        assert view.text("#state") == "live, rounds not kept"
        assert "round_events" in view.text("#strip-text")
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert view.page.evaluate(stored) == '[{},{},""]'
        view.page.reload()
        view.wait_state("key")
        assert view.page.input_value("#key") == ""


def test_a_refusal_is_shown_and_the_question_kept(confident, open_page):
    view = open_page(confident.base)
    view.wait_state()
    view.ask("a" * 1200)  # longer than the context
    assert "shorten it" in view.text(".turn.assistant .error")
    assert view.page.input_value("#message") == "a" * 1200
    view.ask("abc")
    assert [message["content"] for message in view.bodies()[1]["messages"]] == ["abc"]


def test_words_stand_out_in_both_schemes_and_fit_a_phone(confident, open_page):
    view = open_page(confident.base, viewport=PHONE)
    view.wait_state()
    view.set("max-tokens", 40)
    view.ask("a long word: " + "m" * 60)
    texts = (".legend .accepted", ".legend .bonus", ".facts", "#send", "#chosen", "#model", "#strip-text")
    for scheme in ("light", "dark"):
        view.page.emulate_media(color_scheme=scheme)
        assert min(view.page.evaluate(CONTRAST, texts)) >= 4.5, scheme
    for shown, hidden in (("#log", "#figures"), ("#figures", "#log")):
        assert view.page.is_visible(shown)
        assert not view.page.is_visible(hidden)
        assert view.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        view.page.click("#view")
    assert view.page.locator("#strip g").count() * 14 <= PHONE["width"]
    assert not view.faults


def test_rounds_are_counted_as_the_terms_say(served, open_page):
    view = open_page(served.base)
    found = view.page.evaluate("""async () => {
        const { Rounds } = await import("/web/rounds.js");
        const rounds = new Rounds();
        const round = (step, verified, accepted, confidence, budget, running) =>
            ({ step, drafted: 3, verified, accepted, output: accepted + 1, bonus: true, confidence, budget, running });
        rounds.add([round(1, 3, 1, [0.92, 0.98, 0.5], 5, 2), round(1, 2, 2, [0.94, 0.41, 0.1], 5, 2)]);
        rounds.add([round(2, 1, 0, [0.93, 1, 1], 1, 0)]);
        rounds.add([round(3, 3, 3, [1, 1, 1], 3, 1)]);
        return [rounds.totals(), rounds.totals(2), rounds.positions(), rounds.reliability(), rounds.budgets()];
    }""")
    everything, last, positions, bins, budgets = found
    assert everything == {"rounds": 4, "drafted": 12, "verified": 9, "accepted": 6, "bonus": 4, "output": 10}
    assert last["rounds"] == 2
    assert last["output"] == 5
    assert positions == [{"judged": 4, "kept": 3}, {"judged": 3, "kept": 2}, {"judged": 2, "kept": 1}]
    low, high = bins
    assert low == {"count": 1, "confidence": 0.41, "kept": 1}
    # Judged: up to the first rejected one of each round.
    assert high["count"] == 7
    assert high["kept"] == pytest.approx(5 / 7)
    assert high["confidence"] == pytest.approx((0.92 + 0.98 + 0.94 + 0.93 + 3) / 7)
    assert budgets == [
        {"running": 1, "steps": 2, "mean": 2, "low": 1, "high": 3},
        {"running": 2, "steps": 1, "mean": 5, "low": 5, "high": 5},
    ]
