"""Writes the golden vectors in `vectors/`: cd tests && ../.venv/bin/python -m contract.make_vectors

`cases/NAME.py` has the cases of `vectors/NAME.json`. Nothing there calls Carpool. Bytes are made with
msgpack, struct and json, and their meaning is written by hand: any change of Carpool's behaviour fails a
test.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Final

from contract.cases.batches import batches, settled
from contract.cases.bodies import bodies, refused_bodies
from contract.cases.columns import columns, packed_columns, refused_columns, stored_bodies
from contract.cases.notation import Case
from contract.cases.packed import packed_requests, refused_in_packed, refused_packs
from contract.cases.requests import delays, expirations, refused_requests, understood_requests, withdrawals
from contract.cases.results import chunks, replies, result_columns, results
from contract.cases.sequences import sequences
from contract.cases.tensors import bf16_roundings, nested_tensors, refused_tensors, strings, tensors

VECTORS: Final = Path(__file__).parent / "vectors"
FROZEN: Final = VECTORS / "frozen.sha256"


# --- results by ID -----------------------------------------------------------------------------------------


def kept_arguments() -> list[Case]:
    """What the script `keep` is called with, and the request that it adds."""
    keys = ["carpool:{square}:requests", "carpool:{square}:kept:job-17", "carpool:{square}:replies:job-17"]
    named = ["correlation_id", "job-17", "reply_to", "job-17"]
    large = times(b"x", 16384)
    return [
        {
            "name": "a small body, kept as long as its model says",
            "request": {"id": "job-17", "fingerprint": "f1", "known_ms": 90000, "body": "12"},
            "keys": keys,
            "arguments": ["f1", "90000", "-", "", "86400000", "", *named, "body", "12"],
        },
        {
            "name": "a small body, added again once its result has expired",
            "request": {
                "id": "job-17",
                "fingerprint": "f1",
                "known_ms": 90000,
                "body": "12",
                "result_ttl_ms": 60000,
                "again": True,
            },
            "keys": keys,
            "arguments": ["f1", "90000", "60000", "1", "86400000", "", *named, "body", "12"],
        },
        {
            "name": "a large body",
            "request": {"id": "job-17", "fingerprint": "f1", "known_ms": 90000, "body": large},
            "keys": [*keys, "carpool:{square}:body:job-17"],
            "arguments": [
                *("f1", "90000", "-", "", "86400000", large, *named, "body_key", "job-17"),
                *("body_bytes", "16384"),
            ],
        },
    ]


def kept_records() -> list[Case]:
    """Records, and the state that each has."""
    states = [("waiting", "waiting"), ("in-flight", "in flight"), ("done", "done"), ("failed", "failed")]
    return [
        {"record": f"9f86d081884c7d65 {word} {ttl}", "state": state}
        for word, state in (*states, ("dead", "dead"))
        for ttl in ("-", "3600000")
    ]


def kept_ids() -> list[Case]:
    """IDs in their parts, and what is none."""
    longest = "x" * 128
    valid = [("square", "job-17"), ("a.b_c-1", "py:1.2_3-4"), (longest, longest)]
    invalid = ["", "square", "square/", "/job-17", "square/a/b", "square/a b", "-a/b", f"square/{longest}x"]
    return [
        *({"id": f"{model}/{name}", "model": model, "correlation_id": name} for model, name in valid),
        *({"id": text, "model": None, "correlation_id": None} for text in invalid),
    ]


def kept_owners() -> list[Case]:
    """What the IDs of a tenant's requests begin with."""
    return [
        {"tenant": tenant, "begins_with": f"{sha256(f'tenant {tenant}'.encode()).hexdigest()[:16]}-"}
        for tenant in ("acme", "größe")
    ]


def files() -> dict[str, dict[str, list[Case]]]:
    """Every file's lists of cases."""
    return {
        "requests.json": {
            "cases": [*understood_requests(), *expirations(), *delays(), *refused_requests(), *withdrawals()]
        },
        "packed.json": {"cases": [*packed_requests(), *refused_in_packed(), *refused_packs()]},
        "columns.json": {"cases": [*columns(), *refused_columns(), *packed_columns(), *stored_bodies()]},
        "sequences.json": {"cases": sequences()},
        "results.json": {
            "envelopes": results(),
            "chunks": chunks(),
            "replies": replies(),
            "columns": result_columns(),
        },
        "kept.json": {
            "arguments": kept_arguments(),
            "records": kept_records(),
            "ids": kept_ids(),
            "owners": kept_owners(),
        },
        "batches.json": {"batches": batches(), "settled": settled()},
        "tensors.json": {
            "tensors": tensors(),
            "nested": nested_tensors(),
            "strings": strings(),
            "bf16_roundings": bf16_roundings(),
            "refused": refused_tensors(),
        },
        "bodies.json": {"values": bodies(), "refused": refused_bodies()},
    }


def as_text(lists: dict[str, list[Case]]) -> str:
    """A file's text: JSON, a line for each case."""
    named = (
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        + "\n]"
        for name, cases in lists.items()
    )
    return "{" + ",\n".join(named) + "}\n"


def digests() -> set[str]:
    """A line for each case: its file, and its SHA-256."""
    return {
        f"{file} {sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()}"
        for file, lists in files().items()
        for cases in lists.values()
        for case in cases
    }


def frozen() -> set[str]:
    """The digests of all cases that have ever been written."""
    return set(FROZEN.read_text(encoding="utf-8").splitlines())


def main() -> None:
    for name, lists in files().items():
        (VECTORS / name).write_text(as_text(lists), encoding="utf-8")
    ever = sorted(frozen() | digests())  # only added to: what was written once stays true
    FROZEN.write_text("".join(f"{line}\n" for line in ever), encoding="utf-8")


if __name__ == "__main__":
    main()
