"""A browser without a screen, for tests of the console: cookies, forms and pages over real HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import unescape
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from support.http import Answer, Connection
from support.stack import Service
from support.waiting import wait_until

_PRINTED: re.Pattern[str] = re.compile(r"Sign in as (\w+) with the password (\S+)")


def printed_password(console: Service) -> tuple[str, str]:
    """The name and the password that a console prints on its first start."""

    def find() -> re.Match[str] | None:
        return _PRINTED.search(console.log.read_text())

    found = wait_until(find, description="the console prints a password")
    assert found is not None
    return found[1], found[2]


class Served(Protocol):
    """What serves a console."""

    @property
    def url(self) -> str: ...


class Browser:
    """Keeps cookies, and sends what browsers send. It does not follow redirects."""

    def __init__(self, console: Served, headers: Mapping[str, str] | None = None) -> None:
        self.url = console.url
        self.origin = console.url
        self.cookies: dict[str, str] = {}
        self.headers = dict(headers or {})

    def get(self, path: str, **headers: str) -> Answer:
        """GET a page."""
        return self._send("GET", path, b"", headers)

    def post(
        self, path: str, fields: Mapping[str, str] | Sequence[tuple[str, str]], **headers: str
    ) -> Answer:
        """POST a form, from a page of the console."""
        sent = {"origin": self.origin, "content-type": "application/x-www-form-urlencoded", **headers}
        return self._send("POST", path, urlencode(fields).encode(), sent)

    def sign_in(self, name: str, password: str) -> Answer:
        """Fill in the form."""
        return self.post("/sign-in", {"name": name, "password": password, "next": "/"})

    def csrf(self, path: str = "/") -> str:
        """The token that the forms of a page have."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.get(path).body.decode())
        assert found is not None, "the page has no form with a token"
        return unescape(found[1])

    def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        lines = {"host": urlsplit(self.url).netloc, **self.headers, **headers}
        if self.cookies:
            lines["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        lines = {name.replace("_", "-"): value for name, value in lines.items() if value}
        with Connection(self.url) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            length = f"content-length: {len(body)}\r\n" if method == "POST" else ""
            connection.send(f"{method} {path} HTTP/1.1\r\n{head}{length}\r\n".encode() + body)
            answer = connection.answer()
        self._keep(answer.headers.get("set-cookie", ""))
        return answer

    def _keep(self, cookie: str) -> None:
        name, _, rest = cookie.partition("=")
        value = rest.partition(";")[0].strip('"')
        if value:
            self.cookies[name] = value
        elif name:
            self.cookies.pop(name, None)
