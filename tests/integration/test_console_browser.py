"""The operators' page in a real browser: by mouse and by keyboard, with and without JavaScript, with hostile
data, in a narrow window, in the dark, and while Redis is away.

One stack, one console and one browser serve all tests of this file.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgpack
import pytest
from starlette.routing import Match, Route

from carpool.keys import Keys
from carpool.settings import ConsoleSettings
from carpool_console.console import Console
from carpool_console.pages import PAGES
from carpool_console.reader import SharedReader
from carpool_console.users import User, Users, hash_of
from support.browser import Visitor, chromium, wait_until_changed
from support.stack import Service, Stack
from support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

PASSWORDS: Final = {"ann": "operators-may-act-here", "vic": "viewers-may-only-look"}
# Would be an element, or end the value of an attribute, where it is not escaped.
HOSTILE: Final = "\"'><xss-mark><script>document.title='xss'</script><img src=x onerror=alert(1)>{{7*7}}"
HOSTILE_LANE: Final = "slow"
NARROW_PX: Final = 390
UPDATES: Final = 2  # of a page that updates itself, after which what a person does to it must remain
LINKS_OF_EACH_ROUTE: Final = 2
TRIES: Final = 10  # for the tab key
LETTERS: Final = 50_000
LINK: Final = re.compile(r"""<a\b[^>]*\bhref="(/[^"]*)\"""")
FORM: Final = re.compile(r"""<form\b(?=[^>]*\bmethod="?post)[^>]*\baction="([^"]*)\"""", re.IGNORECASE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def shared(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two models: one that serves, one with a process that waits at a gate, and hostile data in both."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        users = Users(stack.home / "users.toml")
        for name, role in (("ann", "operator"), ("vic", "viewer")):
            users.put(User(name, role, hash_of(PASSWORDS[name])))  # type: ignore[arg-type]
        stack.serve("faulty.py:Faulty", "plain.py:Single")
        hostile(stack)
        yield stack


def hostile(stack: Stack) -> None:
    """Hostile texts in all that a producer may choose, and in what a model raises."""
    for _ in range(3):
        stack.send("Faulty", body='"raise"', correlation_id="hostile")
    stack.send("Faulty", body=HOSTILE, lane=HOSTILE_LANE, tenant=HOSTILE_LANE, content_type=HOSTILE)
    stack.send("Faulty", **{"body": "{", "correlation_id": "malformed", HOSTILE: HOSTILE})
    for _ in range(3):  # two are in flight, and wait at a gate
        stack.send("Single", body=f'{{"gate": "{stack.home / "gate"}"}}', lane=HOSTILE_LANE, tenant="acme")
    packed = [{"correlation_id": f"waits-{at}", "body": "1", "tenant": HOSTILE_LANE} for at in range(4)]
    stack.send("Single", requests=msgpack.packb(packed), lane=HOSTILE_LANE)
    dead(stack, "Faulty", [HOSTILE], body=HOSTILE, reason=HOSTILE, content_type=HOSTILE, reply_to=HOSTILE)


def dead(stack: Stack, model: str, ids: list[str], **fields: str) -> None:
    """Dead letters, as workers write them, of requests with these correlation IDs."""
    pipeline = stack.redis.pipeline(transaction=False)
    for correlation_id in ids:
        letter = {
            "correlation_id": correlation_id,
            "content_type": "application/json",
            "body": '"cured"',
            **fields,
        }
        reason = letter.pop("reason", "its model process or worker died 2 times while it was executed alone")
        pipeline.xadd(Keys(model).dead, {**letter, "reason": reason, "attempts": "2", "entry_id": "1-1"})
    pipeline.execute()


@pytest.fixture(scope="module")
def console(shared: Stack) -> Service:
    return shared.console()


class Guest(Visitor):
    """A visitor who has signed in."""

    def __init__(self, browser: Browser, console: Service, name: str = "ann", **options: Any) -> None:
        super().__init__(browser, console.url, **options)
        self.page.goto("/")
        self.page.get_by_label("Name").fill(name)
        self.page.get_by_label("Password").fill(PASSWORDS[name])
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{console.url}/")


@pytest.fixture(scope="module")
def ann_s(browser: Browser, console: Service) -> Iterator[Guest]:
    """What an operator sees."""
    with Guest(browser, console) as guest:
        yield guest


@pytest.fixture
def ann(ann_s: Guest) -> Iterator[Guest]:
    """An operator, whose browser has nothing to complain about."""
    ann_s.complaints.clear()
    ann_s.page.goto("/")
    yield ann_s
    assert ann_s.complaints == []


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"t{abs(hash(request.node.nodeid)):x}"


# --- every page --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[Route]:
    """All pages that there are."""
    users = Users(tmp_path_factory.mktemp("users") / "users.toml")
    settings = ConsoleSettings.model_validate({"redis_url": "redis://127.0.0.1:1/0"})
    reader = SharedReader(settings.redis_url, settings.prefix, "none", lambda _: None)
    console = Console(settings, users, reader, "none")
    found = [route for page in PAGES for route in page.routes(console)]
    return [route for route in found if "GET" in (route.methods or ())]


def route_of(routes: list[Route], path: str) -> str | None:
    """The pattern of the route that answers a path."""
    for route in routes:
        match, _ = route.matches({"type": "http", "path": path, "method": "GET", "root_path": ""})
        if match is Match.FULL:
            return route.path
    return None


def walk(routes: list[Route], links: Callable[[str], list[str]]) -> Iterator[str]:
    """Paths that links lead to, from the first page on: some of each route. `links`: those of a page."""
    seen: Counter[str] = Counter()
    waiting, known = ["/"], {"/"}
    while waiting:
        path = waiting.pop(0)
        route = route_of(routes, urlsplit(path).path)
        if route is None or seen[route] >= LINKS_OF_EACH_ROUTE or path.endswith("/body"):
            continue
        seen[route] += 1
        yield path
        new = [link for link in dict.fromkeys(links(path)) if link not in known]
        known.update(new)
        waiting += new


def html_of(page: Page, path: str) -> str:
    """A page as the server sends it: a browser that shows it takes many times the CPU."""
    answer = page.request.get(path)
    assert answer.ok, path
    return answer.text()


class Texts(dict[str, str]):
    """Pages as the server sent them, by path; each is asked for once."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def __missing__(self, path: str) -> str:
        self[path] = html_of(self._page, path)
        return self[path]


def links_of(html: str) -> list[str]:
    return [unescape(link) for link in LINK.findall(html)]


def test_every_page_is_accessible_narrow_and_dark_and_shows_hostile_texts_as_texts(
    ann: Guest, routes: list[Route], shared: Stack
) -> None:
    """Axe finds nothing, in the light and in the dark; no page is wider than a phone; what producers wrote is
    text, and the browser reports neither an error nor a violation of the page's policy."""
    page, flaws, wide, visited = ann.page, [], [], set()
    texts = Texts(page)
    for path in walk(routes, lambda path: links_of(texts[path])):
        route = route_of(routes, urlsplit(path).path)
        if route in visited:
            continue
        visited.add(route)
        page.goto(path)
        assert page.locator("xss-mark").count() == 0
        assert "xss" not in page.title().replace("xss-mark", "")
        flaws += ann.flaws()
        page.set_viewport_size({"width": NARROW_PX, "height": 800})
        page.emulate_media(color_scheme="dark")
        flaws += [f"in the dark: {flaw}" for flaw in ann.flaws("color-contrast")]
        if ann.overflow_px() > 0:
            wide.append(page.url)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 900})
    assert flaws == []
    assert wide == []
    missing = {route.path for route in routes} - visited
    assert {path for path in missing if not path.endswith(("/body", "{job}"))} == set(), "no link leads there"
    found = "".join(texts.values())
    assert "&lt;xss-mark&gt;" in found
    assert "<xss-mark" not in found


def test_a_narrow_window_shows_how_long_a_lane_executes(ann: Guest) -> None:
    page = ann.page
    page.set_viewport_size({"width": NARROW_PX, "height": 800})
    try:
        page.goto("/models/Single")
        box = page.get_by_role("columnheader", name="Execution p99").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= NARROW_PX
    finally:
        page.set_viewport_size({"width": 1280, "height": 900})


def test_answers_have_a_strict_policy_and_are_not_kept(ann: Guest) -> None:
    answer = ann.page.goto("/models/Faulty")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    (cookie,) = ann.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")


def test_pages_work_without_javascript(browser: Browser, console: Service) -> None:
    with Guest(browser, console, java_script_enabled=False) as guest:
        page = guest.page
        page.get_by_label("Name contains").fill("faul")
        page.get_by_role("button", name="Filter").click()
        assert page.get_by_role("row").count() == 2  # with the head
        page.get_by_role("link", name="Faulty").click()
        assert page.get_by_role("heading", level=1).inner_text() == "Faulty"
        before = page.url
        page.get_by_role("link", name="Reload").click()
        assert page.url == before
        page.get_by_role("button", name="Sign out").click()
        page.goto("/models/Faulty")
        assert page.get_by_label("Password").count() == 1
        assert guest.complaints == []


# --- what updates itself -----------------------------------------------------------------------------------


def wait_for_updates(page: Page, number: int = UPDATES) -> None:
    """Wait until the page has asked for itself so many times, and got answers."""
    for _ in range(number):
        with page.expect_response(lambda answer: "x-carpool-live" in answer.request.headers):
            pass


def grow(stack: Stack) -> None:
    """Let more requests of Single wait: two, as the page may still count one that was withdrawn just now."""
    for _ in range(2):
        stack.send("Single", body="1")


SELECT: Final = """
element => {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
"""


def test_an_update_keeps_focus_what_was_written_and_what_is_selected(ann: Guest, shared: Stack) -> None:
    page = ann.page
    field = page.get_by_label("Name contains")
    field.fill("half of a na")
    row = page.get_by_role("row", name=re.compile("^Faulty"))
    waiting = row.get_by_role("cell").first
    figure = page.get_by_role("row", name=re.compile("^Single")).get_by_role("cell").first
    before = figure.inner_text()
    waiting.evaluate(SELECT)
    selected = page.evaluate("String(getSelection())")
    grow(shared)
    field.focus()
    waiting.evaluate(SELECT)
    wait_for_updates(page)
    assert page.evaluate("String(getSelection())") == selected
    assert page.locator("#live-state").inner_text().startswith("Held")
    assert figure.inner_text() == before
    page.evaluate("getSelection().removeAllRanges()")
    wait_until_changed(figure, before)
    assert page.evaluate("document.activeElement.id") == "q"
    assert field.input_value() == "half of a na"


def test_the_focus_stays_on_a_link_in_a_table_that_is_updated(ann: Guest, shared: Stack) -> None:
    page = ann.page
    page.get_by_role("link", name="Single").focus()
    figure = page.get_by_role("row", name=re.compile("^Single")).get_by_role("cell").first
    before = figure.inner_text()
    grow(shared)
    wait_until_changed(figure, before)
    assert page.evaluate("document.activeElement.textContent") == "Single"
    page.keyboard.press("Enter")
    page.wait_for_url("**/models/Single")


def test_a_stopped_page_changes_nothing(ann: Guest, shared: Stack) -> None:
    page, other = ann.page, ann.context.new_page()
    other.goto("/")
    figures = [
        one.get_by_role("row", name=re.compile("^Single")).get_by_role("cell").first for one in (page, other)
    ]
    assert page.get_by_role("button", name="Pause").count() == 0  # that is a word for models
    page.get_by_role("button", name="Stop updates of this page").click()
    before = figures[0].inner_text()
    grow(shared)
    wait_until_changed(figures[1], before)
    other.close()
    assert figures[0].inner_text() == before
    page.get_by_role("button", name="Update this page").click()
    wait_until_changed(figures[0], before)


def test_redis_away_is_said_with_the_last_figures_and_comes_back(ann: Guest, shared: Stack) -> None:
    page = ann.page
    wait_for_updates(page, 1)
    alert = page.get_by_text("Redis does not answer.")
    os.kill(shared.server.pid, signal.SIGSTOP)
    try:
        alert.wait_for()
        assert page.get_by_role("link", name="Single").is_visible()
        assert re.search(r"These figures are .* old", page.locator("main").inner_text())
        answer = page.goto("/")
        assert answer is not None and answer.ok
        alert.wait_for()
    finally:
        os.kill(shared.server.pid, signal.SIGCONT)
    alert.wait_for(state="hidden")
    shared.wait_for_model("Faulty")
    ann.complaints.clear()


# --- what an operator does, by mouse and by keyboard -------------------------------------------------------


class Mouse:
    """Uses a page with the mouse."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def use(self, control: Locator) -> None:
        """A link, a button or a box."""
        control.click()

    def write(self, field: Locator, text: str) -> None:
        """Replace what is in a field."""
        field.click(click_count=3)
        self.page.keyboard.type(text)


class Keyboard(Mouse):
    """Uses a page with the keyboard alone: the tab key leads to everything."""

    def use(self, control: Locator) -> None:
        self._reach(control)
        self.page.keyboard.press("Space" if control.get_attribute("type") == "checkbox" else "Enter")

    def write(self, field: Locator, text: str) -> None:
        self._reach(field)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)

    def _reach(self, control: Locator) -> None:
        """Press the tab key until the control has the focus, forward or backward, as is shorter."""
        control.wait_for()
        for _ in range(TRIES):
            steps: int = control.evaluate(STEPS)
            if not steps:
                return
            for _ in range(abs(steps)):
                self.page.keyboard.press("Tab" if steps > 0 else "Shift+Tab")
        raise AssertionError(f"the tab key does not lead to {control}")


# How often the tab key must be pressed to reach an element, or about that, where a region that scrolls takes
# the focus; negative: the same key with shift.
STEPS: Final = """
element => {
  const focused = document.activeElement;
  if (element === focused) return 0;
  const all = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, summary")]
    .filter(one => !one.disabled && one.tabIndex >= 0 && one.checkVisibility());
  const isBefore = one => one.compareDocumentPosition(focused) & Node.DOCUMENT_POSITION_FOLLOWING;
  const at = focused === document.body || all.includes(focused)
    ? all.indexOf(focused) : all.findLastIndex(isBefore);
  const count = all.length + 1;
  const steps = (all.indexOf(element) - at + count) % count;
  return steps > 0 && steps <= count / 2 ? steps : (steps - count) % count || -1;
}
"""


@pytest.fixture(params=[Mouse, Keyboard])
def hand(request: pytest.FixtureRequest, ann: Guest) -> Mouse:
    kind: type[Mouse] = request.param
    return kind(ann.page)


def button(hand: Mouse, name: str) -> Locator:
    return hand.page.get_by_role("button", name=name, exact=True)


def told(hand: Mouse) -> str:
    """What the page says that was done."""
    return hand.page.locator(".messages").inner_text()


def test_a_hundred_dead_letters_are_sent_again_and_answered(hand: Mouse, shared: Stack, unique: str) -> None:
    """All that match a search, after the page has asked; one more is dropped before."""
    names = [f"{unique}-{at}" for at in range(100)]
    dead(shared, "Faulty", [*names, f"{unique}-spoilt"])
    page = hand.page
    hand.use(page.get_by_role("link", name="Dead letters", exact=True).first)
    page.wait_for_url("**/models/Faulty/dead")
    hand.write(page.get_by_label("Reason or correlation ID contains"), unique)
    hand.use(button(hand, "Filter"))
    page.get_by_text("101 dead letters").wait_for()
    hand.use(page.get_by_role("checkbox").first)  # the newest
    hand.use(button(hand, "Drop selected"))
    assert page.get_by_role("heading", level=1).inner_text() == "Drop 1 request of Faulty?"
    hand.use(button(hand, "Drop"))
    assert told(hand) == "1 request of Faulty dropped."
    hand.use(button(hand, "Send all 100 again"))
    hand.use(button(hand, "Send again"))
    assert told(hand) == "100 requests of Faulty sent again."
    for name in names:
        assert shared.result("Faulty", name)["status"] == "OK"
    assert not shared.redis.exists(Keys("Faulty").result(f"{unique}-spoilt"))
    page.goto("/audit?model=Faulty&who=ann")
    row = page.get_by_role("row").nth(1).inner_text()
    assert "dead replay" in row and "100" in row


def test_a_setting_is_overridden_and_the_change_taken_back(hand: Mouse, shared: Stack, ann: Guest) -> None:
    page = hand.page
    page.goto("/models/Faulty/settings")
    hand.use(page.get_by_role("link", name="max_queue_size"))
    hand.write(page.get_by_label("Override by"), "77")
    hand.use(button(hand, "Override"))
    assert "max_queue_size is 77 (operator)" in told(hand)
    assert shared.redis.hgetall(Keys("Faulty").overrides) == {b"max_queue_size": b"77"}
    hand.use(page.get_by_role("button", name=re.compile("^Take back the change")).first)
    hand.use(button(hand, "Take back"))
    assert "max_queue_size is 10000" in told(hand)
    assert not shared.redis.exists(Keys("Faulty").overrides)
    page.goto("/models/Faulty/settings/max_queue_size")
    hand.write(page.get_by_label("Override by"), "many")
    hand.use(button(hand, "Override"))
    assert "max_queue_size" in page.get_by_role("alert").inner_text()
    ann.complaints.clear()  # of an answer with 400


def test_a_model_is_paused_and_resumed_and_a_worker_drained(hand: Mouse, shared: Stack) -> None:
    page, reason = hand.page, "bad weights"
    page.goto("/models/Faulty")
    hand.use(page.get_by_role("link", name="Control"))
    hand.write(page.get_by_label("Reason"), reason)
    hand.use(button(hand, "Pause"))
    hand.use(button(hand, "Pause"))
    assert "paused" in told(hand) and reason in told(hand)
    entry = shared.send("Faulty", body="1")
    hand.use(button(hand, "Resume"))
    assert "Faulty is resumed" in told(hand)
    assert shared.result("Faulty", entry)["status"] == "OK"
    hand.use(page.get_by_role("button", name=re.compile("^Drain ")))
    hand.use(button(hand, "Drain"))
    assert "drain" in told(hand)
    hand.use(page.get_by_role("button", name=re.compile("^Undo the drain")))
    assert "takes batches again" in told(hand)
    entry = shared.send("Faulty", body="1")
    assert shared.result("Faulty", entry)["status"] == "OK"


def test_a_waiting_request_is_found_and_withdrawn(hand: Mouse, shared: Stack, unique: str) -> None:
    shared.send("Single", body="1", correlation_id=unique)
    page = hand.page
    hand.use(page.get_by_role("link", name="Find", exact=True))
    hand.write(page.get_by_label("Correlation ID"), unique)
    hand.use(button(hand, "Find"))
    page.get_by_role("heading", name="Single: waiting").wait_for()
    hand.use(button(hand, "Withdraw"))
    hand.use(button(hand, "Withdraw"))  # the page asks
    assert told(hand) == f"{unique} is withdrawn: it was answered CANCELLED."
    assert shared.result("Single", unique)["status"] == "CANCELLED"


def test_all_of_many_dead_letters_can_be_reached(ann: Guest, shared: Stack) -> None:
    page = ann.page
    shared.redis.sadd("carpool:models", "Many")
    shared.redis.hset(Keys("Many").registration, "max_batch_size", 1)
    for first in range(0, LETTERS, 5000):
        dead(shared, "Many", [f"l{at}" for at in range(first, first + 5000)])
    wait_until(
        lambda: f"{LETTERS:,} dead letters, page 1 of 1,000" in html_of(page, "/models/Many/dead"),
        description="all dead letters have been read",
    )
    page.goto("/models/Many/dead")
    page.get_by_label("Go to page").fill("1000")
    page.get_by_role("button", name="Go", exact=True).click()
    assert page.get_by_role("link", name="l0", exact=True).is_visible(), "the oldest one is on the last page"
    page.get_by_label("Reason or correlation ID contains").fill("l31415")
    page.get_by_role("button", name="Filter").click()
    page.get_by_text("1 dead letter", exact=True).wait_for()
    shared.redis.srem("carpool:models", "Many")
    shared.redis.delete(Keys("Many").dead, Keys("Many").registration)
    # Until then the page of dead letters lists models, instead of showing the letters of the only one.
    wait_until(lambda: "Many" not in html_of(page, "/"), description="the page has forgotten the model")


# --- who may act -------------------------------------------------------------------------------------------


def test_a_viewer_sees_no_action_and_no_body_and_may_do_nothing(
    browser: Browser, console: Service, routes: list[Route], shared: Stack
) -> None:
    dead(shared, "Faulty", ["private"], body='"a secret"')
    with Guest(browser, console, "vic") as vic:
        page = vic.page
        token = page.locator("form[action='/sign-out'] input[name=csrf]").get_attribute("value")
        texts = Texts(page)
        for path in walk(routes, lambda path: links_of(texts[path])):
            html = texts[path]
            forms = {action for action in FORM.findall(html) if action != "/sign-out"}
            assert not forms, path
            assert "a secret" not in html
        (letter, _), *_ = shared.redis.xrevrange(Keys("Faulty").dead, count=1)
        path = f"/models/Faulty/dead/{letter.decode()}"
        assert page.request.get(f"{path}/body").status == 403
        assert "a secret" not in page.request.get(f"{path}?body=1").text()
        headers = {"Origin": vic.url}
        form = {"csrf": str(token), "action": "drop", "id": letter.decode(), "confirmed": "yes"}
        for to in ("dead/act", "pause", "resume", "drain", "settings", "withdraw"):
            refused = page.request.post(f"/models/Faulty/{to}", form=form, headers=headers)
            assert refused.status == 403, to
            assert "you are a viewer" in refused.text()
        assert shared.redis.xrange(Keys("Faulty").dead, letter, letter), "it is still there"


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another site, which sends a form to the console. `target` is its address, with the token."""

    target = ""
    token = ""

    def do_GET(self) -> None:
        page = (
            f"<!doctype html><title>elsewhere</title><form method=post action='{self.target}'>"
            f"<input name=csrf value='{self.token}'><button>Win</button></form>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of another site on this machine: browsers send it the same cookies, and only the origin
    tells."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_form_of_another_site_or_without_the_token_is_refused(ann: Guest, elsewhere: str) -> None:
    page = ann.page
    token = page.locator("form[action='/sign-out'] input[name=csrf]").get_attribute("value")
    Elsewhere.target, Elsewhere.token = f"{ann.url}/sign-out", str(token)
    page.goto(elsewhere)
    with page.expect_navigation() as navigation:
        page.get_by_role("button", name="Win").click()
    assert navigation.value.status == 403
    assert "another site" in page.get_by_role("alert").inner_text()
    page.goto("/")
    page.locator("form[action='/sign-out'] input[name=csrf]").evaluate("field => field.value = 'guessed'")
    with page.expect_navigation() as navigation:
        page.get_by_role("button", name="Sign out").click()
    assert navigation.value.status == 403
    page.goto("/")
    assert page.get_by_role("button", name="Sign out").is_visible(), "nobody was signed out"
    ann.complaints.clear()  # of the other site, and of answers with 403
