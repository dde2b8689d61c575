"""Bodies that take long to decode, or whose decoding kills the worker: everything is answered, once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import carpool
from carpool.keys import Keys
from carpool.messages.requests import JSON
from carpool.wire.bodies import decode_body
from support.stack import Stack
from support.waiting import Stopwatch, wait_until

pytestmark = pytest.mark.chaos

MODEL: Final = "Lengths"
SPEC: Final = "plain.py:Lengths"
LEASE: Final = ("--lease-ms", "300")
MAPS: Final = 400_000  # empty ones, in JSON: to decode them takes about 0.1 s
LEASES_MS: Final = (1500, 6000)
SLOW_BODIES: Final = 18  # of a batch that takes longer to decode than the lease
LEASE_BODIES: Final = 12  # of them are decoded in a lease. While one is, no other thread runs.


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        yield stack


def test_a_batch_that_takes_longer_to_decode_than_the_lease_is_delivered_once(tmp_path: Path) -> None:
    """Its lease is renewed meanwhile, so that another worker does not take it.

    What else this machine does may begin or end between the measurement and the batch, so there is a second
    try. A worker that does not renew loses both.
    """
    assert any(is_delivered_once(tmp_path / str(lease_ms), lease_ms) for lease_ms in LEASES_MS)


def is_delivered_once(home: Path, lease_ms: int) -> bool:
    """Whether a batch that takes longer to decode than the lease is never reclaimed. All is answered."""
    with Stack(home) as stack:
        stack.batcher()
        workers = [stack.worker(SPEC, "--lease-ms", str(lease_ms), ready=False) for _ in range(2)]
        for worker in workers:
            worker.wait_for("worker ready")
        stack.wait_for_model(MODEL, workers=2)
        maps = round(MAPS * lease_ms / LEASE_BODIES / decoding_ms(MAPS))
        names = [f"slow-{number}" for number in range(SLOW_BODIES)]
        body = json.dumps([{}] * maps)
        stopwatch = Stopwatch()
        stack.send_packed(MODEL, [{"correlation_id": name, "body": body} for name in names])
        for name in names:
            result = stack.result(MODEL, name)
            assert (result["status"], result.get("body")) == ("OK", maps)
        return stopwatch.elapsed_s > lease_ms / 1000 and stack.events("batch reclaimed") == []


def decoding_ms(maps: int) -> float:
    """How long this machine takes now to decode a body of so many maps."""
    body = json.dumps([{}] * maps).encode()
    stopwatch = Stopwatch()
    assert len(decode_body(JSON, body)) == maps
    return 1000 * stopwatch.elapsed_s


def test_a_body_that_kills_each_worker_that_decodes_it_is_given_up(stack: Stack, tmp_path: Path) -> None:
    """Redis knows whose turn it is before it is decoded. The other requests of its batch are served."""
    package = killed_by_poison(tmp_path / "faulty")
    workers = [stack.worker(SPEC, *LEASE, faulty_package=package)]
    stack.wait_for_model(MODEL)
    stack.configure(MODEL, result_ttl_ms="600000")  # several workers must start until the last is there
    names = ("a", "poison", "b")
    stack.send_packed(MODEL, [{"correlation_id": name, "body": json.dumps([name])} for name in names])

    def is_answered() -> bool:
        return bool(stack.redis.exists(Keys(MODEL).result("poison")))

    while not is_answered() and len(workers) < 10:
        wait_until(lambda: is_answered() or not workers[-1].alive, description="the worker was killed")
        if not is_answered():
            workers.append(stack.worker(SPEC, *LEASE, faulty_package=package, ready=False))
    assert len(workers) > 3
    assert {name: stack.result(MODEL, name)["status"] for name in names} == {
        "a": "OK",
        "poison": "ABORTED",
        "b": "OK",
    }
    # Results are written before the next request is executed alone, and others with the commit.
    wait_until(lambda: stack.pending(MODEL) == 0, description="the batch is committed")
    assert stack.redis.xlen(Keys(MODEL).dead) == 1


def killed_by_poison(home: Path) -> Path:
    """A directory with a package `carpool` whose process is killed when it decodes a body with `poison`."""
    shutil.copytree(Path(carpool.__file__).parent, home / "carpool")
    file = home / "carpool" / "wire" / "bodies.py"
    killing = r"\1    import os\n    if b'poison' in body:\n        os.kill(os.getpid(), 9)\n"
    text, places = re.subn(
        r'(def decode_body\(.*?\n    """.*?"""\n)', killing, file.read_text(), flags=re.DOTALL
    )
    assert places == 1
    file.write_text(text)
    return home
