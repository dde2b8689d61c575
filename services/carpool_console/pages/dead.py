"""Dead letters of a model: a list, errors, one letter, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from carpool.keys import Keys
from carpool.shown import printable_lines
from carpool.store.dead_letters import DeadLetters
from carpool.store.dead_pages import LetterId, parse_id, show_id
from carpool.wire.audit import Actor
from carpool_console.access import (
    Form,
    RefusedError,
    console_of,
    done,
    form_of,
    operator,
    render,
    session_of,
    viewer,
)
from carpool_console.acting import actor_of, ask, keys_of, number_in_query, sees_bodies
from carpool_console.console import Console, Exact
from carpool_console.dead_actions import Action, Replays, Tally, act_on
from carpool_console.dead_index import DeadIndex, Filter
from carpool_console.dead_query import filter_parameters, filter_query, parse_filter, show_body
from carpool_console.formats import plural
from carpool_console.jobs import Job, TooManyJobsError

PAGE_LETTERS: Final = 50
GROUPS_MAX: Final = 200
AT_ONCE_MAX: Final = 100  # letters that a request of a page acts on; more are a job
MODELS_MAX: Final = 1000
_SPACE_S: Final = 0.5  # until a job asks again whether the queue has space
_COMPLETE_S: Final = 0.2
_VERBS: Final[dict[Action, str]] = {"replay": "Send again", "drop": "Drop"}


def routes(console: Console) -> list[Route]:
    """The pages, and where their forms go."""
    return [
        Route("/dead", _models, methods=["GET"]),
        Route("/models/{model}/dead", _list, methods=["GET"]),
        Route("/models/{model}/dead/errors", _errors, methods=["GET"]),
        Route("/models/{model}/dead/act", _act, methods=["POST"]),
        Route("/models/{model}/dead/{letter}", _letter, methods=["GET"]),
        Route("/models/{model}/dead/{letter}/body", _raw_body, methods=["GET"]),
    ]


class _Progress(NamedTuple):
    """How much of the dead letters the index has."""

    known: int
    total: int
    is_complete: bool


@viewer
def _models(request: Request) -> Response:
    """The models that have dead letters, those with the newest first."""
    rows = [row for row in console_of(request).reader.overview().rows if row.facts.figures.dead]
    rows.sort(key=lambda row: (row.facts.dead_newest_s is None, row.facts.dead_newest_s or 0.0))
    if len(rows) == 1:
        return RedirectResponse(f"/models/{rows[0].model}/dead", 303)
    return render(request, "dead_models.html", title="Dead letters", rows=rows[:MODELS_MAX])


@viewer
def _list(request: Request) -> Response:
    keys, which = keys_of(request), _filter(request.query_params)
    page = number_in_query(request, "page")
    with console_of(request).dead.look(keys.model) as index:
        found = index.find(which, first=(page - 1) * PAGE_LETTERS, count=PAGE_LETTERS)
        letters = [(letter, index.error_of(letter)) for letter in found.letters]
        shared = _shared(index, which)
    pages = max(1, -(-found.total // PAGE_LETTERS))
    if page > pages and found.total:
        return RedirectResponse(f"{request.url.path}{filter_query(which, page=pages)}", 303)
    return render(
        request,
        "dead.html",
        title=f"Dead letters of {keys.model}",
        model=keys.model,
        letters=letters,
        total=found.total,
        page=page,
        pages=pages,
        queries={number: filter_query(which, page=number) for number in _pages_near(page, pages)},
        filter_fields=filter_parameters(which),
        **shared,
    )


@viewer
def _errors(request: Request) -> Response:
    keys, which = keys_of(request), _filter(request.query_params)
    with console_of(request).dead.look(keys.model) as index:
        groups = index.groups(which)
        shared = _shared(index, which)
    return render(
        request,
        "dead_errors.html",
        title=f"Errors of dead letters of {keys.model}",
        model=keys.model,
        groups=[(group, filter_query(which._replace(error=group.key))) for group in groups[:GROUPS_MAX]],
        hidden=max(0, len(groups) - GROUPS_MAX),
        total=sum(group.number for group in groups),
        **shared,
    )


def _shared(index: DeadIndex, which: Filter) -> dict[str, Any]:
    """What both lists show."""
    until = which._replace(until=min(which.until, index.newest) if which.until else index.newest)
    return {
        "which": which,
        "written": filter_parameters(which),
        "query": filter_query(which),
        "sentence": index.sentence_of(which.error) if which.error else "",
        "without_error": filter_query(which._replace(error="")),
        "all_fields": filter_parameters(until),  # of the form that means all of these letters
        "progress": _Progress(len(index), index.length, index.is_complete),
        "now_ms": index.now_ms,
    }


def _pages_near(page: int, pages: int) -> list[int]:
    """The pages that a page has links to: the first, the last, and those near it."""
    near = {1, pages, *range(max(1, page - 2), min(pages, page + 2) + 1)}
    return sorted(near)


@viewer
def _letter(request: Request) -> Response:
    keys, letter_id = keys_of(request), _id(request.path_params["letter"])
    with console_of(request).link(keys.dead) as link:
        letter = DeadLetters(link, keys).find(request.path_params["letter"])
    if letter is None:
        console_of(request).dead.discard(keys.model, letter_id)
        raise RefusedError(
            404,
            f"{keys.model} has no dead letter {show_id(letter_id)}: it was sent again, dropped, or is older "
            "than its settings allow.",
        )
    may_see = sees_bodies(request)
    shown = show_body(letter.body) if may_see and request.query_params.get("body") == "1" else None
    if shown is not None:
        _tell_of_body(request, keys.model, letter.id)
    return render(
        request,
        "dead_letter.html",
        title=f"Dead letter {letter.id} of {keys.model}",
        model=keys.model,
        letter=letter,
        fields={name: letter.text(name) for name in letter.fields if name != "body"},
        body_bytes=None if letter.body is None else len(letter.body),
        may_see=may_see,
        shown=shown,
        body=Exact(printable_lines(shown.text)) if shown else "",
    )


@viewer
def _raw_body(request: Request) -> Response:
    keys, letter_id = keys_of(request), _id(request.path_params["letter"])
    if not sees_bodies(request):
        raise RefusedError(403, "Only operators see bodies, and you are a viewer.")
    with console_of(request).link(keys.dead) as link:
        letter = DeadLetters(link, keys).find(request.path_params["letter"])
    if letter is None or letter.body is None:
        raise RefusedError(404, f"{keys.model} has no dead letter of this ID, or its body is gone.")
    _tell_of_body(request, keys.model, letter.id)
    name = f"{keys.model}-{letter_id[0]}-{letter_id[1]}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(letter.body, media_type="application/octet-stream", headers=headers)


def _tell_of_body(request: Request, model: str, letter: str) -> None:
    who = session_of(request).user.name
    structlog.get_logger().info("body shown", model=model, letter=letter, who=who)


# --- actions -----------------------------------------------------------------------------------------------


@operator
def _act(request: Request) -> Response:
    keys, form = keys_of(request), form_of(request)
    action = _action(form)
    which = _filter(form) if form.get("all") == "yes" else None
    if which is not None and which.until is None:
        raise RefusedError(400, "The form does not say up to which letter; reload the page, and try again.")
    chosen = _chosen(form) if which is None else []
    number, seen, is_complete = len(chosen), len(chosen), True
    if which is not None:
        with console_of(request).dead.look(keys.model, _COMPLETE_S) as index:
            chosen, is_complete = index.ids(which), index.is_complete
            number = len(chosen)
        seen = max(number, _seen(form, which))
    if not number and is_complete:
        gone = f" {plural(seen, 'letter')} matched before." if seen else ""
        return done(request, f"No dead letter matches now, so nothing was done.{gone}", _back(keys, form))
    if action == "drop" or which is not None:
        question = _question(action, keys.model, number, is_complete)
        if (asked := ask(request, question, _VERBS[action], _WARNINGS[action])) is not None:
            return asked
    has_space = True
    if action == "replay":
        has_space = number <= _space(request, keys)
    if number > AT_ONCE_MAX or not is_complete or not has_space:
        return _start_job(request, keys, action, which, chosen, seen)
    return _act_at_once(request, keys, action, chosen, seen)


def _space(request: Request, keys: Keys) -> int:
    """How many requests may be sent at once. Raises RefusedError if none should be sent at all."""
    with console_of(request).link(keys.dead) as link:
        replays = Replays(link, keys, actor_of(request))
        if refusal := replays.refusal():
            raise RefusedError(409, f"Nothing was sent: {refusal}.")
        return replays.space()


_WARNINGS: Final[dict[Action, Sequence[str]]] = {
    "replay": (
        "Each request is sent under its correlation ID. It has no priority, lane, cost and expiration.",
    ),
    "drop": ("A dead letter that is dropped is gone: its request cannot be sent again.",),
}


def _question(action: Action, model: str, number: int, is_complete: bool) -> str:
    least = "" if is_complete else "at least "
    what = f"{least}{plural(number, 'request')} of {model}"
    return f"Send {what} again?" if action == "replay" else f"Drop {what}?"


def _act_at_once(
    request: Request, keys: Keys, action: Action, ids: Sequence[LetterId], seen: int
) -> Response:
    console, actor = console_of(request), actor_of(request)
    tally = Tally(seen, gone=seen - len(ids))

    def count(letter_id: LetterId, is_gone: bool) -> bool:
        if is_gone:
            console.dead.discard(keys.model, letter_id)
        return True

    with console.link(keys.dead) as link:
        act_on(DeadLetters(link, keys), ids, action, actor, tally, count)
    return done(request, f"{tally.describe(action, keys.model)}.", _back(keys, form_of(request)))


def _start_job(
    request: Request, keys: Keys, action: Action, which: Filter | None, chosen: Sequence[LetterId], seen: int
) -> Response:
    console, actor = console_of(request), actor_of(request)
    title = "send dead letters again" if action == "replay" else "drop dead letters"

    def work(job: Job) -> str:
        ids = chosen if which is None else _evaluated(console, keys, which, job)
        return _run(console, keys, action, ids, seen, actor, job)

    try:
        job = console.jobs.start(title, keys.model, actor.who, work)
    except TooManyJobsError as error:
        raise RefusedError(409, f"Nothing was done: {error}.") from None
    return done(request, f"A job has begun for {keys.model}: {title}.", f"/jobs/{job.id}")


def _evaluated(console: Console, keys: Keys, which: Filter, job: Job) -> Sequence[LetterId]:
    """The letters that match, once all that there are have been read."""
    while not job.is_stopping:
        with console.dead.look(keys.model) as index:
            if index.is_complete:
                return index.ids(which)
            known, total = len(index), index.length
        job.tell(f"reads which dead letters of {keys.model} there are", known, total)
        job.pause(0.05)
    return ()


def _run(
    console: Console, keys: Keys, action: Action, ids: Sequence[LetterId], seen: int, actor: Actor, job: Job
) -> str:
    """What a job does: act on each letter. Requests are sent while half of the queue is free."""
    before = max(0, seen - len(ids))  # letters that were gone before
    tally = Tally(len(ids) + before, gone=before)
    left = 0  # requests that may be sent before the queue is looked at again

    def count(letter_id: LetterId, is_gone: bool) -> bool:
        nonlocal left
        if is_gone:
            console.dead.discard(keys.model, letter_id)
        if tally.looked_at % 20 == 0:
            job.tell(f"{tally.describe(action, keys.model)}", tally.looked_at, tally.meant)
        left -= 1
        return not job.is_stopping and (action == "drop" or left > 0)

    with console.link(keys.dead) as link:
        letters, replays = DeadLetters(link, keys), Replays(link, keys, actor)
        while tally.looked_at < tally.meant and not job.is_stopping:
            if action == "replay":
                if refusal := replays.refusal():
                    return f"{tally.describe(action, keys.model)}. {refusal}"
                left = min(AT_ONCE_MAX, replays.space())
                if not left:
                    job.tell(
                        f"waits: half of the queue of {keys.model} is taken", tally.looked_at, tally.meant
                    )
                    job.pause(_SPACE_S)
                    continue
            act_on(letters, ids[tally.looked_at - before :], action, actor, tally, count)
    job.tell(tally.describe(action, keys.model), tally.looked_at, tally.meant)
    return tally.describe(action, keys.model)


# --- what requests name ------------------------------------------------------------------------------------


def _filter(parameters: Any) -> Filter:
    try:
        return parse_filter(parameters)
    except ValueError as error:
        raise RefusedError(400, f"{error}.") from None


def _id(text: str) -> LetterId:
    try:
        return parse_id(text)
    except ValueError as error:
        raise RefusedError(404, f"{error}.") from None


def _action(form: Form) -> Action:
    action = form.get("action")
    if action == "replay":
        return "replay"
    if action == "drop":
        return "drop"
    raise RefusedError(400, f"action: {action!r:.40} is neither replay nor drop.")


def _seen(form: Form, which: Filter) -> int:
    """How many letters the user saw that matched; 0 with a filter by age, which fewer match later."""
    text = form.get("seen", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    return int(text) if is_number and which.older_ms is None and which.newer_ms is None else 0


def _chosen(form: Form) -> list[LetterId]:
    ids = [_id(text) for text in dict.fromkeys(form.getlist("id"))]
    if not ids:
        raise RefusedError(400, "No dead letter is selected. Go back, select some, and try again.")
    if len(ids) > AT_ONCE_MAX:
        raise RefusedError(400, f"{len(ids):,} dead letters are selected; at most {AT_ONCE_MAX} at a time.")
    return ids


def _back(keys: Keys, form: Form) -> str:
    return form.get("back") or f"/models/{keys.model}/dead"
