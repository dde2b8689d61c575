"""A request by its correlation ID: where it is now, why, and how to withdraw it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.cluster import is_cluster
from carpool.keys import CORRELATION_ID, Keys
from carpool.model_settings import ModelKind
from carpool.store.connection import Link
from carpool.store.directory import Directory, no_errors
from carpool.store.operations import Operations
from carpool.store.whereabouts import find, find_in_each
from carpool.store.withdrawals import withdraw
from carpool.wire.audit import Actor
from carpool.wire.whereabouts import Whereabouts
from carpool_console.access import RefusedError, console_of, done, form_of, operator, render, viewer
from carpool_console.acting import actor_of, ask, keys_named, keys_of
from carpool_console.console import Console

ANSWER_S: Final = 5.0  # a batcher is awaited: a search through a million waiting requests takes 1 to 3 s
ALL_S: Final = 6.0  # for all models together
_OF_EACH_S: Final = 1.0
_TOGETHER: Final = 50  # models whose batchers are asked at the same time
_WITHDRAWN_S: Final = 2.0  # until the batcher has done what it was asked
_LETTERS_MAX: Final = 8
_NOBODY: Final = Actor("", "console")  # only looks


class Found(NamedTuple):
    """Where requests of one model are. `letters`: names of dead letters. `can_withdraw`: some may be."""

    where: Whereabouts
    lines: Sequence[str]
    letters: Sequence[str]
    can_withdraw: bool


def routes(console: Console) -> list[Route]:
    """The page, and where its form goes."""
    return [
        Route("/find", _find, methods=["GET"]),
        Route("/models/{model}/withdraw", _withdraw, methods=["POST"]),
    ]


@viewer
def _find(request: Request) -> Response:
    console = console_of(request)
    model, wanted = (request.query_params.get(name, "").strip() for name in ("model", "id"))
    found: list[Found] = []
    left_out: Sequence[str] = ()
    problem = ""
    if wanted and not CORRELATION_ID.fullmatch(wanted):
        problem = "A correlation ID has 1 to 128 letters, digits, and characters of . _ : -"
    elif wanted and model:
        found = [_of_model(console, keys_named(request, model), wanted, ANSWER_S)]
    elif wanted:
        found, left_out = _of_all(console, wanted)
    return render(
        request,
        "find.html",
        title="Find a request",
        model=model,
        wanted=wanted,
        models=[row.model for row in console.reader.overview().rows],
        problem=problem,
        found=found,
        left_out=left_out,
    )


def _of_model(console: Console, keys: Keys, wanted: str, timeout_s: float) -> Found:
    with console.link(keys.requests) as link:
        where = find(link, keys, wanted, timeout_s=timeout_s, with_dead=False)
        return _completed(console, link, keys, where)


def _completed(console: Console, link: Link, keys: Keys, where: Whereabouts) -> Found:
    """With its dead letters, whether its model is paused, and whether it can be withdrawn."""
    paused = Operations(link, keys.prefix, _NOBODY).paused(keys.model) if where.waiting else None
    can_withdraw = bool(where.waiting) or (bool(where.in_flight) and _is_reached_in_flight(link, keys))
    letters = _letters(console, keys, where.correlation_id)
    lines = where.lines()[1:]
    if paused is not None:
        lines = [f"why: the model is {paused.describe()}", *(line for line in lines if line[:4] != "why:")]
    if letters:
        lines = [line for line in lines if not line.startswith("one of these is true")]
    return Found(where, lines, letters, can_withdraw)


def _letters(console: Console, keys: Keys, wanted: str) -> list[str]:
    """The names of its dead letters, from the index, which may not be complete yet."""
    with console.dead.look(keys.model) as index:
        return [letter.name for letter in index.of_request(wanted)[:_LETTERS_MAX]]


def _is_reached_in_flight(link: Link, keys: Keys) -> bool:
    """Whether the model looks for withdrawals of what it executes."""
    registered, _ = Directory(link, keys.prefix).settings(keys.model)
    return ModelKind.of(registered) is ModelKind.STEPPING


def _of_all(console: Console, wanted: str) -> tuple[list[Found], list[str]]:
    """Of all models those that know something, and the models for which there was no time."""
    until_s = time.monotonic() + ALL_S
    models = [Keys(row.model, console.prefix) for row in console.reader.overview().rows]
    found: list[Found] = []
    step = 1 if is_cluster(console.settings.redis_url) else _TOGETHER
    for at in range(0, len(models), step):
        if time.monotonic() > until_s:
            return found, [keys.model for keys in models[at:]]
        together = models[at : at + step]
        with console.link(together[0].requests) as link:
            looks = find_in_each(link, together, wanted, timeout_s=_OF_EACH_S, with_dead=False)
            letters = no_errors(link.call_many(*[("XLEN", keys.dead) for keys in together]))
            for keys, where, number in zip(together, looks, letters, strict=True):
                is_open = where.state != "unknown" or where.batcher == "silent" or where.is_reading
                if is_open or number:
                    one = _completed(console, link, keys, where)
                    if is_open or one.letters:
                        found.append(one)
    return found, []


@operator
def _withdraw(request: Request) -> Response:
    keys, form = keys_of(request), form_of(request)
    wanted = form.get("id", "")
    question = f"Withdraw {wanted:.128} of {keys.model}?"
    asked = ask(request, question, "Withdraw", ["What waits is answered CANCELLED, and is not executed."])
    if asked is not None:
        return asked
    console = console_of(request)
    with console.link(keys.requests) as link:
        try:
            withdraw(link, keys, wanted, actor=actor_of(request))
        except ValueError as error:
            raise RefusedError(400, f"{error}.") from None
        sentence = _became(link, keys, wanted)
    return done(request, sentence, f"/find?model={keys.model}&id={wanted}")


def _became(link: Link, keys: Keys, wanted: str) -> str:
    """What became of a request that was withdrawn, as its batcher says."""
    until_s = time.monotonic() + _WITHDRAWN_S
    while True:
        where = find(link, keys, wanted, timeout_s=ANSWER_S, with_dead=False)
        if any(one.reason == "withdrawn" for one in where.refused):
            return f"{wanted} is withdrawn: it was answered CANCELLED."
        if where.batcher != "answered":
            return f"{wanted} will be withdrawn, if it still waits, once a batcher of {keys.model} is active."
        if where.state not in ("waiting", "streaming") or time.monotonic() > until_s:
            return f"{wanted} was asked to be withdrawn; it is {where.state} now."
        time.sleep(0.05)
