"""What handlers that act have in common: who acts, on which model; and pages that ask first.

A page that asks is the answer to a POST without the field `confirmed`. Its form has all fields of that POST.
So it works without JavaScript, and what is asked is what is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from carpool.keys import Keys
from carpool.wire.audit import Actor
from carpool_console.access import RefusedError, console_of, form_of, render, session_of
from carpool_console.proxies import local_path

_NOT_REPEATED = ("csrf", "confirmed")


def actor_of(request: Request) -> Actor:
    """The user who has signed in, as the audit has it."""
    return Actor(session_of(request).user.name, "console")


def keys_of(request: Request) -> Keys:
    """The keys of the model in the path. Raises RefusedError."""
    return keys_named(request, request.path_params["model"])


def keys_named(request: Request, model: str) -> Keys:
    """The keys of a model. Raises RefusedError if the name is not valid."""
    try:
        return Keys(model, console_of(request).prefix)
    except ValueError as error:
        raise RefusedError(404, f"{error}.") from None


def number_in_query(request: Request, name: str, default: int = 1, highest: int = 1_000_000) -> int:
    """A number from 1 on in the query. Raises RefusedError."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= highest):
        raise RefusedError(400, f"{name}: {text!r:.40} is no number from 1 to {highest:,}.")
    return int(text)


def sees_bodies(request: Request) -> bool:
    """Whether the user may see bodies: operators may, also while the console is read-only."""
    return session_of(request).user.role == "operator"


def ask(request: Request, question: str, button: str, consequences: Sequence[str] = ()) -> Response | None:
    """The page that asks; None if the user has confirmed. `button`: the verb on the button."""
    form = form_of(request)
    if form.get("confirmed") == "yes":
        return None
    fields = [(name, value) for name, value in form.multi_items() if name not in _NOT_REPEATED]
    return render(
        request,
        "confirm.html",
        title=question,
        question=question,
        button=button,
        consequences=consequences,
        fields=fields,
        back=local_path(form.get("back", "/")),
    )
