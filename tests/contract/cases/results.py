"""Results and chunks, by themselves and on reply streams."""

from __future__ import annotations

from typing import Any

from contract.cases.notation import JSON, MSGPACK, RAW, Case, as_vector, compact, pack


def success(correlation_id: str, content_type: str, body: bytes, **served: int | list[str]) -> Case:
    """A successful result: the fields of its envelope, with the body as bytes of its content type."""
    return {
        "correlation_id": correlation_id,
        "status": "OK",
        "content_type": content_type,
        "body": as_vector(body),
        **({"batch_size": 3, "queue_us": 1500, "compute_us": 70000} | served),
    }


def failure(correlation_id: str, content_type: str, status: str, detail: str, **served: int) -> Case:
    return {
        "correlation_id": correlation_id,
        "status": status,
        "content_type": content_type,
        "detail": detail,
        **({"batch_size": 0, "queue_us": 0, "compute_us": 0} | served),
    }


def envelope(result: Case, body: bytes | None, detail: str) -> Case:
    """The fields of an envelope, in the order in which Carpool writes them."""
    middle: Case = {"detail": detail}
    if result["status"] == "OK":
        middle = {"content_type": result["content_type"], "body": body}
    head = {name: result[name] for name in ("correlation_id", "status")}
    served = ("batch_size", "queue_us", "compute_us", "index", "first_us", "warnings")
    tail = {name: result[name] for name in served if name in result}
    return head | middle | {"final": True} | tail


def results() -> list[Case]:
    def json_case(name: str, result: Case, body: Any = None, detail: str = "") -> Case:
        return {"name": name, "result": result, "envelope": compact(envelope(result, body, detail))}

    def msgpack_case(name: str, result: Case, body: bytes | None = None, detail: str = "") -> Case:
        return {"name": name, "result": result, "envelope": as_vector(pack(envelope(result, body, detail)))}

    expired, twice = "expired: still waiting 5 ms after its arrival", "Ü" * 2000
    floats = pack([1.5, None])
    return [
        json_case("a number in JSON", success("a", JSON, b"49"), 49),
        json_case("a value in JSON", success("a", JSON, '{"ö":[1,null]}'.encode()), {"ö": [1, None]}),
        json_case(
            "a body that looks like an envelope",
            success("a", JSON, b'{"body":null,"final":false}'),
            {"body": None, "final": False},
        ),
        json_case("null in JSON", success("a", JSON, b"null")),
        msgpack_case("msgpack", success("a", MSGPACK, floats, queue_us=2**33), floats),
        msgpack_case("bytes", success("a", RAW, b"\x00\xff"), b"\x00\xff"),
        msgpack_case("empty", success("a", RAW, b""), b""),
        json_case("an error in JSON", failure("a", JSON, "DEADLINE_EXCEEDED", expired), detail=expired),
        msgpack_case("an error in msgpack", failure("a", MSGPACK, "INTERNAL", "ß"), detail="ß"),
        msgpack_case("an error for an octet-stream request", failure("a", RAW, "ABORTED", "no"), detail="no"),
        json_case("a long detail is cut", failure("a", JSON, "INTERNAL", twice), detail="Ü" * 1000),
        json_case("after 3 chunks, in JSON", success("a", JSON, b'"abc"', index=3, first_us=4120), "abc"),
        msgpack_case("after 3 chunks", success("a", RAW, b"abc", index=3, first_us=4120), b"abc"),
        json_case("a stream without chunks, in JSON", success("a", JSON, b"null", index=0)),
        msgpack_case("a stream without chunks", success("a", MSGPACK, b"\xc0", index=0), b"\xc0"),
        json_case("with a warning, in JSON", success("a", JSON, b"49", warnings=["misspelt"]), 49),
        msgpack_case("with a warning", success("a", RAW, b"", warnings=["misspelt"]), b""),
        json_case(
            "an error with warnings",
            failure("a", JSON, "INVALID_ARGUMENT", "no") | {"warnings": ["ß", "b"]},
            detail="no",
        ),
    ]


def chunks() -> list[Case]:
    """Partial results: their envelopes on a list of their own, and as an element of `results`."""

    def case(name: str, content_type: str, index: int, body: bytes, value: Any, **merged: int) -> Case:
        chunk = {"correlation_id": "a", "content_type": content_type, "index": index}
        chunk |= {"merged": max(merged.values(), default=1), "is_list": "values" in merged}
        head = {"correlation_id": "a", "status": "OK", "content_type": content_type}
        tail = {"final": False, "index": index} | merged
        element = pack(head | {"body": body} | tail)
        on_list = compact(head | {"body": value} | tail) if content_type == JSON else as_vector(element)
        return {
            "name": name,
            "chunk": chunk | {"body": as_vector(body)},
            "envelope": on_list,
            "element": as_vector(element),
        }

    return [
        case("a text in JSON", JSON, 0, '" tïme"'.encode(), " tïme"),
        case("a value in JSON", JSON, 1, b'{"final":true}', {"final": True}),
        case("merged texts in JSON", JSON, 2, b'" upon a time"', " upon a time", chunks=3),
        case("numbers are a list in JSON", JSON, 2, b"[3,2,1]", [3, 2, 1], values=3),
        case("numbers are a list", MSGPACK, 2, pack([3, 2, 1]), None, values=3),
        case("msgpack", MSGPACK, 300, pack("Once"), None),
        case("merged bytes", RAW, 7, b"\x00\xff", None, chunks=2),
    ]


def replies() -> list[Case]:
    """Entries of a reply stream: one msgpack array of maps, for results of any content type."""
    several = [
        (success("a", JSON, b"49"), b"49", ""),
        (success("b", RAW, b"\xff"), b"\xff", ""),
        (failure("c", JSON, "CANCELLED", "withdrawn by its producer"), None, "withdrawn by its producer"),
    ]
    return [
        {
            "name": name,
            "results": [result for result, _, _ in some],
            "entry": as_vector(pack([envelope(*one) for one in some])),
        }
        for name, some in (("one result", several[:1]), ("several results", several))
    ]


def result_columns() -> list[Case]:
    """Entries of a reply stream whose results are columns: a msgpack array of maps."""

    def columns(ids: str, content_type: str, head: bytes, rows: bytes) -> Case:
        measured = {"batch_size": 3, "queue_us": 1500, "compute_us": 70000}
        own = {"content_type": content_type, "row_head": head, "rows": rows}
        return {"correlation_ids": ids, "status": "OK", **own, "final": True, **measured}

    def case(name: str, results: list[Case], *maps: Case) -> Case:
        written = [
            {
                "correlation_ids": fields["correlation_ids"].split(),
                "row_head": as_vector(fields["row_head"]),
                "rows": as_vector(fields["rows"]),
                **{name: fields[name] for name in ("content_type", "batch_size", "queue_us", "compute_us")},
            }
            for fields in maps
        ]
        return {"name": name, "columns": written, "results": results, "entry": as_vector(pack(list(maps)))}

    return [
        case(
            "two results in JSON",
            [success("a", JSON, b"49"), success("b", JSON, b"64")],
            columns("a b", JSON, b"", b"4964"),
        ),
        case(
            "results with a common head",
            [success("a", RAW, b"\0\1\2"), success("b", RAW, b"\0\1\3")],
            columns("a b", RAW, b"\0\1", b"\2\3"),
        ),
        case(
            "columns of two runs",
            [success("a", JSON, b"1"), success("b", MSGPACK, b"\7")],
            *(columns("a", JSON, b"", b"1"), columns("b", MSGPACK, b"", b"\7")),
        ),
    ]
