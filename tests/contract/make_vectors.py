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
from contract.cases.kept import kept_arguments, kept_ids, kept_owners, kept_records
from contract.cases.notation import Case
from contract.cases.packed import packed_requests, refused_in_packed, refused_packs
from contract.cases.requests import delays, expirations, refused_requests, understood_requests, withdrawals
from contract.cases.results import chunks, replies, result_columns, results
from contract.cases.sequences import sequences
from contract.cases.tensors import bf16_roundings, nested_tensors, refused_tensors, strings, tensors

VECTORS: Final = Path(__file__).parent / "vectors"
FROZEN: Final = VECTORS / "frozen.sha256"


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
