"""All commands, in one table, from which `carpool help` is written. Documents have lines of it, too.

`tests/unit/test_lists.py` compares these, and prints the lines that they should have.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_WIDTH: Final = 27  # of a command with its arguments; what it does follows


class Command(NamedTuple):
    """A command: its name, the arguments that a list of commands shows, its module, and what it does.

    The module has its `main(argv)`. Without one the command is a part of `carpool` itself.
    """

    name: str
    arguments: str
    module: str
    does: str

    @property
    def line(self) -> str:
        """The command in a list of commands."""
        return f"carpool {f'{self.name} {self.arguments}'.strip()}".ljust(_WIDTH) + f"  {self.does}"


# In two groups: what uses a stack on this machine or another, and what a stack consists of.
GROUPS: Final = (
    (
        Command("up", "MODEL...", "carpool_cli.local.up",
                "start Redis (if no --redis-url is given), a batcher and workers on this machine"),
        Command("infer", "MODEL BODY", "carpool_cli.infer", "send one request and print its result"),
        Command("result", "ID", "carpool_cli.result",
                "print the result of a request of infer --enqueue; --status, --cancel"),
        Command("check", "MODEL BODY...", "carpool_cli.check.command",
                "try a model out here, alone and in batches, without Redis"),
        Command("models", "", "carpool_cli.models",
                "list the registered models: how much waits, since when, and what is in flight"),
        Command("top", "", "carpool_cli.top.command",
                "show load, latency, dispatch reasons, streams, errors of each model; live, or --once"),
        Command("config", "MODEL", "carpool_cli.config",
                "show a model's settings; KEY=VALUE overrides one while the model is served"),
        Command("share", "MODEL 2=10%", "carpool_cli.share",
                "give versions of a model shares of the requests that ask for no version"),
        Command("promote", "MODEL", "carpool_cli.promote", "give all of them to its new version"),
        Command("rollback", "MODEL", "carpool_cli.rollback", "give none of them to its new version"),
        Command("workers", "[MODEL]", "carpool_cli.workers",
                "list the workers: what each has in hand, its memory, and whether it drains"),
        Command("pause", "MODEL", "carpool_cli.pause",
                "dispatch nothing of a model; requests wait, or with --refuse are refused"),
        Command("resume", "MODEL", "carpool_cli.resume", "end the pause of a model"),
        Command("drain", "WORKER", "carpool_cli.drain",
                "have a worker take no more batches, and stay; --undo lets it take them again"),
        Command("audit", "[MODEL]", "carpool_cli.audit",
                "list what operators did to a model, or loaded, unloaded and removed"),
        Command("dead", "list", "carpool_cli.dead",
                "list requests that were given up; also dead show, dead replay and dead drop"),
        Command("where", "ID", "carpool_cli.where",
                "say where a request is: waiting, and why; in flight, and where; answered; or given up"),
        Command("load", "NAME", "carpool_cli.load",
                "have nodes serve a model of their folder; --version N replaces the one that serves"),
        Command("unload", "NAME", "carpool_cli.unload",
                "have nodes stop a model; requests that come then wait until it is loaded again"),
        Command("nodes", "", "carpool_cli.nodes",
                "list the nodes: their room, what each serves, and what it could not load"),
        Command("forget", "MODEL", "carpool_cli.forget", "remove a model that is no longer served"),
        Command("simulate", "", "carpool_cli.tuning.simulate",
                "try settings in virtual time, with the real scheduler; --model simulates a live model"),
        Command("tune", "MODEL BODY", "carpool_cli.tuning.tune",
                "measure a live model and find the best settings within a latency (--latency-ms)"),
        Command("demo", "", "carpool_cli.demo.command",
                "serve, measure and check a documentation search here; --keep leaves the stack running"),
    ),
    (
        Command("worker", "MODEL", "carpool_worker.__main__",
                "start a worker: --replicas N runs N processes, --device names GPUs; or a node"),
        Command("batcher", "", "carpool_batcher.__main__",
                "start a batcher: it serves every registered model, and needs only Redis's address"),
        Command("gateway", "", "carpool_gateway.__main__",
                "start a gateway: curl and other HTTP clients use the models through it"),
        Command("console", "", "carpool_console.__main__",
                "start the operators' page: which models are in trouble, why, and what to do"),
        Command("health", "", "carpool_cli.health",
                "check whether the service on this --http-port is ready"),
        Command("acl", "", "carpool_cli.acl", "write Redis's ACL file and a password for each role"),
        Command("version", "", "", "print the version"),
        Command("help", "[COMMAND]", "",
                "list all commands, or one's flags; CARPOOL_* variables or lines in .env set them too"),
    ),
)  # fmt: skip
COMMANDS: Final = {command.name: command for group in GROUPS for command in group}

_HELP: Final = """\
Carpool: dynamic batching for models over Redis streams.

{commands}

Any number of workers and batchers may run, on any machine that reaches Redis.

For up, worker and check, MODEL is module:Name, path/file.py:Name, hf:FOLDER, st:FOLDER, onnx:FILE, square,
docsearch, writer or voice-activity; FILE.toml has several, with parameters and settings. For the other
commands MODEL is a name that `carpool models` lists. To get started:

  carpool up square
  carpool infer square 7
"""


def listed(indent: int) -> str:
    """All commands, each in a line, with an empty line between groups."""
    groups = ["\n".join(" " * indent + command.line for command in group) for group in GROUPS]
    return "\n\n".join(groups)


def help_text() -> str:
    """What `carpool help` prints."""
    return _HELP.format(commands=listed(2))
