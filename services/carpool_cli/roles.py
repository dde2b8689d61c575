"""The permissions of each role in Redis, and the reason for each. `carpool acl` writes them to the ACL file.

    ROLES --rules()--> "user worker on #8f..  -@all +ping .. ~carpool:{*}:batches .."

Redis checks each command inside a script as if the caller had sent it. So the commands of a script are
granted one by one to the roles that run it; EVAL alone permits no other command. The head of each file in
`carpool/store/lua` declares them, in lines `GRANT roles keys commands`.

A grant is a set of commands on a set of keys. For Redis 7, each grant is a selector with exactly these. Redis
6 has no selectors, only the commands and the keys of a user, so that each command of a role may be used on
each of its keys, which is more than the grants say. A role that stores bodies (SET) may also overwrite each
key that it only needs to read: a gateway could write the report of a batcher. Neither another name nor
another type of the key would prevent that.

Why: docs/decisions/0032, and docs/decisions/0118 for the role console.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from carpool.keys import DEFAULT_PREFIX, Keys, NodesKeys, loading_key, models_key
from carpool.store.connection import lua_source


class Grant(NamedTuple):
    """Commands that may be used on keys. `keys` are names in `patterns`; empty for commands without keys."""

    why: str
    commands: str
    keys: str = ""


class _Lua(NamedTuple):
    """What files of `carpool/store/lua` need on these keys, or on all, and no earlier grant has. The `order`
    of commands is that of ACL files that were written, so that they stay up to date. It has no meaning."""

    files: str
    keys: str = ""
    order: str = ""


def needs_of_file(role: str, file: str) -> list[tuple[str, str]]:
    """What the head of a file in `carpool/store/lua` says that a role needs: keys, and commands."""
    lines = re.findall(r"^-- GRANT (\S+) (\S+) (.+)$", lua_source(file), re.MULTILINE)
    return [(keys.replace(",", " "), commands) for roles, keys, commands in lines if role in roles.split(",")]


def _grants(role: str, *items: Grant | _Lua) -> Sequence[Grant]:
    """The grants of a role, with those of files in their places."""
    grants: list[Grant] = []
    for item in items:
        if isinstance(item, Grant):
            grants.append(item)
            continue
        needed: dict[str, list[str]] = {}
        for keys, commands in [need for file in item.files.split() for need in needs_of_file(role, file)]:
            if not item.keys or keys in item.keys.split():
                needed.setdefault(keys, item.order.split()).extend(commands.split())
        for keys, of_keys in needed.items():
            granted = {
                name for grant in grants if keys in grant.keys.split() for name in grant.commands.split()
            }
            if missing := [name for name in dict.fromkeys(of_keys) if name not in granted]:
                grants.append(Grant(f"{item.files.replace(' ', ', ')} in lua", " ".join(missing), keys))
    return grants


# AUTH, HELLO, QUIT and RESET need no permission. SELECT is for no role: installations differ by prefix.
_CONNECT: Final = Grant("have a name in CLIENT LIST, and check that Redis answers", "ping client|setname")
_CLUSTER: Final = Grant("find the node of a cluster that has a key", "cluster|slots")
_CLOCK: Final = Grant("read Redis's clock, which decides about expiration and leases", "time")
_SCRIPTS: Final = Grant("run scripts of services, which begin with it", "echo")
_EVICTION: Final = Grant("see whether Redis discards keys when its memory is full", "info")
# Counts only, no contents. XINFO STREAM is left out because it shows the first and the last entry.
_COUNTS: Final = (
    _CLOCK,
    Grant("list the models, and those that are being loaded", "smembers", "models loading_models"),
    Grant("read what a model's workers registered, and each declares", "hgetall", "registration declared"),
    Grant(
        "count waiting entries, batches in flight and dead letters", "xlen", "requests batches settled dead"
    ),
    Grant("count dead letters that were dropped", "hgetall", "dead_dropped"),
    Grant(
        "list the versions that have batch streams, and shares of traffic",
        "smembers hgetall",
        "versions shares",
    ),
    Grant("count results that are to be delivered in order", "llen", "order"),
    Grant("whether a worker is loading a model", "exists", "loading"),
    Grant("count sequences that are kept", "zcard", "sequences"),
    Grant("list the processes of a bound model that drain", "smembers", "draining"),
    Grant("how a model is paused, and which workers operators drain", "hgetall", "paused drained"),
    Grant("list the model processes that are alive", "zrange", "workers"),
    Grant("read how much memory they take", "hgetall", "memory"),
    Grant("check whether a batcher is active", "exists", "batcher"),
    Grant("read its report, which has counts and nothing of a request", "get", "report"),
    Grant(
        "see which worker has which batch, and how long", "xpending xinfo|groups xinfo|consumers", "batches"
    ),
)

# What is wanted of models in repositories, and the nodes that serve it.
_NODES: Final = (
    Grant("read which models are wanted, who serves them, and reports", "hgetall", "wanted seats reports"),
    Grant("list the nodes that are alive", "zrange", "leases"),
)

# What a producer needs beside a connection.
_PRODUCE: Final = (
    Grant("unblock its own reader when that must read another stream", "client|id client|unblock"),
    Grant("learn whether this is the server that accepted its requests", "info|server"),
    Grant("wait until replicas have its requests (durability)", "wait"),
    Grant("list the models", "smembers sismember", "models"),
    Grant("read the limits of a model's batches and bodies", "hget hmget hgetall", "registration"),
    Grant("wait until a model is loaded", "exists", "loading"),
    Grant("wait until there is a model process; see whether one is alive", "zcard zcount", "workers"),
    _CLOCK,
    Grant("send a request, and withdraw one that waits", "xadd xdel", "requests"),
    Grant("send a request together with its large body", "multi exec"),
    Grant("store a large body", "set", "body"),
    Grant("read results from a reply stream, and trim those it has read", "xread xtrim", "replies"),
    Grant("the state of a request whose result is read by ID", "get exists", "kept"),
    Grant("whether that result is there, or is to come", "exists", "replies"),
)

# To add requests whose results are read by ID.
# Producers run the script by its hash: with EVAL they could run one of their own that does not end.
_ENQUEUE: Final = (
    Grant("the script keep, which batchers load", "evalsha", "requests kept replies body"),
    _Lua("keep"),
)

_GATEWAY: Final = _grants(
    "gateway",
    _CONNECT,
    _CLUSTER,
    *_PRODUCE,
    *_ENQUEUE,
    Grant("the script keep, by its source", "eval", "requests kept replies body"),
    Grant("read an operator's overrides of settings", "hgetall", "config"),
    Grant("see whether an operator has paused a model", "hget", "paused"),
    Grant("read what became of a model's requests", "hgetall", "statistics"),
    Grant("read how many workers a model needs, in the report of its batcher", "get", "report"),
    *_NODES,
)

# What operators change of models: the operators' page, and commands.
_CHANGES: Final = (
    _SCRIPTS,
    *_NODES,
    Grant(
        "override, share, pause, resume, drain, load and unload: run scripts",
        "evalsha eval",
        "config shares settled audit paused registration drained workers draining wanted seats outcomes "
        "generation nodes_audit",
    ),
    _Lua("operator/audit operator/change operator/pause operator/resume"),
    _Lua("operator/drain_worker operator/undrain_worker"),
    Grant("what became of what is loaded", "hget", "outcomes"),
    _Lua("nodes/load nodes/generations"),
)

CALLER: Final = "model"  # a user for models that call others (CARPOOL_MODEL_REDIS_URL)
_READ_LISTS: Final = Grant("read a result from its list", "blpop blmove", "result")

ROLES: Final[Mapping[str, Sequence[Grant]]] = {
    "producer": _grants("producer", _CONNECT, _CLUSTER, *_PRODUCE, *_ENQUEUE, _READ_LISTS),
    "batcher": _grants(
        "batcher",
        _CONNECT, _CLUSTER, _CLOCK, _EVICTION, _SCRIPTS,
        Grant("list the models", "smembers", "models"),
        Grant("read what workers registered, and an operator's overrides", "hgetall", "registration config"),
        Grant("see whether an operator has paused a model", "hgetall", "paused"),
        Grant("list the model processes that are alive", "zrange", "workers"),
        Grant("read new requests and settled batches", "xread", "requests settled"),
        Grant("find the position to continue reading from, or up to which", "xrevrange", "settled requests"),
        Grant("read what exists when it takes over, or misses an entry", "xlen xrange", "requests batches"),
        Grant("enter.lua: put tickets into the order; see whether there are any", "rpush llen", "order"),
        Grant(
            "run scripts",
            "evalsha eval",
            "batcher report requests batches batches_of progress order tickets result replies body kept "
            "sequence sequences inbox workers draining paused statistics versions detail answer",
        ),
        Grant("see whether somebody looks at a model", "exists", "watched"),
        Grant("load the script keep, which producers run", "script|load"),
        Grant("list the sequences that are kept when it takes over", "zrange", "sequences"),
        _Lua("lease"), _Lua("report"), _Lua("dispatch refuse put_back", "requests"), _Lua("refuse"),
        Grant("keep large bodies while their requests wait", "pexpire", "body"),
        _Lua("dispatch", "batches"), _Lua("inbox"),
        Grant("list the processes of a bound model that drain", "smembers", "draining"),
        Grant("read which versions workers have, and their shares", "hgetall", "declared shares"),
        Grant("list the versions that have batch streams", "smembers", "versions"),
        Grant("see which batches a process has that drains", "xpending", "batches"),
        _Lua("dispatch"), _Lua("answer"), _Lua("statistics"), _Lua("reassign abandon forget_version"),
        Grant("count the chunks of streams in flight", "hget", "progress"),
        _Lua("answered"), _Lua("sequence"), _Lua("deliver ordering/order"), _Lua("record"),
    ),
    "worker": _grants(
        "worker",
        _CONNECT, _CLUSTER, _CLOCK, _EVICTION, _SCRIPTS,
        Grant("tell that it loads the model", "hset pexpire del", "loading"),
        Grant("tell which models are being loaded", "sadd srem pexpire", "loading_models"),
        Grant("register the model", "sadd", "models"),
        Grant("tell what it declares, and see what others do", "hset hdel hkeys hgetall pexpire", "declared"),
        Grant("see which workers live", "zrange", "workers"),
        Grant("see whether an operator drains it; end that when it stops", "hget hdel", "drained"),
        Grant("tell how much memory its model processes take", "hset pexpire", "memory"),
        Grant("register the model; renew.lua checks that it still is", "hset hdel exists", "registration"),
        Grant("fetch batches", "xgroup|create xreadgroup", "batches"),
        Grant("tell that its version has a batch stream", "sadd", "versions"),
        Grant(
            "run scripts",
            "evalsha eval",
            "workers batches settled registration config progress dead dead_dropped order tickets result "
            "replies body kept sequence sequences draining statistics",
        ),
        _Lua("join renew", "workers"), _Lua("join", "batches"), _Lua("renew"), _Lua("step", "result replies"),
        Grant("load large bodies", "getrange", "body"),
        Grant("load states", "hget", "sequence"),
        Grant("read the batches of a bound model", "xrange", "batches"),
        Grant("read what a process of a bound model is told", "xread", "inbox"),
        _Lua("drain undrain", "draining workers"),
        _Lua("commit", "batches body settled dead"), _Lua("trim_dead"),
        _Lua(
            "answer reclaim commit step",
            "progress",
            "hdel hset hget hmget hsetnx hgetall hkeys pexpire del",
        ),
        _Lua("sequence"), _Lua("deliver ordering/order"), _Lua("statistics"), _Lua("record"),
        *_NODES,
        Grant("nodes: run scripts", "evalsha eval", "wanted seats outcomes leases reports"),
        _Lua("nodes/hold nodes/settle nodes/yield nodes/generations"),
    ),
    "gateway": _GATEWAY,
    # A gateway with --model-control. With rules for Redis 6 it may write to all hashes that a gateway reads.
    "control": _grants(
        "control",
        *_GATEWAY,
        _SCRIPTS,
        Grant(
            "load and unload models, end shares of versions that are gone: run scripts",
            "evalsha eval",
            "wanted seats outcomes generation nodes_audit shares settled audit",
        ),
        Grant("what became of what is loaded", "hget", "outcomes"),
        Grant("read these shares", "hgetall", "shares"),
        _Lua("nodes/load nodes/generations operator/audit operator/change"),
    ),
    "metrics": (_CONNECT, *_COUNTS, Grant("read Redis's metrics", "info dbsize latency|latest slowlog|len")),
    # The operators' page: what waits, is in flight and dead, and what operators do to models.
    "console": _grants(
        "console",
        _CONNECT, _CLUSTER, _CLOCK,
        Grant("list the models, and those that are being loaded", "smembers", "models loading_models"),
        Grant("read what workers registered, and each declares", "hgetall", "registration declared"),
        Grant("count waiting entries, batches in flight and dead letters", "xlen", "requests batches dead"),
        Grant("list the versions that have batch streams", "smembers", "versions"),
        Grant("read what operators have set", "hgetall", "shares config paused drained"),
        Grant("list the model processes that are alive", "zrange", "workers"),
        Grant("list those that drain", "smembers", "draining"),
        Grant("read how much memory they take", "hgetall", "memory"),
        Grant("see whether a batcher is active, and a worker loads the model", "exists", "batcher loading"),
        Grant("read a batcher's report", "get", "report"),
        Grant("see which worker has which batch", "xpending xinfo|groups xinfo|consumers", "batches"),
        Grant("see how much memory Redis has", "info"),
        Grant("read when a waiting request arrived, while no batcher tells", "xrange", "requests"),
        Grant("ask a batcher for the detail of a model", "set", "watched"),
        Grant("read that detail", "get", "detail"),
        Grant("a request: ask its batcher", "xadd", "settled"),
        Grant("a request: read what the batcher answers", "get", "answer"),
        Grant("a request: see how far it is", "hmget", "progress"),
        Grant("a request: find it in a batch, while no batcher is active", "xrange", "batches"),
        Grant("a request: see whether a result is kept, and until when", "exists pttl", "result"),
        Grant("a request: the same of a result that is read by ID", "pttl", "replies"),
        Grant("a request: read that record", "get", "kept"),
        Grant("withdraw a request, and send that of a dead letter again", "xadd", "requests"),
        Grant("read and delete dead letters", "xrange xrevrange xdel", "dead"),
        Grant("send a dead letter again, once", "multi exec watch unwatch", "dead"),
        Grant("send it again: delete what nobody has read of its result", "del", "result"),
        Grant("send it again: the same of a result that is read by ID", "xtrim", "replies"),
        Grant("run scripts that list dead letters", "evalsha eval", "dead"),
        _Lua("dead_page"),
        Grant("read what operators did; one entry for an action on dead letters", "xrevrange xdel", "audit"),
        Grant("read what operators loaded, unloaded and removed", "xrevrange", "nodes_audit"),
        *_CHANGES,
    ),
    "admin": _grants(
        "admin",
        _CONNECT,
        *_PRODUCE,
        _READ_LISTS,
        *_COUNTS,
        Grant("read the age of the first waiting request", "xrange xinfo|stream", "requests"),
        Grant("read batches in flight", "xrange xinfo|stream", "batches settled"),
        Grant("carpool tune, carpool simulate: read the times of batches", "xrevrange", "settled"),
        Grant("carpool simulate --record: read arrival times", "xread", "batches"),
        Grant("read and delete dead letters", "xrange xrevrange xdel xtrim xinfo|stream", "dead"),
        Grant("carpool dead replay: send each once", "multi exec watch unwatch", "dead"),
        Grant("carpool console: run scripts that list them", "evalsha eval", "dead"),
        _Lua("dead_page"),
        Grant("carpool where: read what a batcher answers", "get", "answer"),
        Grant("carpool where: see whether a result is kept, and until when", "exists pttl", "result"),
        Grant("carpool where: see until when a result that is read by ID is kept", "pttl", "replies"),
        Grant("carpool where: see how far a request in flight is", "hmget", "progress"),
        Grant("carpool top MODEL: ask a batcher for the detail of a model", "set exists", "watched"),
        Grant("carpool top MODEL: read it", "get", "detail"),
        Grant("find unused keys of any name", "scan"),
        Grant("remove a model that is no longer served", "srem", "models"),
        Grant("carpool forget: only if nobody uses it meanwhile", "watch", "requests batches workers"),
        Grant(
            "remove its keys, and what remains of its requests and sequences",
            "del",
            "registration config requests batches versions shares settled dead dead_dropped statistics "
            "workers order tickets result replies body progress sequence sequences inbox draining declared "
            "drained paused audit",
        ),
        Grant("read an operator's overrides of settings", "hgetall", "config"),
        Grant("read what operators did; dead replay and drop: one entry for each command", "xrevrange xdel",
              "audit"),
        Grant("read what operators loaded, unloaded and removed", "xrevrange", "nodes_audit"),
        *_CHANGES,
        Grant("load these rules, and read the log of violations", "acl|load acl|log acl|whoami"),
        Grant("list clients, and disconnect them", "client|list client|kill"),
        Grant(
            "read Redis's state and configuration",
            "info config|get dbsize memory|usage memory|stats memory|doctor latency|latest latency|history "
            "latency|doctor slowlog|get slowlog|len lastsave bgrewriteaof",
        ),
    ),
}  # fmt: skip


def patterns(prefix: str = DEFAULT_PREFIX) -> dict[str, str]:
    """The key patterns of the names that grants use: the keys of every model of this prefix."""
    keys = Keys("M", re.sub(r"([*?\[\]\\])", r"\\\1", prefix))
    of_one_model = {
        "requests": keys.requests,
        "batches": f"{keys.batches}*",  # with those of versions, which are:
        "batches_of": keys.batches_of("*"),
        "versions": keys.versions,
        "shares": keys.shares,
        "settled": keys.settled,
        "dead": keys.dead,
        "dead_dropped": keys.dead_dropped,
        "statistics": keys.statistics,
        "registration": keys.registration,
        "config": keys.overrides,
        "workers": keys.workers,
        "declared": keys.declared,
        "loading": keys.loading,
        "memory": keys.memory("*"),
        "batcher": keys.batcher,
        "report": keys.report,
        "watched": keys.watched,
        "detail": keys.detail,
        "answer": keys.answer("*"),
        "result": keys.result("*"),
        "replies": keys.replies("*"),
        "kept": keys.kept("*"),
        "body": keys.body("*"),
        "progress": keys.progress("*"),
        "sequence": keys.sequence("*"),
        "sequences": keys.sequences,
        "inbox": keys.inbox("*"),
        "draining": keys.draining,
        "drained": keys.drained,
        "paused": keys.paused,
        "audit": keys.audit,
        "order": keys.order,
        "tickets": keys.tickets,
    }
    of_all_models = {name: key.replace("{M}", "{*}") for name, key in of_one_model.items()}
    nodes = NodesKeys(keys.prefix)
    of_nodes = {
        name: getattr(nodes, name) for name, of in vars(NodesKeys).items() if isinstance(of, property)
    }
    of_nodes["nodes_audit"] = of_nodes.pop("audit")
    return {
        "models": models_key(keys.prefix),
        "loading_models": loading_key(keys.prefix),
        **of_all_models,
        **of_nodes,
    }


def rules(role: str, prefix: str = DEFAULT_PREFIX, *, selectors: bool = False) -> str:
    """The rules of a role for its line of an ACL file. `selectors` need Redis 7."""
    return _rules(ROLES[role], patterns(prefix), selectors=selectors)


def rules_of_caller(models: Sequence[str], prefix: str = DEFAULT_PREFIX, *, selectors: bool = False) -> str:
    """The rules of CALLER: those of a producer, for requests to these models only."""
    # In a rule `~` precedes each pattern, so this is one for each model.
    names = {
        name: " ~".join([key.replace("{*}", f"{{{model}}}") for model in models]) if "{*}" in key else key
        for name, key in patterns(prefix).items()
    }
    return _rules(ROLES["producer"], names, selectors=selectors)


def _rules(grants: Sequence[Grant], names: Mapping[str, str], *, selectors: bool) -> str:
    root_grants = [grant for grant in grants if not (selectors and grant.keys)]
    selector_grants = [grant for grant in grants if selectors and grant.keys]
    root = ["resetkeys", "resetchannels", "-@all", *_tokens(root_grants, names)]
    return " ".join([*root, *(f"({' '.join(_tokens([grant], names))})" for grant in selector_grants)])


def _tokens(grants: Iterable[Grant], names: Mapping[str, str]) -> list[str]:
    """The rules for keys and then for commands of these grants, each once."""
    keys = dict.fromkeys(name for grant in grants for name in grant.keys.split())
    commands = dict.fromkeys(command for grant in grants for command in grant.commands.split())
    return [*(f"~{names[key]}" for key in keys), *(f"+{command}" for command in commands)]
