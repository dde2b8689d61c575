"""The same producer in seven languages, compared with PROTOCOL.md and the golden vectors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest

from carpool.keys import Keys
from clients.conftest import REQUIRED, Build, output, skip_or_fail
from clients.languages import HERE, LANGUAGES, CommandFailedError, Language, Part, c_links, missing, runs
from contract.test_vectors import as_bytes, lists_of
from support.stack import Stack

REQUESTS: Final = 200
EXPIRATION_MS: Final = 50
MEASURED: Final = ("batch_size", "queue_us", "compute_us")

Facts = dict[str, Any]


def golden(file: str, of: str, name: str) -> Facts:
    """A case of the golden vectors."""
    return next(case for case in lists_of(file)[of] if case["name"] == name)


def envelope(name: str, **facts: Any) -> Facts:
    """A golden envelope with some fields replaced."""
    return {**json.loads(golden("results.json", "envelopes", name)["envelope"]), **facts}


@pytest.mark.parametrize("url_fixture", ["open_url", "locked_url"])
def test_producer_in_each_language_gets_the_documented_results(
    language: Language, build: Build, live: Stack, url_fixture: str, request: pytest.FixtureRequest
) -> None:
    command = build(language, HERE / language.name / language.source)
    url: str = request.getfixturevalue(url_fixture)

    printed = [json.loads(line) for line in output(command, REDIS_URL=url).splitlines()]
    steps: dict[str, Facts] = {facts.pop("step"): facts for facts in printed}

    assert list(steps) == ["json", "tensor", "stream", "expiration", "invalid", "withdrawal"]
    for facts in steps.values():
        assert "id" not in facts or re.fullmatch(r"\d+-\d+", facts["id"])
    assert_answered(steps["json"])
    assert_transposed(steps["tensor"])
    assert_all_answered(steps["stream"], live)
    assert_refused(
        steps["expiration"],
        "DEADLINE_EXCEEDED",
        f"expired: still waiting {EXPIRATION_MS} ms after its arrival; no worker serves its model now",
    )
    field = golden("requests.json", "cases", "priority '10'")["becomes"][0]["refusal"]["field"]
    assert_refused(steps["invalid"], "INVALID_ARGUMENT", f"{field}: must be a whole number from 0 to 9")
    assert steps["withdrawal"].pop("removed") == 1
    assert_refused(steps["withdrawal"], "CANCELLED", "it was withdrawn")
    assert_no_results_remain(live)


def assert_answered(facts: Facts) -> None:
    measured = {name: facts["envelope"][name] for name in MEASURED}
    assert facts["envelope"] == envelope("a number in JSON", correlation_id=facts["id"], **measured)
    assert min(measured.values()) > 0


def assert_transposed(facts: Facts) -> None:
    """All languages use the shortest msgpack form of each number, as the golden vector does."""
    del facts["id"]
    sent = as_bytes(golden("tensors.json", "tensors", "two rows of three")["msgpack"])
    assert facts == {
        "sent": sent.hex(),
        "status": "OK",
        "datatype": "INT16",
        "shape": [3, 2],
        "values": [1, 4, 2, 5, 3, 6],
    }


def assert_all_answered(facts: Facts, live: Stack) -> None:
    name = facts["reply_to"]
    assert facts["answers"] == {f"{name}:{number}": number**2 for number in range(REQUESTS)}
    replies = live.replies("square", name)
    assert len(replies) == REQUESTS
    assert max(reply["batch_size"] for reply in replies) > 1, "the requests must share batches"


def assert_refused(facts: Facts, status: str, detail: str) -> None:
    expected = envelope("an error in JSON", correlation_id=facts["id"], status=status, detail=detail)
    assert facts["envelope"] == expected


def assert_no_results_remain(live: Stack) -> None:
    for model in ("square", "transpose", "vectors", "away"):
        live.wait_until_idle(model)
        assert not list(live.redis.scan_iter(match=Keys(model).result("*")))


def test_producer_of_columns_gets_a_result_for_each_row(live: Stack, open_url: str) -> None:
    printed = output([sys.executable, str(HERE / "python" / "columns.py")], REDIS_URL=open_url)
    answers = {facts["number"]: facts for facts in map(json.loads, printed.splitlines())}
    assert answers == {
        n: {"number": n, "status": "OK", "vector": [n * n, (n + 0.5) ** 2]} for n in range(100)
    }
    assert_no_results_remain(live)


# --- the tests' own tools


def test_every_required_language_is_known() -> None:
    assert set(os.environ.get(REQUIRED, "").split()) <= set(LANGUAGES)


@pytest.mark.parametrize(
    ("required", "outcome"), [("c ruby", pytest.fail.Exception), ("c", pytest.skip.Exception)]
)
def test_language_without_toolchain_is_skipped_unless_it_is_required(
    required: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUIRED, required)
    with pytest.raises(outcome, match=r"ruby: no gem redis"):
        skip_or_fail(LANGUAGES["ruby"], "ruby: no gem redis")


def toolchain(*parts: Part) -> Language:
    return Language("new", "producer.new", parts, LANGUAGES["ruby"].build)


def fails(reason: str) -> Callable[[], None]:
    def check() -> None:
        raise CommandFailedError(reason)

    return check


def test_working_toolchain_misses_nothing() -> None:
    assert missing(toolchain(Part("shell", "dash", runs("sh", "-c", "exit 0")))) is None


def test_missing_interpreter_is_reported_with_all_packages() -> None:
    new = Part("new 1.0", "newlang", runs("carpool-no-such-command"))
    library = Part("redis for new", "new-redis newlang", fails("cannot be checked without the interpreter"))
    assert missing(toolchain(new, library)) == (
        "new: not usable here: new 1.0 (carpool-no-such-command is not on PATH). "
        "On Debian and Ubuntu: apt-get install newlang new-redis"
    )


def test_every_missing_library_is_reported_and_nothing_else() -> None:
    new = Part("new 1.0", "newlang", runs("sh", "-c", "exit 0"))
    redis = Part(
        "redis for new", "new-redis", runs("sh", "-c", "echo note; echo 'Error: no redis' >&2; exit 1")
    )
    json = Part("json for new", "new-json", runs("sh", "-c", "exit 0"))
    msgpack = Part("msgpack for new", "new-msgpack", runs("sh", "-c", "exit 1"))
    assert missing(toolchain(new, redis, json, msgpack)) == (
        "new: not usable here: redis for new (sh failed: Error: no redis); "
        "msgpack for new (sh failed: it printed nothing). "
        "On Debian and Ubuntu: apt-get install new-redis new-msgpack"
    )


def test_c_library_that_is_not_installed_is_reported() -> None:
    """The compiler may be missing too: then this check fails as well."""
    with pytest.raises(CommandFailedError):
        c_links(lambda: "carpool-no-such-library", "carpool/none.h", "carpool_none()")()


def test_lock_file_pins_each_package_without_a_registry() -> None:
    lock = json.loads((HERE / "node" / "package-lock.json").read_text(encoding="utf-8"))
    packages = [package for name, package in lock["packages"].items() if name]
    assert packages
    assert all(
        package["integrity"].startswith("sha512-") and "resolved" not in package for package in packages
    )
