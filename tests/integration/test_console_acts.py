"""What operators do on the operators' page, by plain HTTP, and that it says what it did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import pytest

from carpool.keys import Keys
from support.command import carpool
from support.console import Browser, printed_password
from support.http import Answer
from support.repository import make_repository, start_node
from support.stack import Service, Stack
from support.waiting import wait_until

MODEL: Final = "Curable"
KEYS: Final = Keys(MODEL)
DEAD: Final = f"/models/{MODEL}/dead"
EVIL: Final = '"><script>alert(1)</script>'

Fields = list[tuple[str, str]]


class Served(NamedTuple):
    """A stack with a console, and browsers of its two users."""

    stack: Stack
    console: Service
    operator: Browser
    viewer: Browser


def sign_in(console: Service, name: str, password: str) -> Browser:
    browser = Browser(console)
    assert browser.sign_in(name, password).code == 303
    return browser


def add_user(stack: Stack, name: str, role: str) -> str:
    users = str(stack.home / "users.toml")
    done = carpool(stack.url, "console", "--users", users, "--add-user", name, "--role", role)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition(" ")[2].strip()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Stack(tmp_path_factory.mktemp("acts")) as stack:
        stack.serve("faulty.py:Curable")
        console = stack.console()
        operator = sign_in(console, *printed_password(console))
        viewer = sign_in(console, "vic", add_user(stack, "vic", "viewer"))
        yield Served(stack, console, operator, viewer)


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """The stack without dead letters, before and after the test."""
    yield shared
    shared.stack.redis.delete(KEYS.paused)  # where a test failed
    shared.stack.wait_until_idle(MODEL)
    shared.stack.redis.delete(KEYS.dead)
    for key in shared.stack.redis.scan_iter(KEYS.result("*")):
        shared.stack.redis.delete(key)


def write_letters(stack: Stack, number: int, reason: str = "it died 2 times", body: str = "1") -> list[str]:
    """Dead letters as workers write them, of requests that would succeed now."""
    pipeline = stack.redis.pipeline(transaction=False)
    for at in range(number):
        fields: dict[str, str | int] = {
            "correlation_id": f"r{at}", "content_type": "application/json", "body": body,
            "reason": reason, "attempts": 2, "entry_id": "1-1",
        }  # fmt: skip
        pipeline.xadd(KEYS.dead, fields)
    return [letter_id.decode() for letter_id in pipeline.execute()]


def text_of(answer: Answer) -> str:
    """A page as it is read: without tags."""
    without_tags = re.sub(r"<[^>]*>", " ", answer.body.decode())
    return " ".join(unescape(without_tags).split())


def page(browser: Browser, path: str) -> str:
    answer = browser.get(path)
    assert answer.code == 200, text_of(answer)
    return text_of(answer)


def fields_of(browser: Browser, path: str, form: str) -> Fields:
    """The hidden fields of a form of a page, by the form's ID or action."""
    answer = browser.get(path)
    assert answer.code == 200, text_of(answer)
    return hidden_fields(answer, form)


def hidden_fields(answer: Answer, form: str) -> Fields:
    found = re.search(
        rf'<form[^>]*(?:id|action)="{re.escape(form)}"[^>]*>(.*?)</form>', answer.body.decode(), re.DOTALL
    )
    assert found is not None, f"no form {form}"
    inputs = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', found[1])
    return [(unescape(name), unescape(value)) for name, value in inputs]


def message(browser: Browser, path: str, fields: Fields, *, asks: bool = False) -> str:
    """POST a form, and confirm if the page `asks`; returns what the next page says that was done."""
    if not any(name == "csrf" for name, _ in fields):
        fields = [*fields, ("csrf", browser.csrf())]
    answer = browser.post(path, fields)
    if asks:
        assert answer.code == 200, text_of(answer)
        answer = browser.post(path, [*hidden_fields(answer, path)])
    assert answer.code == 303, text_of(answer)
    shown = browser.get(answer.headers["location"]).body.decode()
    found = re.search(r'<div class="messages" role="status">(.*?)</div>', shown, re.DOTALL)
    assert found is not None, "the page says nothing"
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", found[1])).split())


def chosen(action: str, ids: Sequence[str]) -> Fields:
    return [("action", action), *(("id", letter_id) for letter_id in ids)]


def audited(stack: Stack) -> tuple[str, dict[str, Any]]:
    """The last action in the audit of the model, as `WHO VIA ACTION`, and its details."""
    ((_, fields),) = stack.redis.xrevrange(KEYS.audit, count=1)
    texts = {name.decode(): value.decode() for name, value in fields.items()}
    return f"{texts['who']} {texts['via']} {texts['action']}", json.loads(texts["details"])


# --- dead letters ------------------------------------------------------------------------------------------


def test_all_that_match_are_sent_again_and_answered(served: Served) -> None:
    write_letters(served.stack, 100)
    write_letters(served.stack, 3, reason="another error")
    fields = fields_of(served.operator, f"{DEAD}?q=died", "all")
    told = message(served.operator, f"{DEAD}/act", [*fields, ("action", "replay")], asks=True)
    assert told == f"100 requests of {MODEL} sent again."
    for number in range(100):
        assert served.stack.result(MODEL, f"r{number}")["status"] == "OK"
    assert "3 dead letters" in page(served.operator, DEAD)
    action, details = audited(served.stack)
    assert (action, details["letters"]) == ("operator console dead replay", "100")


def test_what_was_really_done_is_told(served: Served) -> None:
    """Given letters that others dropped, and that came, after the page was shown, expect both to be told."""
    ids = write_letters(served.stack, 40)
    fields = fields_of(served.operator, DEAD, "all")
    served.stack.redis.xdel(KEYS.dead, *ids[:3])
    (newer,) = write_letters(served.stack, 1)
    told = message(served.operator, f"{DEAD}/act", [*fields, ("action", "drop")], asks=True)
    assert told == f"37 of 40 requests of {MODEL} dropped; 3 were gone."
    assert served.stack.redis.xlen(KEYS.dead) == 1
    told = message(served.operator, f"{DEAD}/act", chosen("replay", [newer, ids[0]]))
    assert told == f"1 of 2 requests of {MODEL} sent again; 1 was gone."
    assert served.stack.result(MODEL, "r0")["status"] == "OK"


def test_letter_whose_body_is_gone_is_left(served: Served) -> None:
    fields = {"correlation_id": "r", "body_key": "k", "body_bytes": 9, "reason": "x", "attempts": 2}
    letter_id = served.stack.redis.xadd(KEYS.dead, {**fields, "entry_id": "1-1"}).decode()
    told = message(served.operator, f"{DEAD}/act", chosen("replay", [letter_id]))
    assert told == f"0 of 1 request of {MODEL} sent again; 1 is left: their bodies are gone."


def test_many_are_a_job_that_leaves_space_in_the_queue(served: Served) -> None:
    """Given a queue for fewer requests than are sent, expect that none of them is refused."""
    served.stack.configure(MODEL, max_queue_size="60")
    ids = write_letters(served.stack, 50)
    answer = served.operator.post(f"{DEAD}/act", [*chosen("replay", ids), ("csrf", served.operator.csrf())])
    job = answer.headers["location"]
    wait_until(lambda: "State done" in page(served.operator, job), description="the job is done")
    for number in range(50):
        assert served.stack.result(MODEL, f"r{number}")["status"] == "OK"
    write_letters(served.stack, 310)
    fields = fields_of(served.operator, DEAD, "all")
    answer = served.operator.post(f"{DEAD}/act", [*fields, ("action", "replay")])
    answer = served.operator.post(f"{DEAD}/act", hidden_fields(answer, f"{DEAD}/act"))
    job = answer.headers["location"]
    assert job.startswith("/jobs/")
    wait_until(lambda: "State done" in page(served.operator, job), description="the job is done")
    assert f"310 requests of {MODEL} sent again" in page(served.viewer, job)
    assert "310 of 310" in page(served.viewer, job)
    assert "send dead letters again" in page(served.viewer, "/jobs")
    for number in range(310):
        assert served.stack.result(MODEL, f"r{number}")["status"] == "OK"
    assert "had ended already" in message(served.operator, f"{job}/stop", [])
    served.stack.redis.delete(KEYS.overrides)


def test_lists_reach_every_letter_and_group_errors(served: Served) -> None:
    ids = write_letters(served.stack, 130, reason="it died 2 times; the last time: signal 9")
    served.stack.redis.xadd(KEYS.dead, {"correlation_id": "odd", "content_type": "x", "body": "1",
                                        "reason": "no memory", "attempts": 1, "entry_id": "1-1"})  # fmt: skip
    assert "131 dead letters, page 1 of 3" in page(served.viewer, DEAD)
    assert ids[0] in page(served.viewer, f"{DEAD}?page=3")
    assert served.viewer.get(f"{DEAD}?page=9999").headers["location"].endswith("?page=3")
    errors = served.viewer.get(f"{DEAD}/errors")
    assert "131 dead letters with 2 errors" in text_of(errors)
    assert "it died # times; the last time: signal #" in text_of(errors)
    found = re.search(r'href="([^"]*error=\w+)">no memory', errors.body.decode())
    assert found is not None
    assert "1 dead letter" in page(served.viewer, unescape(found[1])) and "odd" in page(
        served.viewer, unescape(found[1])
    )
    assert "130 dead letters" in page(served.viewer, f"{DEAD}?q=SIGNAL")
    assert "No dead letters match" in page(served.viewer, f"{DEAD}?older=1h")
    assert served.viewer.get(f"{DEAD}?older=soon").code == 400
    assert page(served.viewer, "/find?id=odd").count("dead letter ") == 1


def test_body_is_shown_to_operators_that_ask_and_nobody_else(served: Served) -> None:
    (letter_id,) = write_letters(served.stack, 1, reason=EVIL, body=json.dumps({"secret": EVIL}))
    path = f"{DEAD}/{letter_id}"
    for browser in (served.operator, served.viewer):
        answer = browser.get(path)
        assert "secret" not in answer.body.decode() and "<script>alert" not in answer.body.decode()
        assert EVIL in unescape(answer.body.decode())
    shown = served.operator.get(f"{path}?body=1").body.decode()
    assert json.dumps({"secret": EVIL}, indent=2) in unescape(shown) and "<script>alert" not in shown
    assert "secret" not in served.viewer.get(f"{path}?body=1").body.decode()
    raw = served.operator.get(f"{path}/body")
    assert json.loads(raw.body) == {"secret": EVIL}
    assert raw.headers["content-disposition"].startswith("attachment")
    assert served.viewer.get(f"{path}/body").code == 403
    assert served.operator.get(f"{DEAD}/1-1").code == 404


# --- roles -------------------------------------------------------------------------------------------------

ACTIONS: Final = (
    f"{DEAD}/act", f"/models/{MODEL}/pause", f"/models/{MODEL}/resume", f"/models/{MODEL}/drain",
    f"/models/{MODEL}/undrain", f"/models/{MODEL}/share", f"/models/{MODEL}/settings",
    f"/models/{MODEL}/settings/undo", f"/models/{MODEL}/withdraw", "/load", "/load/promote", "/load/unload",
    "/jobs/x/stop",
)  # fmt: skip
PAGES: Final = (
    DEAD, f"{DEAD}/errors", f"/models/{MODEL}/control", f"/models/{MODEL}/settings",
    f"/models/{MODEL}/settings/max_batch_size", "/load", "/jobs", "/audit", "/find?id=r1",
)  # fmt: skip


def test_viewers_and_read_only_consoles_change_nothing_and_show_no_buttons(served: Served) -> None:
    write_letters(served.stack, 2)
    read_only = served.stack.console("--read-only")
    password = add_user(served.stack, "olga", "operator")
    operator = sign_in(read_only, "olga", password)
    for browser in (served.viewer, operator):
        csrf = browser.csrf()
        for path in ACTIONS:
            answer = browser.post(path, {"csrf": csrf, "action": "drop", "all": "yes", "confirmed": "yes"})
            assert answer.code == 403 and "Nothing was changed" in text_of(answer), path
        for path in PAGES:
            answer = browser.get(path)
            forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', answer.body.decode())
            assert set(forms) == {"/sign-out"}, path
    assert read_only.terminate() == 0
    assert served.stack.redis.xlen(KEYS.dead) == 2


def test_form_of_another_session_is_refused(served: Served) -> None:
    for path in ACTIONS:
        answer = served.operator.post(path, {"csrf": served.viewer.csrf(), "confirmed": "yes"})
        assert answer.code == 403, path


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (f"{DEAD}/act", {"action": "burn", "id": "1-1"}, "neither replay nor drop"),
        (f"{DEAD}/act", {"action": "drop"}, "No dead letter is selected"),
        (f"{DEAD}/act", {"action": "drop", "id": "x"}, "is no ID"),
        (f"{DEAD}/act", {"action": "drop", "all": "yes"}, "up to which letter"),
        (
            f"/models/{MODEL}/settings",
            {"name": "max_batchsize", "value": "1"},
            "did you mean max_batch_size?",
        ),
        (f"/models/{MODEL}/settings", {"name": "max_batch_size", "value": "0"}, "nothing was changed"),
        (f"/models/{MODEL}/settings", {"name": "max_batch_size"}, "there is no value"),
        (f"/models/{MODEL}/settings/undo", {"action": "1-1"}, "not among the last ones"),
        (f"/models/{MODEL}/drain", {"worker": "nobody", "confirmed": "yes"}, "no worker 'nobody'"),
        (f"/models/{MODEL}/share", {"version": "1", "share": "200%", "action": "share"}, "share '200%'"),
        (f"/models/{MODEL}/withdraw", {"id": "a b", "confirmed": "yes"}, "correlation ID"),
        ("/load", {"entry": "echo"}, "no node runs"),
        ("/models/Unknown/pause", {"confirmed": "yes"}, "is not registered"),
        ("/models/../x/pause", {}, "no such page"),
        ("/jobs/unknown/stop", {}, "no such job"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, fields: dict[str, str], sentence: str) -> None:
    answer = served.operator.post(path, {**fields, "csrf": served.operator.csrf()})
    assert 400 <= answer.code < 500 and sentence in text_of(answer), text_of(answer)


# --- control, requests, settings, audit --------------------------------------------------------------------


def test_request_of_a_paused_model_is_found_withdrawn_and_the_model_resumed(served: Served) -> None:
    of, control = f"/models/{MODEL}", f"/models/{MODEL}/control"
    before = len(served.stack.events("model paused"))
    told = message(served.operator, f"{of}/pause", [("reason", f"new weights {EVIL}")], asks=True)
    assert told.startswith(f"{MODEL} is paused since") and told.endswith(f"by operator: new weights {EVIL}.")
    wait_until(lambda: len(served.stack.events("model paused")) > before, description="the batcher knows")
    served.stack.send(MODEL, body="1", correlation_id="w1")
    served.stack.send(MODEL, body="2", correlation_id="w2")
    assert "Curable: waiting" in page(served.viewer, "/find?id=w1")
    assert "paused" in page(served.viewer, f"/find?model={MODEL}&id=w1")
    assert has_told_of_withdrawal(served, "w1") or has_told_of_withdrawal_later(served)
    assert "w1" not in text_of(served.viewer.get(control))
    told = message(served.operator, f"{of}/resume", [])
    assert told.startswith(f"{MODEL} is resumed, with 1 entry waiting.")
    assert served.stack.result(MODEL, "w2")["status"] == "OK"
    assert "was not paused" in message(served.operator, f"{of}/resume", [])
    found = page(served.viewer, f"/audit?model={MODEL}")
    for action in ("pause", "withdraw", "resume"):
        assert action in found


def has_told_of_withdrawal(served: Served, name: str) -> bool:
    """Withdraw a request that waits. Whether the page says that it was answered: not if its batcher was held
    up until it was no longer the active one."""
    told = message(served.operator, f"/models/{MODEL}/withdraw", [("id", name)], asks=True)
    assert served.stack.result(MODEL, name)["status"] == "CANCELLED"
    if told == f"{name} is withdrawn: it was answered CANCELLED.":
        return True
    assert told in (
        f"{name} will be withdrawn, if it still waits, once a batcher of {MODEL} is active.",
        f"{name} was asked to be withdrawn; it is waiting now.",
    )
    return False


def has_told_of_withdrawal_later(served: Served) -> bool:
    """The same with other requests, until a batcher is not held up."""
    names = (f"another-{number}" for number in count())

    def has_told() -> bool:
        name = next(names)
        served.stack.send(MODEL, body="1", correlation_id=name)
        return has_told_of_withdrawal(served, name)

    return wait_until(has_told, description="the page says that a request was answered")


def test_nothing_is_sent_to_a_model_that_refuses(served: Served) -> None:
    (letter_id,) = write_letters(served.stack, 1)
    message(served.operator, f"/models/{MODEL}/pause", [("refuses", "yes")], asks=True)
    answer = served.operator.post(
        f"{DEAD}/act", [*chosen("replay", [letter_id]), ("csrf", served.operator.csrf())]
    )
    assert answer.code == 409 and "resume it first" in text_of(answer)
    message(served.operator, f"/models/{MODEL}/resume", [])


def test_worker_is_drained_and_taken_back(served: Served) -> None:
    control = f"/models/{MODEL}/control"
    fields = fields_of(served.operator, control, f"/models/{MODEL}/drain")
    worker = dict(fields)["worker"]
    told = message(served.operator, f"/models/{MODEL}/drain", fields, asks=True)
    assert told.startswith(f"{worker} is drained since")
    assert "drained since" in page(served.viewer, control)
    told = message(served.operator, f"/models/{MODEL}/undrain", [("worker", worker)])
    assert told.startswith(f"{worker} takes batches again")
    assert "was not drained" in message(served.operator, f"/models/{MODEL}/undrain", [("worker", worker)])


def test_settings_are_overridden_and_changes_taken_back(served: Served) -> None:
    path = f"/models/{MODEL}/settings"
    told = message(served.operator, path, [("name", "max_batch_size"), ("value", "4")])
    changed, taken = "max_batch_size is 4 (operator); before: 8 (model). ", "The active batcher takes them."
    assert told in (changed + taken, changed + "No batcher is active that could tell whether it takes them.")
    message(served.operator, path, [("name", "max_queue_size"), ("value", "500")])
    shown = page(served.viewer, path)
    assert "max_batch_size 4 operator" in shown and "none -> 4" in shown
    undo = re.findall(r'name="action" value="(\d+-\d+)"', served.operator.get(path).body.decode())
    newest, before = undo[:2]
    told = message(served.operator, f"{path}/undo", [("action", before)], asks=True)
    assert told.startswith("max_batch_size is 8 (model); before: 4 (operator).")
    answer = served.operator.post(f"{path}/undo", {"action": before, "csrf": served.operator.csrf()})
    assert answer.code == 409 and "was changed since" in text_of(answer)

    def is_taken() -> bool:
        """Not if the batcher was held up until it was no longer the active one."""
        message(served.operator, path, [("name", "max_queue_size"), ("value", "500")])
        return message(served.operator, path, [("name", "max_queue_size"), ("remove", "yes")]).endswith(taken)

    wait_until(is_taken, description="the active batcher takes the settings")
    assert served.stack.redis.hgetall(KEYS.overrides) == {}
    assert newest in page(served.operator, path) or "500" in page(served.viewer, f"{path}/max_queue_size")


def test_audit_has_pages_and_is_filtered(served: Served) -> None:
    for number in range(60):
        entry = {"who": f"ann{number % 2}", "via": "command", "action": f"test{number:02}", "details": "{}"}
        served.stack.redis.xadd(KEYS.audit, entry)
    first = served.viewer.get(f"/audit?model={MODEL}")
    assert "test59" in text_of(first) and "test05" not in text_of(first)
    older = re.search(r'href="(/audit\?[^"]*before=[^"]*)"', first.body.decode())
    assert older is not None and "test05" in page(served.viewer, unescape(older[1]))
    one = page(served.viewer, "/audit?who=ann1")
    assert "test59" in one and "test58" not in one
    assert served.viewer.get(f"/audit?before={quote(EVIL)}").code == 400
    assert "No action" in page(served.viewer, "/audit?who=nobody")


# --- nodes -------------------------------------------------------------------------------------------------


def test_version_is_loaded_promoted_and_unloaded(tmp_path: Path) -> None:
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        start_node(stack, make_repository(tmp_path / "repository", versions=2), 2)
        console = stack.console()
        operator = sign_in(console, *printed_password(console))

        def ended(job: str) -> str:
            wait_until(
                lambda: not re.search("State (running|stopping)", page(operator, job)),
                description="the job has ended",
            )
            return page(operator, job)

        def load(**fields: str) -> str:
            answer = operator.post("/load", {"entry": "echo", **fields, "csrf": operator.csrf()})
            assert answer.code == 303, text_of(answer)
            return ended(answer.headers["location"])

        assert "1 of 1 processes of echo version 1 serve" in load(version="1")
        assert "State done" in load(version="2", share="20%")
        assert stack.redis.hgetall(Keys("echo").shares) == {b"2": b"20"}
        shown = page(operator, "/load")
        assert "echo 1" in shown and "20%" in shown
        answer = operator.post(
            "/models/echo/share", {"version": "2", "action": "promote", "csrf": operator.csrf()}
        )
        assert answer.code == 409 and "on the page Load" in text_of(answer)
        answer = operator.post(
            "/load/promote", {"model": "echo", "confirmed": "yes", "csrf": operator.csrf()}
        )
        assert "State done" in ended(answer.headers["location"])
        assert stack.redis.hgetall(Keys("echo").shares) == {}
        stack.send("echo", body='"x"', correlation_id="after")
        assert stack.result("echo", "after")["body"] == "2:x"
        assert "is no valid name" in text_of(
            operator.post("/load", {"entry": "echo", "model": EVIL, "csrf": operator.csrf()})
        )
        assert "State failed" in load(version="1", replicas="9")
        told = message(operator, "/load/unload", [("model", "echo"), ("version", "2")], asks=True)
        assert told == "echo version 2 is wanted no more (1 generation)."
        message(operator, "/load/unload", [("model", "echo")], asks=True)
        assert "not loaded" in message(operator, "/load/unload", [("model", "echo")], asks=True)
        assert "load" in page(operator, "/audit?model=.nodes")
