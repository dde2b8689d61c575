"""Who may see and do what. Handlers are plain functions in `viewer` or `operator`, and run in threads.

    @viewer
    def page(request: Request) -> Response:
        return render(request, "model.html", title="square", ...)

    @operator
    def resume(request: Request) -> Response:
        ...
        return done(request, "square is resumed; 12 requests waited")

For a POST, both check that the form was sent by a page of this server, for this session.
"""

from __future__ import annotations

import functools
import hmac
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from carpool.errors import UnavailableError
from carpool.store.connection import CommandError
from carpool_console.console import Console
from carpool_console.proxies import is_same_origin, local_path
from carpool_console.sessions import Session
from carpool_console.users import NAME, Role, User

FORM_BYTES_MAX: Final = 256 * 1024
FIELDS_MAX: Final = 5000
LIVE_HEADER: Final = "x-carpool-live"  # of a request that updates a page; nobody reads its messages
SIGN_IN: Final = "/sign-in"
_FORM: Final = "application/x-www-form-urlencoded"

Handler = Callable[[Request], Response]
Endpoint = Callable[[Request], Awaitable[Response]]
Form = ImmutableMultiDict[str, str]


class RefusedError(Exception):
    """The answer is a page with a sentence that says why nothing was done, and what to do."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


# --- for handlers ------------------------------------------------------------------------------------------


def viewer(handler: Handler) -> Endpoint:
    """Whoever has signed in may use this."""
    return _checked(handler, "viewer")


def operator(handler: Handler) -> Endpoint:
    """Only operators may use this, and nobody if the console is read-only."""
    return _checked(handler, "operator")


def console_of(request: Request) -> Console:
    """The console."""
    console: Console = request.app.state.console
    return console


def session_of(request: Request) -> Session:
    """The session of the user who has signed in."""
    session: Session = request.state.session
    return session


def form_of(request: Request) -> Form:
    """The fields of a POST."""
    form: Form = request.state.form
    return form


def may_act(request: Request) -> bool:
    """Whether the user is an operator, and the console not read-only: templates have it as `can_act`."""
    return session_of(request).user.role == "operator" and not console_of(request).settings.read_only


def render(request: Request, template: str, *, title: str, status: int = 200, **context: Any) -> Response:
    """A page. Templates have `user`, `can_act`, `csrf`, `messages` and `path` besides."""
    session: Session | None = getattr(request.state, "session", None)
    is_live = LIVE_HEADER in request.headers
    shared = {
        "title": title,
        "path": request.url.path,
        "user": None if session is None else session.user,
        "is_of_proxy": session is not None and session.is_of_proxy,
        "can_act": session is not None and may_act(request),
        "csrf": "" if session is None else session.csrf,
        "messages": [] if session is None or is_live else session.take_messages(),
    }
    return HTMLResponse(console_of(request).html(template, {**shared, **context}), status)


def done(request: Request, sentence: str, to: str = "") -> Response:
    """An action is done. The user is sent to `to`, or to the form's field `back`, where the sentence is shown
    once."""
    session_of(request).tell(sentence)
    return RedirectResponse(local_path(to or form_of(request).get("back", "/")), 303)


# --- checks ------------------------------------------------------------------------------------------------


def _checked(handler: Handler, role: Role) -> Endpoint:
    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        session, token = current_session(request)
        if session is None:
            return _ask_to_sign_in(request)
        request.state.session = session
        if request.method == "POST":
            request.state.form = form = await read_form(request)
            if not hmac.compare_digest(form.get("csrf", "").encode(), session.csrf.encode()):
                raise RefusedError(
                    403, "This form is of another session. Go back, reload the page, and try again."
                )
        if role == "operator" and not may_act(request):
            why = (
                "this console is read-only" if console_of(request).settings.read_only else "you are a viewer"
            )
            raise RefusedError(403, f"Only operators may do this, and {why}. Nothing was changed.")
        response = await run_in_threadpool(_answered, handler, request)
        if token:
            set_cookie(request, response, token)
        return response

    return endpoint


def _answered(handler: Handler, request: Request) -> Response:
    try:
        return handler(request)
    except UnavailableError as error:
        raise RefusedError(503, f"Redis does not answer: {error.detail}") from None
    except CommandError as error:
        raise RefusedError(502, f"Redis refused a command: {error}") from None


def _ask_to_sign_in(request: Request) -> Response:
    if request.method == "POST" or LIVE_HEADER in request.headers:
        raise RefusedError(401, "You are signed out. Nothing was changed.")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{SIGN_IN}?next={quote(request.url.path + query, safe='')}", 303)


def current_session(request: Request) -> tuple[Session | None, str]:
    """The session that a request belongs to, and its token if that is new: a proxy signs a user in by naming
    it. A session ends when the file of users has the user no more, or another role or password."""
    console = console_of(request)
    named = console.proxies.user(request.scope)
    token = request.cookies.get(cookie_name(request), "")
    session = console.sessions.find(token) if token else None
    if named:
        user = _user_of_proxy(console, named)
        if session is not None and session.user == user:
            return session, ""
        if user is None:
            raise RefusedError(403, f"{named:.80} may not use this console.")
        token, session = console.sessions.start(user, is_of_proxy=True)
        return session, token
    if session is None or session.is_of_proxy:
        return None, ""
    if console.users.find(session.user.name) != session.user:
        console.sessions.end(token)
        return None, ""
    return session, ""


def _user_of_proxy(console: Console, name: str) -> User | None:
    known, role = console.users.find(name), console.settings.trusted_role
    if known is not None:
        return known
    return None if role == "none" or not NAME.fullmatch(name) else User(name, role)


async def read_form(request: Request) -> Form:
    """The fields of a form that a page of this server sent. Raises RefusedError."""
    if not is_same_origin(request.headers, is_secure=is_secure(request)):
        raise RefusedError(
            403,
            "The form was sent by a page of another site, or the address that the browser shows does not "
            "reach the console: a proxy must pass on the header Host.",
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise RefusedError(415, f"A form must be sent as {_FORM}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES_MAX:
            raise RefusedError(413, f"The form has more than {FORM_BYTES_MAX:,} bytes.")
    try:
        return Form(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:
        raise RefusedError(400, f"The form is malformed, or has more than {FIELDS_MAX:,} fields.") from None


# --- cookies -----------------------------------------------------------------------------------------------


def is_secure(request: Request) -> bool:
    """Whether the client's connection is encrypted, as far as is known."""
    return console_of(request).proxies.is_secure(request.scope)


def cookie_name(request: Request) -> str:
    """With the prefix for which browsers insist on TLS, where there is TLS."""
    name = console_of(request).cookie
    return f"__Host-{name}" if is_secure(request) else name


def set_cookie(request: Request, response: Response, token: str) -> None:
    """Let the browser keep the token of a session; an empty one ends it."""
    lasts_s = math.ceil(console_of(request).settings.session_s) if token else 0
    response.set_cookie(
        cookie_name(request),
        token,
        max_age=lasts_s,
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )
