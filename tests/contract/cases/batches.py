"""What batchers and workers write for each other."""

from __future__ import annotations

from typing import Any

from contract.cases.notation import JSON, MSGPACK, RAW, Case, as_vector, fields_of, pack


def batches() -> list[Case]:
    """Entries of the batch stream, which batchers write and workers read."""
    # Entry, IDs, content type, reply_to, arrival, deadline, bodies, rows, fields, reply_columns, sequence
    first = ["1-0", "a", JSON, None, 1000, None, [b"7"], None, None, False, None]
    second = ["2-0", "b c", RAW, "r", 2000, 9000, None, [b"\xff", 1, b"78"], {"tenant": b"blue"}, True, None]
    third = ["2-0", "d e", MSGPACK, "r", 2000, 9000, [b"\x07", ["k", 5]], None, None, False, None]
    mic7 = ["mic7", True, False, 0, "00000000000000000001-00000000000000000000:00000"]
    of_sequence = [*first[:-1], mic7]
    tickets = pack([None, ["2-0", ["1-0", 3, 1], ["1-0", 7, 1]], ["2-0", ["2-0", 0, 2]]])
    ticket = {"b": ["1-0", 3, 1], "c": ["1-0", 7, 1], "d": ["2-0", 0, 1], "e": ["2-0", 1, 1]}
    names = ("entry_id", "correlation_id", "content_type", "reply_to", "arrival_us", "deadline_us")

    def batched(run: list[Any]) -> list[Case]:
        entry_id, ids, *others, bodies, rows, extra, _, sequence = run
        if rows is not None:
            head, width, data = rows
            bodies = [head + data[at : at + width] for at in range(0, len(data), width)]
        fields = {name: as_vector(value) for name, value in (extra or {}).items()}
        return [
            dict(zip(names, [entry_id, correlation_id, *others], strict=True))
            | ({"body": as_vector(body)} if type(body) is bytes else {"stored_body": body})
            | {"fields": fields, "ticket": ticket.get(correlation_id)}
            | ({"sequence": sequence} if sequence else {})
            for correlation_id, body in zip(ids.split(), bodies, strict=True)
        ]

    def case(name: str, expected: list[list[Any]], *others: str) -> Case:
        runs = pack([of_sequence if of_sequence in expected else first, second, third])
        flat = ("runs", runs, "tickets", tickets, "size", "5", "reason", "full", *others)
        return {
            "name": name,
            "fields": fields_of((*flat, "dispatched_us", "5000")),
            "becomes": {
                "reason": "full",
                "dispatched_us": 5000,
                "lane": "small" if "lane" in others else "",
                "expected_us": 4200 if "expected_us" in others else 0,
                "max_execution_ms": 1500 if "settings" in others else None,
                "max_result_bytes": 5 if "settings" in others else 64 << 20,
                "requests": [request for run in expected for request in batched(run)],
                "reply_columns": [run[9] for run in expected],
            },
        }

    return [
        case("all requests of two entries", [first, second, third]),
        case("a batch of a lane", [first, second, third], "lane", "small"),
        case("a batch whose execution time is expected", [first, second, third], "expected_us", "4200"),
        case(
            "a batch of a model whose limits are not the defaults",
            [first, second, third],
            *("settings", '{"max_execution_ms": "1500", "max_result_bytes": "5", "unknown": "1"}'),
        ),
        case("a request of a sequence", [of_sequence, second, third]),
        case("an entry that was no longer in Redis is left out", [first], "gone", "2-0"),
        case("several such entries are left out", [], "gone", "2-0 1-0"),
    ]


def settled() -> list[Case]:
    """Entries of the settled stream, which workers write and batchers read."""

    def batch(name: str, *others: str | bytes, executed: int, **besides: Any) -> Case:
        flat = ("batch", "9-0", "worker", "w/0", "size", "5", "compute_us", "17", *others)
        numbers = {"size": 5, "compute_us": 17, "settled_us": 1_700_000_000_000_123, "executed": executed}
        return {
            "name": name,
            "fields": fields_of((*flat, "settled_us", "1700000000000123")),
            "becomes": {"batch_id": "9-0", "worker": "w/0", **numbers, **besides},
        }

    def change(name: str, *flat: str, worker: str) -> Case:
        return {"name": name, "fields": fields_of((*flat, "size", "0")), "becomes": {"worker": worker}}

    return [
        batch("all requests were executed together", "executed", "5", executed=5),
        batch("some were not executed", "executed", "3", executed=3),
        batch("they were executed one at a time", "executed", "0", executed=0),
        batch(
            "of one producer's requests none was executed, of another's some",
            *("failed", "INVALID_ARGUMENT=3", "executed", "2"),
            *("producers", pack([[["t", ""], 2, 0], [["", "s"], 3, 2]])),
            executed=2,
            failures={"INVALID_ARGUMENT": 3},
            of_producers=[[["t", ""], 2, 0], [["", "s"], 3, 2]],
        ),
        batch(
            "sequences were broken",
            *("executed", "5", "broken", "mic7 mic8"),
            executed=5,
            broken=["mic7", "mic8"],
        ),
        change("a model process joined or left", "worker", "w/0", worker="w/0"),
        change("settings were overridden", "config", "max_batch_size", worker=""),
    ]
