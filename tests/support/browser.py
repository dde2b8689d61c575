"""A real browser for tests: Debian's Chromium, driven by Playwright, with axe in it.

    with chromium() as browser, Visitor(browser, console.url) as visitor:
        visitor.page.goto("/")
        assert visitor.flaws() == []
        assert visitor.complaints == []

Playwright runs an event loop in the thread that uses it. So no other loop can run in that thread while a
browser is open: tests of a file with one are no coroutines.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import pytest

from support.waiting import EVENTUALLY_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, Request

WIDTH, HEIGHT = 1280, 900
_FLAGS: Final = (
    "--disable-gpu",
    "--in-process-gpu",  # a process less that each new page is sent to
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
)
# Nothing of what rules are content with, and no style sheets loaded a second time, which no rule needs.
_AXE_OPTIONS: Final = {
    "resultTypes": ["violations"],
    "preload": False,
    "elementRef": False,
    "selectors": False,
}
# Only what is told leaves the browser: all results are some megabytes.
_RUN_AXE: Final = """
async options => (await axe.run(options)).violations.map(flaw => ({
  id: flaw.id, impact: flaw.impact, help: flaw.help,
  places: flaw.nodes.slice(0, 3).map(node => node.html.slice(0, 200)),
}))
"""


# The first one has no window, and takes two thirds of the CPU time that tests take with the others.
_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def tool() -> str:
    """The path of Chromium. If missing, skip, or fail if CARPOOL_REQUIRED lists it."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        _missing(f"chromium is missing; on Debian: apt-get install --no-install-recommends {_NAMES[0]}")
    return path


def _missing(sentence: str) -> NoReturn:
    if "chromium" in os.environ.get("CARPOOL_REQUIRED", "").replace(",", " ").split():
        pytest.fail(sentence)
    pytest.skip(sentence)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, until the end of the block. It has no sandbox, because tests may run as root."""
    path = tool()
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("playwright is missing: make tools")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, chromium_sandbox=False, args=[*_FLAGS], timeout=EVENTUALLY_S * 1000
        )
        try:
            yield browser
        finally:
            browser.close()


def wait_until_changed(part: Locator, before: str) -> None:
    """Wait until a part of a page has another text. The browser looks now and then, which takes less CPU time
    than to ask it all the time."""
    from playwright.sync_api import expect

    expect(part).not_to_have_text(before, timeout=EVENTUALLY_S * 1000)


class Visitor:
    """One visitor of a site: a page, with cookies of its own.

    `options`: those of Playwright's `new_context`, such as `java_script_enabled` and `bypass_csp`.
    `complaints`: what the browser said against the site: errors of programs, violations of its policy, and
    requests to other sites. What a test provokes it removes from there.
    """

    def __init__(self, browser: Browser, url: str, *, width: int = WIDTH, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.context = browser.new_context(
            base_url=url, viewport={"width": width, "height": HEIGHT}, reduced_motion="reduce", **options
        )
        self.context.set_default_timeout(EVENTUALLY_S * 1000)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._told)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._requested)
        self.page.on("dialog", self._asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.close()

    def _told(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type} on {self.page.url}: {message.text}")

    def _requested(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.complaints.append(f"a request to {request.url:.200}")

    def _asked(self, dialog: Dialog) -> None:
        self.complaints.append(f"a dialog: {dialog.message:.200}")
        dialog.dismiss()

    def flaws(self, *rules: str) -> list[str]:
        """What axe finds on the page by these rules, or by all: the rule, how bad it is, and some places. It
        needs JavaScript."""
        from axe_playwright_python.base import AXE_SCRIPT

        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE_SCRIPT)
        only = {"runOnly": {"type": "rule", "values": [*rules]}} if rules else {}
        found: list[dict[str, Any]] = self.page.evaluate(_RUN_AXE, {**_AXE_OPTIONS, **only})
        return [
            f"{self.page.url}: {flaw['id']} ({flaw['impact']}): {flaw['help']}: {'; '.join(flaw['places'])}"
            for flaw in found
        ]

    def overflow_px(self) -> int:
        """By how much the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return width
