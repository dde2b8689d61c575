"""The cases of `vectors/kept.json`: results that are read by ID."""

from __future__ import annotations

from hashlib import sha256

from contract.cases.notation import Case, times


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
