"""`carpool dead`: requests that were given up, listed, shown, sent again or dropped."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode, SettingsConfigDict

from carpool.keys import Keys
from carpool.messages.requests import JSON
from carpool.messages.results import KeptDeadLetter
from carpool.settings import ConnectionSettings, Seconds, read_settings
from carpool.shown import complain, printable, printable_json
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.dead_letters import DeadLetters
from carpool.store.directory import Directory
from carpool_cli.models import describe_unregistered
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, count, duration

_HEADINGS: Final = ("model", "id", "age", "attempts", "body", "correlation ID", "reason")
_ID: Final = re.compile(r"\d+-\d+")
_TEXT_CHARS_MAX: Final = 2000  # of a body that is shown to a person


def _split(joined: object) -> object:
    """pydantic-settings joins positional arguments with commas before they arrive here."""
    return joined.split(",") if isinstance(joined, str) and joined else joined


class DeadSettings(ConnectionSettings):
    """List the requests that were given up, look at one, send them again, or drop them.

    A request is given up, and kept as a dead letter, when its model process or worker died repeatedly while
    it was executed alone. Its producer was answered ABORTED.

    list [MODEL]           dead letters of one model, or of all, the oldest first
    show MODEL ID          one with its body; --raw writes the bytes of the body and nothing else
    replay MODEL ID...     send the requests again, under their correlation IDs, and delete the dead letters
    drop MODEL ID...       delete the dead letters

    Instead of IDs, replay and drop take --all. What --all and list mean is limited by --reason, --older-s and
    --newer-s. A request that is sent again has no priority, lane, cost and expiration.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    action: CliPositionalArg[Literal["list", "show", "replay", "drop"]] = Field(
        "list", description="what to do"
    )
    model: CliPositionalArg[str] = Field("", description="the model's name")
    ids: CliPositionalArg[Annotated[list[str], NoDecode, BeforeValidator(_split)]] = Field(
        [], description="IDs as `carpool dead list` shows them"
    )
    all: bool = Field(False, description="replay or drop all dead letters of the model that are meant")
    reason: str = Field("", description="only those whose reason contains this text")
    older_s: Seconds | None = Field(None, ge=0, description="only those given up more than this time ago (s)")
    newer_s: Seconds | None = Field(None, ge=0, description="only those given up less than this time ago (s)")
    raw: bool = Field(False, description="with show: the bytes of the body and nothing else")
    as_json: bool = Field(False, description="with list and show: print JSON")

    def mistake(self) -> str:
        """What is wrong with these arguments together; empty if nothing is."""
        wrong = [text for text in self.ids if not _ID.fullmatch(text)]
        if wrong:
            return f"{wrong[0]!r:.80} is no ID; `carpool dead list` shows them, such as 1795246747119-0"
        if self.action != "list" and not self.model:
            return f"{self.action} needs the name of a model, and IDs; `carpool dead list` shows both"
        if self.action == "list":
            return "list takes no IDs; `carpool dead show MODEL ID` shows one" if self.ids else ""
        if self.action == "show":
            return "" if len(self.ids) == 1 and not self.all else "show needs the ID of one dead letter"
        if self.all == bool(self.ids):
            return f"{self.action} needs either IDs or --all"
        return ""


class Listed(NamedTuple):
    """A dead letter without its body. The names are the keys of `carpool dead list --json`."""

    model: str
    id: str
    age_s: float
    attempts: int
    body_bytes: int
    correlation_id: str
    reason: str


def main(argv: Sequence[str]) -> int:
    """Do what is asked. Returns 1 if Redis fails or a dead letter is gone, 2 if the arguments are wrong."""
    settings = read_settings(DeadSettings, argv, "carpool dead")
    mistake = settings.mistake()
    if mistake:
        return _fail(mistake, 2)
    link = Link(settings.redis_url, name=f"carpool-dead-{os.getpid()}")
    try:
        return _ACTIONS[settings.action](settings, link)
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()


def _fail(error: str, status: int = 1) -> int:
    complain(f"carpool dead: {error}")
    return status


def _list(settings: DeadSettings, link: Link) -> int:
    models = Directory(link, settings.prefix).models()
    is_unknown = settings.model and settings.model not in models
    if is_unknown and not link.call("XLEN", Keys(settings.model, settings.prefix).dead):
        return _fail(describe_unregistered(settings.model, models))
    chosen = [settings.model] if settings.model else models
    listed = [
        _listed(model, letter, now_ms)
        for model in chosen
        for letter, now_ms in _chosen(settings, link, model)
    ]
    if settings.as_json:
        print(printable_json([letter._asdict() for letter in listed]))
    elif listed:
        Screen().print_table(build_table([_HEADINGS, *map(_row, listed)], has_prose=True))
    else:
        Screen().print("no dead letters found")
    for model in chosen:
        _tell_dropped(model, DeadLetters(link, Keys(model, settings.prefix)).dropped())
    return 0


def _tell_dropped(model: str, dropped: Mapping[str, int]) -> None:
    if dropped:
        by_setting = ", ".join(f"{number:,} over {name}" for name, number in dropped.items())
        complain(f"carpool dead: older ones of {model} were dropped: {by_setting}")


def _chosen(settings: DeadSettings, link: Link, model: str) -> Iterator[tuple[KeptDeadLetter, int]]:
    """The dead letters that are meant if no IDs are given, each with the present time (ms)."""
    now_ms = int(link.call("TIME")[0]) * 1000
    for letter in DeadLetters(link, Keys(model, settings.prefix)):
        age_s = (now_ms - letter.at_ms) / 1000
        too_young = settings.older_s is not None and age_s < settings.older_s
        too_old = settings.newer_s is not None and age_s > settings.newer_s
        if settings.reason in letter.reason and not too_young and not too_old:
            yield letter, now_ms


def _listed(model: str, letter: KeptDeadLetter, now_ms: int) -> Listed:
    size = len(letter.body or b"")
    age_s = max(0, now_ms - letter.at_ms) / 1000
    return Listed(model, letter.id, age_s, letter.attempts, size, letter.correlation_id, letter.reason)


def _row(letter: Listed) -> tuple[str, ...]:
    """The cells below `_HEADINGS`."""
    return (
        letter.model,
        letter.id,
        duration(letter.age_s),
        f"{letter.attempts:,}",
        f"{letter.body_bytes:,} B",
        letter.correlation_id,
        letter.reason,
    )


def _show(settings: DeadSettings, link: Link) -> int:
    (letter_id,) = settings.ids
    letter = DeadLetters(link, Keys(settings.model, settings.prefix)).find(letter_id)
    if letter is None:
        return _fail(_gone(settings.model, letter_id))
    if settings.raw:
        if letter.body is None:
            return _fail(f"dead letter {letter_id} has no body: it was under a key of its own, and is gone")
        sys.stdout.buffer.write(letter.body)
        sys.stdout.buffer.flush()
        return 0
    fields = {name: letter.text(name) for name in letter.fields if name != "body"}
    shown = {"id": letter.id, "reason": letter.reason, "attempts": letter.attempts, **fields}
    if settings.as_json:
        print(printable_json({**shown, **_body_as_json(letter)}))
        return 0
    screen = Screen()
    for name, value in shown.items():
        screen.print(f"{printable(name) + ':':<16} {printable(str(value))}")
    screen.print(f"{'body:':<16} {_body_as_text(letter)}")
    return 0


def _body_as_json(letter: KeptDeadLetter) -> dict[str, Any]:
    """`body`, a value, if it is JSON; else `body_base64`, if there is one."""
    if letter.body is None:
        return {}
    if letter.text("content_type") == JSON:
        try:
            return {"body": json.loads(letter.body)}
        except ValueError:
            pass
    return {"body_base64": base64.b64encode(letter.body).decode()}


def _body_as_text(letter: KeptDeadLetter) -> str:
    if letter.body is None:
        return "gone: it was under a key of its own"
    size = f"{len(letter.body):,} B; --raw writes them"
    try:
        text = letter.body.decode()
    except UnicodeDecodeError:
        return size
    if not text.isprintable():
        return size
    return text if len(text) <= _TEXT_CHARS_MAX else f"{text[:_TEXT_CHARS_MAX]} ... ({size})"


def _replay(settings: DeadSettings, link: Link) -> int:
    models = Directory(link, settings.prefix).models()
    if settings.model not in models:  # the request would wait until one day a model has this name
        return _fail(describe_unregistered(settings.model, models))
    return _do_with_each(settings, link, "sent again")


def _drop(settings: DeadSettings, link: Link) -> int:
    return _do_with_each(settings, link, "dropped")


def _do_with_each(settings: DeadSettings, link: Link, done: str) -> int:
    """Replay or drop the dead letters that are meant, and say how many that were."""
    letters = DeadLetters(link, Keys(settings.model, settings.prefix))
    number, status, actor = 0, 0, this_operator()
    for letter in _meant(settings, link, letters):
        if isinstance(letter, str):
            status = _fail(_gone(settings.model, letter))
        elif settings.action == "replay" and letter.body is None:
            status = _fail(f"dead letter {letter.id} is left as it is: its body is gone")
        else:
            remove = letters.replay if settings.action == "replay" else letters.drop
            number += remove(letter, actor=actor)
    Screen().print(f"{count(number, 'request')} of {settings.model} {done}")
    return status


def _meant(settings: DeadSettings, link: Link, letters: DeadLetters) -> Iterator[KeptDeadLetter | str]:
    """The dead letters to do something with; the ID alone of one that does not exist."""
    for letter_id in dict.fromkeys(settings.ids):
        yield letters.find(letter_id) or letter_id
    if settings.all:
        for letter, _ in _chosen(settings, link, settings.model):
            yield letter


def _gone(model: str, letter_id: str) -> str:
    return f"{model} has no dead letter {letter_id}; `carpool dead list {model}` shows those that there are"


_ACTIONS: Final = {"list": _list, "show": _show, "replay": _replay, "drop": _drop}
