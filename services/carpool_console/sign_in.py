"""Signing in with a name and a password, and signing out."""

from __future__ import annotations

import math
import threading
from typing import Final

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from carpool_console.access import (
    SIGN_IN,
    RefusedError,
    console_of,
    cookie_name,
    current_session,
    read_form,
    render,
    session_of,
    set_cookie,
    viewer,
)
from carpool_console.console import Console
from carpool_console.proxies import local_path
from carpool_console.users import User, hash_of_nothing, is_password

PASSWORD_CHARS_MAX: Final = 200
WAITING_MAX: Final = 8  # attempts that wait for their turn: each takes 0.1 s and 32 MiB
_WRONG: Final = "The name or the password is wrong."


class _Checker:
    """Compares passwords, one after the other. For a name that nobody has it takes as long as for others."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._waiting = threading.BoundedSemaphore(WAITING_MAX)
        self._nobody = hash_of_nothing()

    def find(self, console: Console, name: str, password: str) -> User | None:
        """The user of this name and password. Raises RefusedError if too many others wait."""
        if not self._waiting.acquire(blocking=False):
            raise RefusedError(429, "Too many others try to sign in now. Try again in a moment.")
        try:
            with self._turn:
                user = console.users.find(name)
                kept = user.password if user is not None else ""
                is_right = is_password(kept or self._nobody, password)
                return user if is_right and kept else None
        finally:
            self._waiting.release()


def routes(console: Console) -> list[Route]:
    """The page of the form, and what is sent to it."""
    checker = _Checker()

    async def show(request: Request) -> Response:
        session, token = current_session(request)
        to = local_path(request.query_params.get("next", "/"))
        if session is not None:
            response = RedirectResponse(to, 303)
            if token:
                set_cookie(request, response, token)
            return response
        return _page(request, to)

    async def sign_in(request: Request) -> Response:
        form = await read_form(request)
        to = local_path(form.get("next", "/"))
        name, password = form.get("name", "")[:PASSWORD_CHARS_MAX], form.get("password", "")
        address = console.proxies.client_address(request.scope)
        if wait_s := console.attempts.wait_s(address):
            sentence = f"Too many attempts failed. Try again in {math.ceil(wait_s)} s."
            return _page(request, to, name, sentence, 429)
        log = structlog.get_logger()
        user = None
        if len(password) <= PASSWORD_CHARS_MAX:
            user = await run_in_threadpool(checker.find, console, name, password)
        if user is None:
            console.attempts.failed(address)
            log.warning("sign-in failed", user=name, address=address)
            return _page(request, to, name, _WRONG, 401)
        console.attempts.succeeded(address)
        log.info("signed in", user=user.name, role=user.role, address=address)
        token, _ = console.sessions.start(user)
        response = RedirectResponse(to, 303)
        set_cookie(request, response, token)
        return response

    return [
        Route(SIGN_IN, show, methods=["GET"]),
        Route(SIGN_IN, sign_in, methods=["POST"]),
        Route("/sign-out", _sign_out, methods=["POST"]),
    ]


@viewer
def _sign_out(request: Request) -> Response:
    console_of(request).sessions.end(request.cookies.get(cookie_name(request), ""))
    structlog.get_logger().info("signed out", user=session_of(request).user.name)
    response = RedirectResponse(SIGN_IN, 303)
    set_cookie(request, response, "")
    return response


def _page(request: Request, to: str, name: str = "", problem: str = "", status: int = 200) -> Response:
    return render(
        request, "sign_in.html", title="Sign in", status=status, next=to, name=name, problem=problem
    )
