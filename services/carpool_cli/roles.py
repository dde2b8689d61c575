"""What each role may do in Redis, and why: pure. `carpool acl` writes it down as an ACL file.

    ROLES --rules()--> "user worker on #8f..  -@all +ping .. ~carpool:{*}:batches .."

Redis checks the commands inside a script as if the caller had said them, so what a script does is granted
here one by one, to those who run it; EVAL alone opens nothing.

A grant is some commands on some keys. Redis 7 is told just that: a selector for each grant. Redis 6 knows no
selectors, only the commands and the keys of a user, so there every command of a role may touch every key of
the role: more than the grants say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from carpool.keys import DEFAULT_PREFIX, Keys, models_key


class Grant(NamedTuple):
    """Commands, each on any of the keys; `keys` are names of `patterns`. A grant without keys needs none."""

    why: str
    commands: str
    keys: str = ""


# Signing in: AUTH, HELLO, QUIT and RESET need no permission. Nobody may SELECT: an installation is a prefix.
_CONNECT: Final = Grant(
    "be seen by name in CLIENT LIST, and ask whether Redis is there", "ping client|setname"
)
_CLOCK: Final = Grant("Redis's clock, which decides when something expires", "time")
_DELIVER: Final = (
    Grant("deliver.lua: a result, where its producer looks for it", "rpush pexpire", "result"),
    Grant("deliver.lua: many of them on a reply stream", "xadd pexpire", "replies"),
    Grant("order.lua: whose turn it is", "lindex lpop", "order"),
    Grant("order.lua, tickets.lua: what is held until then", "hget hdel hsetnx", "held"),
)
# What is counted tells nothing of what is in it. XINFO STREAM would: it shows the first entry and the last.
_COUNTS: Final = (
    _CLOCK,
    Grant("which models there are", "smembers", "models"),
    Grant("what a model's workers registered", "hgetall", "registration"),
    Grant("how much waits, is in flight, was given up", "xlen", "requests batches settled dead"),
    Grant("how many results come in order, and have not yet", "llen", "order"),
    Grant("which model processes live", "zrange", "workers"),
    Grant("whether a batcher is active", "exists", "batcher"),
    Grant("what it says of itself: counts, and no request's", "get", "report"),
    Grant("how long batches have been in whose hands", "xpending xinfo|groups xinfo|consumers", "batches"),
)

ROLES: Final[Mapping[str, Sequence[Grant]]] = {
    "producer": (
        _CONNECT,
        Grant("wake one's own blocked reader when it is to follow another model", "client|id client|unblock"),
        Grant("which models there are", "smembers sismember", "models"),
        Grant("how large its batches and bodies may be", "hget hmget hgetall", "registration"),
        Grant("send a request, and take back one that waits", "xadd xdel", "requests"),
        Grant("a result from its own list", "blpop blmove", "result"),
        Grant("results from a reply stream, which is trimmed as it is read", "xread xtrim", "replies"),
    ),
    "batcher": (
        _CONNECT,
        _CLOCK,
        Grant("which models there are", "smembers", "models"),
        Grant("what workers registered, and an operator said instead", "hgetall", "registration config"),
        Grant("which model processes live", "zrange", "workers"),
        Grant("what is new: requests, and batches that are done", "xread", "requests settled"),
        Grant("where to read on", "xrevrange", "settled"),
        Grant("what is there, when it takes over or misses something", "xlen xrange", "requests batches"),
        Grant("admit.lua: tickets in the order of results", "rpush llen", "order"),
        Grant(
            "the scripts lease, report, admit, dispatch, refuse, answer, release, missing",
            "evalsha eval",
            "batcher report requests batches progress order held result replies",
        ),
        Grant("lease.lua", "get set del", "batcher"),
        Grant("report.lua", "set del", "report"),
        Grant("dispatch.lua, refuse.lua: entries leave; what stays is put back", "xdel xadd", "requests"),
        Grant("dispatch.lua: batches", "xadd", "batches"),
        Grant("answer.lua: who was answered before the batch was done", "hdel hsetnx pexpire", "progress"),
        *_DELIVER,
    ),
    "worker": (
        _CONNECT,
        _CLOCK,
        Grant("register the model", "sadd", "models"),
        Grant("register the model; renew.lua looks whether it still is", "hset exists", "registration"),
        Grant("take batches", "xgroup|create xreadgroup", "batches"),
        Grant(
            "the scripts join, leave, renew, reclaim, answer, commit, release",
            "evalsha eval",
            "workers batches settled registration progress dead order held result replies",
        ),
        Grant("join.lua, leave.lua, renew.lua: leases", "zadd zrem zscore zremrangebyscore", "workers"),
        Grant("join.lua, leave.lua: sweep out consumers", "xinfo|consumers xgroup|delconsumer", "batches"),
        Grant("whose a batch is; reclaim.lua, renew.lua: make it one's own", "xpending xclaim", "batches"),
        Grant("commit.lua: a batch leaves", "xack xdel", "batches"),
        Grant("commit.lua, join.lua, leave.lua: tell the batcher that there is room", "xadd", "settled"),
        Grant("commit.lua: dead letters", "xadd", "dead"),
        Grant(
            "answer.lua, reclaim.lua, commit.lua: who was answered, and begun",
            "hdel hsetnx hincrby hgetall hkeys pexpire del",
            "progress",
        ),
        *_DELIVER,
    ),
    "metrics": (_CONNECT, *_COUNTS, Grant("Redis's own figures", "info dbsize latency|latest slowlog|len")),
    "admin": (
        _CONNECT,
        *_COUNTS,
        Grant("how long the first request has waited", "xrange xinfo|stream", "requests"),
        Grant("what is in flight", "xrange xinfo|stream", "batches settled"),
        Grant("carpool tune, carpool simulate: what batches took", "xrevrange", "settled"),
        Grant("carpool simulate --record: when their requests came", "xread", "batches"),
        Grant("dead letters: read them, and drop them", "xrange xrevrange xdel xtrim xinfo|stream", "dead"),
        Grant("send a dead letter's request again, and take one back", "xadd xdel", "requests"),
        Grant("and look at what came of it", "blpop blmove", "result"),
        Grant("what somebody left behind, under whatever name", "scan"),
        Grant("a stream whose IDs somebody used up, by choosing the last there is", "xsetid", "requests"),
        Grant("forget a model that is not served any more", "srem", "models"),
        Grant("and all that it has", "del", "registration config requests batches settled dead workers"),
        Grant("and what is left of its results", "del", "order held result replies"),
        Grant("carpool config: another value for a setting", "multi exec hgetall hset hdel", "config"),
        Grant("these rules, when `carpool acl` changed them; who broke them", "acl|load acl|log acl|whoami"),
        Grant("who is connected, and hang up on them", "client|list client|kill"),
        Grant(
            "how Redis is, and how it is set up",
            "info config|get dbsize memory|usage memory|stats memory|doctor latency|latest latency|history "
            "latency|doctor slowlog|get slowlog|len lastsave bgrewriteaof",
        ),
    ),
}  # fmt: skip


def patterns(prefix: str = DEFAULT_PREFIX) -> dict[str, str]:
    """The keys that grants name, as Redis matches them: those of every model of this prefix."""
    keys = Keys("M", re.sub(r"([*?\[\]\\])", r"\\\1", prefix))
    of_a_model = {
        "requests": keys.requests,
        "batches": keys.batches,
        "settled": keys.settled,
        "dead": keys.dead,
        "registration": keys.registration,
        "config": keys.config,
        "workers": keys.workers,
        "batcher": keys.batcher,
        "report": keys.report,
        "result": keys.result("*"),
        "replies": keys.replies("*"),
        "progress": keys.progress("*"),
        "order": keys.order,
        "held": keys.held,
    }
    everyone = {name: key.replace("{M}", "{*}") for name, key in of_a_model.items()}
    return {"models": models_key(keys.prefix), **everyone}


def rules(role: str, prefix: str = DEFAULT_PREFIX, *, selectors: bool = False) -> str:
    """The rules of a role, as they stand in its line of an ACL file; with `selectors` for Redis 7."""
    names = patterns(prefix)
    everywhere = [grant for grant in ROLES[role] if not (selectors and grant.keys)]
    apart = [grant for grant in ROLES[role] if selectors and grant.keys]
    words = ["resetkeys", "resetchannels", "-@all", *_words(everywhere, names)]
    return " ".join([*words, *(f"({' '.join(_words([grant], names))})" for grant in apart)])


def _words(grants: Iterable[Grant], names: Mapping[str, str]) -> list[str]:
    """The keys and then the commands of some grants, each once."""
    keys = dict.fromkeys(name for grant in grants for name in grant.keys.split())
    commands = dict.fromkeys(command for grant in grants for command in grant.commands.split())
    return [*(f"~{names[key]}" for key in keys), *(f"+{command}" for command in commands)]
