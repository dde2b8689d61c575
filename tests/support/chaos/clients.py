"""Starts HTTP clients, and judges what they recorded."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from support.chaos.client import ANSWERED, BROKEN, GIVEN_UP, GIVEN_UP_S, SENT, SILENT
from support.chaos.producers import TESTS
from support.forking import ForkServer
from support.models.hashing import digest, first_word
from support.waiting import wait_until

CLIENT: Final = "support.chaos.client"
REPEATED_FORMS: Final = ("keyed", "later")  # which are sent until they have a result
REFUSALS: Final = (429, 502, 503, 504)  # answers that a client of a gateway in trouble has to expect
EXECUTIONS: Final = "EXECUTIONS"  # the variable that names the file of `hashing.Recorded`


class ClientProcess:
    """A process of HTTP clients. `addresses`: `host:port` of the gateways that they use."""

    def __init__(self, addresses: Sequence[str], model: str, name: str, home: Path) -> None:
        self._file = home / f"{name}.http.jsonl"
        arguments = [",".join(addresses), model, name, str(self._file)]
        with (home / f"{name}.http.err").open("wb") as errors:
            server = ForkServer.of_this_process()
            self._process = server.start(CLIENT, arguments, TESTS, os.environ, errors, errors)

    def answered(self) -> int:
        """How many answers the clients have had."""
        return self._file.read_text().count(f'"{ANSWERED}"') if self._file.exists() else 0

    def wait_for_more(self, answers: int) -> None:
        """Wait until they have so many more answers."""
        target = self.answered() + answers
        wait_until(lambda: self.answered() >= target, description="HTTP clients have answers")

    def stop(self) -> None:
        """Let the clients finish what they began; return once they have. May be called repeatedly."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(2 * GIVEN_UP_S)

    def kill(self) -> None:
        """SIGKILL; return once the process has ended."""
        self._process.kill()
        self._process.wait(10)

    def records(self) -> list[dict[str, Any]]:
        """All records, in order."""
        return [json.loads(line) for line in self._file.read_text().splitlines()]


class HttpReport(NamedTuple):
    """How the requests of HTTP clients ended: counts, and the names of those with which something was wrong.

    `resent`: calls beyond the first; `refused`: answers that say that the gateway cannot serve at the moment;
    `broken`: connections that ended before the answer to a request that is not repeated.
    `lost`: no answer on a connection that was open, or no result however often it was sent; `misrouted`: with
    a result that is not its own; `different`: with two results; `repeated`: executed more than once;
    `failed`: with any other error."""

    requests: int
    results: int
    resent: int
    refused: int
    broken: int
    lost: Sequence[str]
    misrouted: Sequence[str]
    different: Sequence[str]
    repeated: Sequence[str]
    failed: Sequence[str]

    def is_faultless(self, *, executes_once: bool) -> bool:
        """Whether nothing was wrong. Without `executes_once`, a request may be executed more than once."""
        wrong = self.lost or self.misrouted or self.different or self.failed
        return not (wrong or (executes_once and self.repeated))

    def __str__(self) -> str:
        wrong = {
            name: getattr(self, name) for name in ("lost", "misrouted", "different", "repeated", "failed")
        }
        return (
            f"{self.requests:,} requests of HTTP, {self.results:,} results, {self.resent} sent again, "
            f"{self.refused} refused, {self.broken} broken, "
            + ", ".join(
                f"{name} {len(names)} {list(names[:3]) or ''}".rstrip() for name, names in wrong.items()
            )
        )


@dataclass(slots=True)
class _Request:
    form: str
    payloads: list[str]
    calls: list[Mapping[str, Any]] = field(default_factory=list)  # the records of their ends

    @property
    def results(self) -> list[Mapping[str, Any]]:
        return [call for call in self.calls if call.get("code") == 200]


def read_executions(path: Path) -> dict[str, list[str]]:
    """The correlation IDs with which each payload was executed, by its first word."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else ():
        correlation_id, _, word = line.partition(" ")
        found[word].append(correlation_id)
    return found


def judge(records: Iterable[Mapping[str, Any]], executions: Mapping[str, Sequence[str]]) -> HttpReport:
    """The report on these records. `executions`: see `read_executions`."""
    requests: dict[str, _Request] = {}
    for record in records:
        if record["what"] == SENT:
            requests[record["name"]] = _Request(record["form"], record["payloads"])
        else:
            requests[record["name"]].calls.append(record)
    counts: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {
        kind: [] for kind in ("lost", "misrouted", "different", "repeated", "failed")
    }
    for name, request in requests.items():
        is_repeated = request.form in REPEATED_FORMS
        whats = [call["what"] for call in request.calls]
        codes = [call.get("code") for call in request.calls if call["what"] == ANSWERED]
        counts["results"] += sum(1 for call in request.results[:1] for result in call["results"] if result)
        counts["resent"] += max(0, len(request.calls) - 1)
        counts["refused"] += sum(code in REFUSALS for code in codes)
        counts["broken"] += BROKEN in whats and not is_repeated
        if GIVEN_UP in whats or not whats or (SILENT in whats and not is_repeated):
            wrong["lost"].append(name)
        if not all(_is_own(request.payloads, call["results"], executions) for call in request.results):
            wrong["misrouted"].append(name)
        if len({(call["correlation_id"], *call["results"]) for call in request.results}) > 1:
            wrong["different"].append(name)
        if any(code not in (200, 202, *REFUSALS) for code in codes):
            wrong["failed"].append(name)
        # Without a key a request that was sent twice, by a proxy, may be executed twice.
        if is_repeated and any(len(executions.get(first_word(one), ())) > 1 for one in request.payloads):
            wrong["repeated"].append(name)
    return HttpReport(
        sum(len(request.payloads) for request in requests.values()),
        counts["results"],
        counts["resent"],
        counts["refused"],
        counts["broken"],
        *wrong.values(),
    )


def _is_own(
    payloads: Sequence[str], results: Sequence[str | None], executions: Mapping[str, Sequence[str]]
) -> bool:
    """Whether each result is that of the payload in its place, for one of the executions of that. None: there
    is none, and the client was told so."""
    return len(results) == len(payloads) and all(
        result is None
        or result in {digest(name, payload) for name in executions.get(first_word(payload), ())}
        for payload, result in zip(payloads, results, strict=True)
    )
