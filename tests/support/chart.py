"""The Helm chart in ops/helm/carpool: rendered for tests, and the parts of it that are made from the code.

    cd tests && python -m support.chart --write     # values.schema.json, and the table in README.md

Schema: which values there are, of which types. Names of settings are those of the code, so that a misspelt
one is refused before anything is installed. README: the comments of values.yaml.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from pydantic_settings import BaseSettings

from carpool.model_settings import ModelSettings
from carpool.settings import (
    BatcherSettings,
    CommonSettings,
    ConsoleSettings,
    GatewaySettings,
    WorkerSettings,
)

CHART: Final = Path(__file__).parents[2] / "ops/helm/carpool"
SCHEMA: Final = CHART / "values.schema.json"
README: Final = CHART / "README.md"
RELEASE: Final = "rel"
NAMESPACE: Final = "ns"
_WRITE: Final = "cd tests && python -m support.chart --write"

# What the chart sets by values of its own, and what a pod has no use for.
_BY_CHART: Final = {
    "redis_url", "redis_user", "redis_password_file", "redis_ca_file", "redis_cert_file", "redis_key_file",
    "prefix", "http_host", "http_port",
}  # fmt: skip
_OF_SERVICE: Final[Mapping[type[BaseSettings], set[str]]] = {
    GatewaySettings: {"host", "port", "grpc_port", "keys", "anonymous", "model_control", "drain_s"},
    BatcherSettings: set(),
    WorkerSettings: {
        "model", "repository", "room", "replicas", "param", "param_file", "set", "drain_s", "model_redis_url",
    },
    ConsoleSettings: {"host", "port", "users", "add_user", "remove_user", "role"},
}  # fmt: skip


# Settings of a model that the chart sets where an autoscaler follows what its batcher wants.
OF_SCALING: Final = ("max_workers", "min_workers")


# --- the schema --------------------------------------------------------------------------------------------

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_DICT: Final[Schema] = {"type": "object"}
_LIST: Final[Schema] = {"type": "array"}
_SCALAR: Final[Schema] = {"type": ["string", "number", "boolean"]}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}


def _object(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "additionalProperties": False, "properties": dict(properties), **needed}


def _number(least: int, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def _one_of(*names: str) -> Schema:
    return {"enum": list(names)}


def _or_empty(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"const": ""}]}


def settings_names(kind: type[BaseSettings]) -> list[str]:
    """The settings of a service that values may set as `settings`."""
    return sorted(kind.model_fields.keys() - _BY_CHART - _OF_SERVICE.get(kind, set()))


def _settings(names: Iterable[str]) -> Schema:
    return _object(dict.fromkeys(names, _SCALAR))


# Variables named CARPOOL_... are settings, and have a place of their own: two of one name would be refused.
_EXTRA_ENV: Final[Schema] = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string", "not": {"pattern": "^CARPOOL_"}}}},
}
# Of the pods of each part; not in values.yaml, because most need none.
_POD: Final[Mapping[str, Schema]] = {
    "podAnnotations": _TEXTS,
    "podLabels": _TEXTS,
    "extraEnv": _EXTRA_ENV,
    "extraVolumes": _LIST,
    "extraVolumeMounts": _LIST,
    "nodeSelector": _TEXTS,
    "affinity": _DICT,
    "tolerations": _LIST,
    "topologySpreadConstraints": _LIST,
    "runtimeClassName": _TEXT,
    "priorityClassName": _TEXT,
    "strategy": _DICT,
    "image": _TEXT,
    "resources": _DICT,
}
_GPUS: Final[Mapping[str, Schema]] = {"gpus": _number(0), "gpuResource": _TEXT, "tmpSize": _TEXT}


def _workers() -> dict[str, Schema]:
    return {
        **_POD,
        **_GPUS,
        "replicas": _number(0),
        "processes": _or_empty({"anyOf": [_number(1, 256), {"const": "auto"}]}),
        "drainSeconds": _number(0),
        "loadSeconds": _number(1),
        "workerSettings": _settings(settings_names(WorkerSettings)),
        "autoscaling": _object(
            {
                "enabled": _BOOLEAN,
                "via": _one_of("keda", "hpa"),
                "minReplicas": _number(0),
                "maxReplicas": _number(1),
                "pollingSeconds": _number(1),
                "fallbackReplicas": _or_empty(_number(0)),
            }
        ),
    }


def _model() -> Schema:
    parameter = {"type": ["string", "number", "boolean", "array", "object"]}
    return _object(
        {
            **_workers(),
            "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
            "module": {"type": "string", "minLength": 1},
            "parameters": {"type": "object", "additionalProperties": parameter},
            "parameterFiles": {
                "type": "object",
                "additionalProperties": _object({"secret": _TEXT, "key": _TEXT}, ["secret", "key"]),
            },
            "settings": _settings(sorted({*ModelSettings.names(), *OF_SCALING})),
            "files": {"type": "object", "propertyNames": {"pattern": "^[-._a-zA-Z0-9]+$"}, **_only(_TEXT)},
        },
        ["name", "module"],
    )


def _only(schema: Schema) -> Schema:
    return {"additionalProperties": schema}


def _redis() -> Schema:
    keys = ("url", "modelUrl", "password", "batcher", "worker", "gateway", "control", "console")
    return _object(
        {
            "url": {"type": "string", "pattern": r"^((redis|rediss)(\+(sentinel|cluster))?://.*)?$"},
            "prefix": {"type": "string", "pattern": r"^[^{}\s]+$"},
            "auth": _one_of("none", "shared", "roles"),
            "user": _TEXT,
            "existingSecret": _TEXT,
            "keys": _object(dict.fromkeys(keys, _TEXT)),
            "tls": _object(dict.fromkeys(("existingSecret", "ca", "cert", "key"), _TEXT)),
        }
    )


def _gateway() -> Schema:
    return _object(
        {
            **_POD,
            "enabled": _BOOLEAN,
            "replicas": _number(0),
            "keys": _object({"existingSecret": _TEXT, "key": _TEXT}),
            "anonymous": _BOOLEAN,
            "grpc": _BOOLEAN,
            "modelControl": _BOOLEAN,
            "drainSeconds": _number(0),
            "preStopSeconds": _number(0),
            "settings": _settings(settings_names(GatewaySettings)),
            "service": _object(
                {"type": _one_of("ClusterIP", "NodePort", "LoadBalancer"), "annotations": _TEXTS}
            ),
            "autoscaling": _object(
                {
                    "enabled": _BOOLEAN,
                    "minReplicas": _number(1),
                    "maxReplicas": _number(1),
                    "targetCPUPercent": _number(1),
                }
            ),
        }
    )


def _nodes() -> Schema:
    return _object(
        {
            **_POD,
            **_GPUS,
            "enabled": _BOOLEAN,
            "replicas": _number(0),
            "volume": _DICT,
            "room": _number(1, 1024),
            "drainSeconds": _number(0),
            "loadSeconds": _number(1),
            "settings": _settings(settings_names(WorkerSettings)),
        }
    )


def _console() -> Schema:
    return _object(
        {
            **_POD,
            "enabled": _BOOLEAN,
            "users": _object({"existingSecret": _TEXT, "key": _TEXT, "volume": _DICT}),
            "settings": _settings(settings_names(ConsoleSettings)),
        }
    )


def schema() -> Schema:
    """What values.schema.json has."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": f"Written by `{_WRITE}`.",
        **_object(
            {
                "global": _DICT,  # which Helm adds where this chart is a part of another one
                "nameOverride": _TEXT,
                "fullnameOverride": _TEXT,
                "image": _object(
                    {
                        "registry": _TEXT,
                        "tag": _TEXT,
                        "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
                    }
                ),
                "imagePullSecrets": _LIST,
                "redis": _redis(),
                "settings": _settings(settings_names(CommonSettings)),
                "listenAddress": _TEXT,
                "podAnnotations": _TEXTS,
                "podLabels": _TEXTS,
                "extraEnv": _EXTRA_ENV,
                "serviceAccount": _object({"create": _BOOLEAN, "name": _TEXT, "annotations": _TEXTS}),
                "podSecurityContext": _DICT,
                "securityContext": _DICT,
                "gateway": _gateway(),
                "batcher": _object(
                    {
                        **_POD,
                        "replicas": _number(0),
                        "settings": _settings(settings_names(BatcherSettings)),
                    }
                ),
                "workers": _object(_workers()),
                "models": {"type": "array", "items": _model()},
                "nodes": _nodes(),
                "console": _console(),
                "keda": _object(dict.fromkeys(("gatewayUrl", "existingSecret", "key", "namespace"), _TEXT)),
                "podDisruptionBudget": _object({"enabled": _BOOLEAN}),
                "serviceMonitor": _object({"enabled": _BOOLEAN, "labels": _TEXTS, "interval": _TEXT}),
                "prometheusRule": _object(
                    {"enabled": _BOOLEAN, "labels": _TEXTS, "without": {"type": "array", "items": _TEXT}}
                ),
                "networkPolicy": _object(
                    {
                        "enabled": _BOOLEAN,
                        "clients": _LIST,
                        "prometheus": _LIST,
                        "redis": _LIST,
                        "redisPorts": {"type": "array", "items": _PORT},
                        "collectorPort": _number(0, 65535),
                        "workersEgress": _LIST,
                    }
                ),
            }
        ),
    }


def schema_text() -> str:
    """The text of values.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


# --- the table of values -----------------------------------------------------------------------------------

_VALUE: Final = re.compile(r"( *)([A-Za-z]+): ?(.*)")


class Value(NamedTuple):
    """A value of values.yaml: its path, its default as it is written there, and its comment."""

    path: str
    default: str
    meaning: str


def values_of(text: str) -> Iterator[Value]:
    """All that values.yaml says of single values, and of groups with a comment."""
    path: list[str] = []
    comments: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comments.append(stripped.removeprefix("#").strip())
            continue
        if found := _VALUE.fullmatch(line):
            depth = len(found[1]) // 2
            path[depth:] = [found[2]]
            if comments or found[3]:
                yield Value(".".join(path), found[3].partition(" #")[0], " ".join(comments))
        comments = []


def table(text: str) -> str:
    """The table of values in README.md."""
    rows = (
        f"| `{value.path}` | {f'`{value.default}`' if value.default else ''} | {value.meaning} |"
        for value in values_of(text)
    )
    return "\n".join(["| value | default | |", "|---|---|---|", *rows]) + "\n"


BEGIN: Final = f"Written by `{_WRITE}`, from values.yaml:\n"
END: Final = "<!-- until here -->\n"


def with_table(readme: str, values: str) -> str:
    """README.md with the table of these values."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(values)}\n{END}{after}"


# --- rendering ---------------------------------------------------------------------------------------------


class Rendered(NamedTuple):
    """What Helm made of some values: the text of each template, or the error."""

    texts: dict[str, str]
    error: str


# In a process of its own: Helm's library is a program in Go, with threads, and tests fork.
_PROGRAM: Final = """
import json, sys
from helm_python import Chart, HelmError, lint
job = json.load(sys.stdin)
results = []
with Chart.load(job["chart"]) as chart:
    for values in job["values"]:
        try:
            chart.validate_schema(values)
            rendered = chart.render(values, name=job["name"], namespace=job["namespace"])
            results.append({"texts": rendered, "error": ""})
        except HelmError as error:
            results.append({"texts": {}, "error": str(error)})
    report = lint(job["chart"], job["values"][0], strict=True)
json.dump({"results": results, "lint": report}, sys.stdout)
"""


def needs_tools() -> None:
    """Skip the module that calls this, unless `make tools` was run."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is missing: make tools", allow_module_level=True)


def render_all(values: Sequence[Mapping[str, Any]]) -> tuple[list[Rendered], dict[str, Any]]:
    """What the chart becomes for each of these values, in their order; and Helm's report of its lint."""
    job = {"chart": str(CHART), "values": values, "name": RELEASE, "namespace": NAMESPACE}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return [Rendered(**one) for one in answer["results"]], answer["lint"]


def main() -> None:
    """Write the schema and the table."""
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {_WRITE}")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), values), encoding="utf-8")


if __name__ == "__main__":
    main()
