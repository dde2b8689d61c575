"""The Helm chart: what it becomes for many values, without a cluster.

Helm's own library renders it, and the schemas of Kubernetes check it. Custom resources have rules here. What
is compared with the code: settings, roles, files, and the alerts.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from pydantic_settings import BaseSettings

from carpool.settings import (
    BatcherSettings,
    ConsoleSettings,
    GatewaySettings,
    WorkerSettings,
    read_settings,
)
from carpool_cli.roles import ROLES
from support import chart, pem
from support.chart import NAMESPACE, RELEASE, Rendered

chart.needs_tools()
import jsonschema  # noqa: E402
import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402

ROOT: Final = Path(__file__).parents[2]
OLDEST: Final = "1.27"  # kubeVersion in Chart.yaml
NEWEST: Final = kubernetes_validate.latest_version()
SETTINGS: Final[Mapping[str, type[BaseSettings]]] = {
    "gateway": GatewaySettings,
    "batcher": BatcherSettings,
    "worker": WorkerSettings,
    "console": ConsoleSettings,
}

Object = dict[str, Any]

SQUARE: Final[Object] = {"name": "square", "module": "square"}
REDIS: Final[Object] = {"redis": {"url": "redis://redis:6379/0"}}
OPEN: Final[Object] = {**REDIS, "gateway": {"anonymous": True}, "models": [SQUARE]}
KEYS: Final[Object] = {"keys": {"existingSecret": "api-keys"}}
SCALED: Final[Object] = {"enabled": True, "minReplicas": 0, "maxReplicas": 8}
TLS: Final[Object] = {"existingSecret": "redis-tls", "cert": "tls.crt", "key": "tls.key"}
PROBE_MODEL: Final[Object] = {
    "name": "Classifier",
    "module": "/files/model.py:Classifier",
    "image": "registry.example/classifier:7",
    "replicas": 3,
    "processes": 2,
    "parameters": {"weights": "/models/small.pt", "limit": 1073741824, "sizes": [1, 2], "text": "two\nlines"},
    "parameterFiles": {"token": {"secret": "hub", "key": "token"}},
    "settings": {"max_batch_size": 64, "max_queue_delay_ms": 2.5, "preserve_ordering": True},
    "workerSettings": {"lease_ms": 10000, "load_s_max": 900},
    "files": {"model.py": "class Classifier:\n    ...\n"},
    "loadSeconds": 1200,
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}

CASES: Final[Mapping[str, Object]] = {
    "least": OPEN,
    "gpus": {
        **OPEN,
        "workers": {"gpus": 1, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        "models": [
            SQUARE,
            {**SQUARE, "name": "on-cpu", "gpus": 0, "replicas": 0},
            {**SQUARE, "name": "two", "gpus": 2},
        ],
    },
    "own-model": {**OPEN, "models": [PROBE_MODEL, {**SQUARE, "name": "classifier"}]},
    "roles-and-tls": {
        "redis": {"url": "rediss://redis:6380/0", "auth": "roles", "existingSecret": "redis", "tls": TLS},
        "gateway": KEYS,
        "models": [SQUARE],
    },
    "sentinel": {
        "redis": {
            "url": r"redis+sentinel://s0:26379,s1:26379/main",
            "auth": "shared",
            "user": "carpool",
            "existingSecret": "redis",
            "keys": {"modelUrl": "model-url"},
        },
        "gateway": KEYS,
        "models": [SQUARE],
    },
    "cluster": {
        "redis": {"auth": "none", "existingSecret": "redis", "keys": {"url": "url"}},
        "gateway": {
            "anonymous": True,
            "autoscaling": {"enabled": True},
            "grpc": False,
            "settings": {"origins": "a,b"},
        },
        "models": [SQUARE],
    },
    "keda": {
        **OPEN,
        "gateway": KEYS,
        "keda": {"existingSecret": "keda-key"},
        "models": [
            {**SQUARE, "autoscaling": SCALED},
            {**SQUARE, "name": "My_Model.v2", "autoscaling": SCALED},
        ],
    },
    "keda-elsewhere": {
        **REDIS,
        "gateway": {"enabled": False},
        "keda": {"gatewayUrl": "http://127.0.0.1:8000/"},
        "workers": {"autoscaling": {**SCALED, "fallbackReplicas": 0}},
        "models": [SQUARE, {**SQUARE, "name": "fixed", "replicas": 2, "autoscaling": {"enabled": False}}],
    },
    "hpa": {
        **OPEN,
        "settings": {"log_level": "debug"},
        "batcher": {"settings": {"log_level": "error"}},
        "models": [
            {
                **SQUARE,
                "autoscaling": {**SCALED, "via": "hpa", "minReplicas": 1},
                "settings": {"min_workers": 0},
            }
        ],
    },
    "nodes": {
        **REDIS,
        "gateway": {"anonymous": True, "modelControl": True},
        "nodes": {
            "enabled": True,
            "replicas": 2,
            "gpus": 1,
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
            "settings": {"lease_ms": "10s"},
        },
    },
    "monitored": {
        **OPEN,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "enabled": True,
            "redis": [{"podSelector": {"matchLabels": {"app": "redis"}}}],
            "workersEgress": [{"ports": [{"port": 443}]}],
        },
        "console": {"enabled": True, "users": {"existingSecret": "users"}, "settings": {"read_only": True}},
    },
    "all": {
        "nameOverride": "pool",
        "image": {"registry": "registry.example/team/", "tag": "9", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "redis": {
            "url": "rediss://redis:6390/3",
            "prefix": "acme",
            "auth": "roles",
            "existingSecret": "redis",
            "keys": {"worker": "worker-password"},
            "tls": {"existingSecret": "ca"},
        },
        "settings": {"log_level": "debug"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "x"},
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "serviceAccount": {"annotations": {"role": "y"}},
        "gateway": {**KEYS, "replicas": 1, "preStopSeconds": 0, "service": {"type": "LoadBalancer"}},
        "batcher": {"replicas": 1, "settings": {"log_level": "warning", "policies": "p.py:Mine"}},
        "models": [PROBE_MODEL],
        "nodes": {"enabled": True, "volume": {"nfs": {"server": "nas", "path": "/models"}}},
        "console": {"enabled": True, "users": {"volume": {"emptyDir": {}}}},
        "networkPolicy": {"enabled": True, "collectorPort": 0},
        "prometheusRule": {"enabled": True, "without": ["CarpoolDeadLetters"]},
        "podDisruptionBudget": {"enabled": False},
    },
}

AUTOSCALED: Final[Object] = {**SQUARE, "autoscaling": SCALED}


def scaled(**changes: Any) -> Object:
    """Values with a model that is scaled so."""
    return {**OPEN, "models": [{**SQUARE, "autoscaling": {**SCALED, **changes}}]}


def documented() -> list[Object]:
    """The values in docs/kubernetes.md, with what those of the page leave out."""
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    parsed = [yaml.safe_load(textwrap.dedent(each)) for each in blocks if re.match(r" {4}[a-zA-Z]+:", each)]
    assert len(parsed) > 7
    return [
        OPEN
        | {
            name: {**OPEN[name], **part} if name in ("redis", "gateway") else part
            for name, part in each.items()
        }
        for each in parsed
    ]


# What is refused, and a part of what the message says.
REFUSED: Final[Sequence[tuple[Object, str]]] = (
    ({"gateway": {"anonymous": True}}, "redis.url is missing"),
    ({**OPEN, "redis": {"url": "http://redis"}}, "/redis/url"),
    ({**OPEN, "redis": {"url": "redis://user:geheim@redis"}}, "redis.url has a user or a password"),
    ({**OPEN, "redis": {"url": "redis://redis?password=geheim"}}, "redis.url has a user or a password"),
    ({**OPEN, "redis": {"url": "redis://redis", "auth": "roles"}}, "redis.existingSecret is missing"),
    (
        {**OPEN, "redis": {"url": "redis://redis", "existingSecret": "s", "keys": {"url": "u"}}},
        "redis.url and redis.keys.url are both",
    ),
    ({**OPEN, "redis": {"url": "redis://redis", "tls": {"existingSecret": "s"}}}, "must begin with rediss"),
    (REDIS, "everybody who reaches it could use all models"),
    ({**OPEN, "gateway": {**KEYS, "anonymous": True}}, "contradict"),
    ({**OPEN, "gatway": {}}, "'gatway' not allowed"),
    ({**OPEN, "gateway": {"anonymous": True, "settings": {"request_timeot_s": 1}}}, "'request_timeot_s' not"),
    ({**OPEN, "extraEnv": [{"name": "CARPOOL_DRAIN_S", "value": "9"}]}, "/extraEnv/0/name"),
    ({**OPEN, "models": [{"name": "square"}]}, "missing property 'module'"),
    ({**OPEN, "models": [{**SQUARE, "name": "a b"}]}, "/models/0/name"),
    ({**OPEN, "models": [{**SQUARE, "settings": {"max_batchsize": 8}}]}, "'max_batchsize' not allowed"),
    ({**OPEN, "models": [SQUARE, SQUARE]}, "two are named square"),
    ({**OPEN, "models": [{**AUTOSCALED, "replicas": 2}]}, "both replicas and autoscaling"),
    (scaled(maxReplicas=1, minReplicas=2), "is less than minReplicas"),
    (scaled(via="hpa"), "does not scale to zero"),
    (scaled(via="both"), "/models/0/autoscaling/via"),
    (
        {**OPEN, "models": [{**SQUARE, "name": "m.", "autoscaling": {"enabled": True, "via": "hpa"}}]},
        "cannot be selected",
    ),
    ({**OPEN, "gateway": KEYS, "models": [AUTOSCALED]}, "set keda.existingSecret"),
    ({**OPEN, "gateway": {"enabled": False}, "models": [AUTOSCALED]}, "KEDA asks a gateway"),
    ({**OPEN, "nodes": {"enabled": True}}, "nodes.volume is missing"),
    ({**OPEN, "console": {"enabled": True}}, "console.users: set existingSecret"),
)


class Case:
    """The objects that values become."""

    def __init__(self, values: Object, rendered: Rendered) -> None:
        assert not rendered.error, rendered.error
        self.values = values
        self.texts = rendered.texts
        self.objects: list[Object] = [
            each
            for name, text in rendered.texts.items()
            if not name.endswith("NOTES.txt")
            for each in yaml.load_all(text, yaml.CSafeLoader)
            if each
        ]

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (
            each for each in self.of_kind(kind) if each["metadata"]["name"] == f"{RELEASE}-carpool-{name}"
        )
        return found

    def selected(self, labels: Mapping[str, str]) -> list[Object]:
        """The pods that have these labels."""
        return [
            deployment["spec"]["template"]
            for deployment in self.of_kind("Deployment")
            if labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        ]


class Everything(NamedTuple):
    """All that was rendered, by one process: the cases, and once more; what is refused; what the page has."""

    cases: dict[str, Case]
    again: list[Rendered]
    refused: list[Rendered]
    documented: list[Rendered]
    lint: dict[str, Any]


@pytest.fixture(scope="module")
def everything() -> Everything:
    refused = [values for values, _ in REFUSED]
    rendered, lint = chart.render_all([*CASES.values(), *CASES.values(), *refused, *documented()])
    number = len(CASES)
    cases = {name: Case(CASES[name], one) for name, one in zip(CASES, rendered, strict=False)}
    rest = rendered[2 * number :]
    return Everything(cases, rendered[number : 2 * number], rest[: len(refused)], rest[len(refused) :], lint)


@pytest.fixture(scope="module")
def cases(everything: Everything) -> dict[str, Case]:
    return everything.cases


each_case = pytest.mark.parametrize("name", CASES)


def containers(case: Case) -> Iterator[tuple[Object, Object]]:
    """Each Deployment with its container."""
    for deployment in case.of_kind("Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        yield deployment, container


def env(container: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


# --- Helm and Kubernetes -----------------------------------------------------------------------------------


def test_lint_finds_nothing_but_the_missing_icon(everything: Everything) -> None:
    assert [message["error"] for message in everything.lint["messages"]] == ["icon is recommended"]
    assert everything.lint["errors"] == []


def test_the_same_values_become_the_same_objects(everything: Everything) -> None:
    assert [case.texts for case in everything.cases.values()] == [one.texts for one in everything.again]


def test_values_in_the_document_are_accepted(everything: Everything) -> None:
    assert [one.error for one in everything.documented if one.error] == []


@pytest.mark.parametrize("at", range(len(REFUSED)), ids=[message for _, message in REFUSED])
def test_wrong_values_are_refused_with_a_reason_that_shows_no_password(
    everything: Everything, at: int
) -> None:
    error = everything.refused[at].error
    assert REFUSED[at][1] in error
    assert "geheim" not in error


# Custom resources. The CRDs themselves allow unknown fields; these do not.
def _strict(**properties: Any) -> Object:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": [name for name in properties if name not in ("authenticationRef", "authMode")],
    }


_NAME: Final = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
_TEXT: Final = {"type": "string", "minLength": 1}
_WHOLE: Final = {"type": "integer", "minimum": 0}
_AT_ONCE: Final = _strict(stabilizationWindowSeconds={"const": 0})  # the batcher has waited
_BEHAVIOR: Final = _strict(scaleDown=_AT_ONCE, scaleUp=_AT_ONCE)
CUSTOM: Final[Mapping[str, Object]] = {
    "ScaledObject": _strict(
        scaleTargetRef=_strict(name=_NAME),
        minReplicaCount=_WHOLE,
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod={"const": 1},
        fallback=_strict(
            failureThreshold=_WHOLE, replicas=_WHOLE, behavior={"const": "currentReplicasIfHigher"}
        ),
        advanced=_strict(horizontalPodAutoscalerConfig=_strict(behavior=_BEHAVIOR)),
        triggers={
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": _strict(
                type={"const": "metrics-api"},
                metricType={"const": "AverageValue"},
                metadata=_strict(
                    url={
                        "type": "string",
                        "pattern": r"^http://[a-z0-9.-]+:8000/carpool/v1/scale/[A-Za-z0-9._-]+$",
                    },
                    valueLocation={"const": "wanted"},
                    targetValue={"const": "1"},
                    activationTargetValue={"const": "0"},
                    authMode={"const": "bearer"},
                ),
                authenticationRef=_strict(name=_NAME),
            ),
        },
    ),
    "TriggerAuthentication": _strict(
        secretTargetRef={
            "type": "array",
            "items": _strict(parameter={"const": "token"}, name=_NAME, key=_TEXT),
            "minItems": 1,
            "maxItems": 1,
        }
    ),
    "ServiceMonitor": _strict(
        selector=_strict(matchLabels={"type": "object"}),
        namespaceSelector=_strict(matchNames={"const": [NAMESPACE]}),
        endpoints={
            "type": "array",
            "items": _strict(
                port={"const": "metrics"},
                path={"const": "/metrics"},
                interval=_TEXT,
                relabelings={"type": "array"},
            ),
        },
    ),
    "PrometheusRule": _strict(
        groups={
            "type": "array",
            "items": _strict(name=_TEXT, rules={"type": "array", "items": {"type": "object"}}),
        }
    ),
}


def test_objects_are_valid(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache(kubernetes_validate.utils.schema_contents)  # else a megabyte is read for each object
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read)
    unique = {json.dumps(each): each for case in cases.values() for each in case.objects}
    for each in unique.values():
        assert each["metadata"]["namespace"] == NAMESPACE
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] in ("keda.sh/v1alpha1", "monitoring.coreos.com/v1")
            jsonschema.validate(each["spec"], CUSTOM[each["kind"]])
        else:
            kubernetes_validate.validate(each, NEWEST, strict=True)
    for each in cases["all"].objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, OLDEST, strict=True)


def test_names_are_unique_and_short_enough_for_a_label(cases: dict[str, Case]) -> None:
    for case in cases.values():
        names = [(each["kind"], each["metadata"]["name"]) for each in case.objects]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 63 for _, name in names)


# --- what the chart says of services -----------------------------------------------------------------------


PEM: Final = {"ca.pem": pem.CERTIFICATE, "cert.pem": pem.CERTIFICATE, "key.pem": pem.KEY}


def mounted_files(deployment: Object, container: Object) -> set[str]:
    """The paths of files that volumes of Secrets and of the chart's ConfigMaps put into a container."""
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    found = set()
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        sources = [volume["secret"]] if "secret" in volume else []
        sources += [source["secret"] for source in volume.get("projected", {}).get("sources", ())]
        found |= {f"{mount['mountPath']}/{item['path']}" for source in sources for item in source["items"]}
    return found


@each_case
def test_services_accept_their_arguments_and_variables(
    cases: dict[str, Case],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the files that are mounted, and no others. Each CARPOOL_ variable is a setting of that service."""
    seen = set()
    for deployment, container in containers(cases[name]):
        command, *arguments = container["args"]
        kind = SETTINGS[command]
        root = tmp_path / deployment["metadata"]["name"]
        for path in mounted_files(deployment, container):
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(PEM.get(file.name, "a password of a role"))
        variables = env(container)
        for each in container["env"]:
            if "valueFrom" in each:  # the address, with a password in it
                variables[each["name"]] = "redis+cluster://user:word@redis:6379"
        ours = {key: value for key, value in variables.items() if key.startswith("CARPOOL_")}
        fields = {key.removeprefix("CARPOOL_").lower() for key in ours}
        assert fields <= kind.model_fields.keys(), f"{command} has no {fields - kind.model_fields.keys()}"
        here = f"{root}/run/carpool/"
        with monkeypatch.context() as patch:
            for variable, value in ours.items():
                patch.setenv(variable, value.replace("/run/carpool/", here))
            arguments = [each.replace("/run/carpool/", here) for each in arguments]
            settings: Any = read_settings(kind, arguments, command)
        assert "nothing reads" not in capsys.readouterr().err
        assert settings.http_port == 9464
        seen.add(command)
    assert {"batcher"} < seen


def test_values_of_parameters_and_settings_arrive_as_they_were_written(cases: dict[str, Case]) -> None:
    (_, container) = next(
        each
        for each in containers(cases["own-model"])
        if "Classifier=/files/model.py:Classifier" in each[1]["args"]
    )
    variables = env(container)
    assert json.loads(variables["CARPOOL_PARAM"]) == [
        "limit=1073741824", "sizes=[1,2]", "text=two\nlines", "weights=/models/small.pt",
    ]  # fmt: skip
    assert json.loads(variables["CARPOOL_SET"]) == [
        "max_batch_size=64", "max_queue_delay_ms=2.5", "preserve_ordering=true",
    ]  # fmt: skip
    assert json.loads(variables["CARPOOL_PARAM_FILE"]) == ["token=/run/carpool/parameters/token"]
    assert variables["CARPOOL_REPLICAS"] == "2"


@each_case
def test_each_pod_has_the_password_of_its_own_role_only(cases: dict[str, Case], name: str) -> None:
    for deployment, container in containers(cases[name]):
        variables = env(container)
        secrets = [
            volume["secret"]
            for volume in deployment["spec"]["template"]["spec"]["volumes"]
            if volume["name"] == "redis"
        ]
        auth = cases[name].values["redis"].get("auth", "none")
        assert len(secrets) == (auth != "none")
        if auth == "roles":
            assert variables["CARPOOL_REDIS_USER"] in ROLES.keys() | {"console"}
            (item,) = secrets[0]["items"]
            assert item["key"] in (variables["CARPOOL_REDIS_USER"], "worker-password")


@each_case
def test_no_object_has_a_secret(cases: dict[str, Case], name: str) -> None:
    assert cases[name].of_kind("Secret") == []
    for _, container in containers(cases[name]):
        for variable, value in env(container).items():
            assert "@" not in value, variable
            assert not re.search("PASSWORD(?!_FILE)|TOKEN|SECRET", variable)


# --- each convention, and what went wrong without it (docs/decisions/0121) ---------------------------------


@each_case
def test_replicas_are_left_to_what_scales_them(cases: dict[str, Case], name: str) -> None:
    """Else each upgrade sets them back, or conflicts with the autoscaler."""
    case = cases[name]
    scalers = [*case.of_kind("ScaledObject"), *case.of_kind("HorizontalPodAutoscaler")]
    scaled = [each["spec"]["scaleTargetRef"]["name"] for each in scalers]
    assert len(set(scaled)) == len(scaled), "two things scale one Deployment"
    for deployment in case.of_kind("Deployment"):
        assert ("replicas" not in deployment["spec"]) == (deployment["metadata"]["name"] in scaled)
    assert set(scaled) <= {each["metadata"]["name"] for each in case.of_kind("Deployment")}


def test_cases_have_both_ways_to_scale(cases: dict[str, Case]) -> None:
    (scaled, other) = cases["keda"].of_kind("ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    assert scaled["spec"]["fallback"]["replicas"] == 1  # not 0: that would stop all while the gateway is away
    assert scaled["spec"]["triggers"][0]["authenticationRef"]["name"] == "rel-carpool-scale"
    assert other["spec"]["triggers"][0]["metadata"]["url"].endswith("/scale/My_Model.v2")
    (elsewhere,) = cases["keda-elsewhere"].of_kind("ScaledObject")
    assert (
        elsewhere["spec"]["triggers"][0]["metadata"]["url"] == "http://127.0.0.1:8000/carpool/v1/scale/square"
    )
    assert elsewhere["spec"]["fallback"]["replicas"] == 0
    assert cases["keda-elsewhere"].of_kind("TriggerAuthentication") == []
    for name in ("keda", "keda-elsewhere", "hpa"):  # of the last one its own setting says so
        (container,) = (each for _, each in containers(cases[name]) if "square=square" in each["args"])
        assert json.loads(env(container)["CARPOOL_SET"]) == ["max_workers=8", "min_workers=0"]
    assert cases["hpa"].one("HorizontalPodAutoscaler", "worker-square")["spec"]["minReplicas"] == 1
    (hpa,) = cases["hpa"].of_kind("HorizontalPodAutoscaler")
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"] == {
        "name": "carpool_wanted_workers",
        "selector": {"matchLabels": {"model": "square"}},
    }
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


@each_case
def test_probes_and_shutdown(cases: dict[str, Case], name: str) -> None:
    for deployment, container in containers(cases[name]):
        pod = deployment["spec"]["template"]["spec"]
        probes = {probe: container[f"{probe}Probe"] for probe in ("startup", "liveness", "readiness")}
        assert {probe: each["httpGet"] for probe, each in probes.items()} == {
            "startup": {"path": "/healthz", "port": "metrics"},
            "liveness": {"path": "/healthz", "port": "metrics"},  # the process only: Redis may be away
            "readiness": {"path": "/readyz", "port": "metrics"},
        }
        drain_s = float(env(container).get("CARPOOL_DRAIN_S", 0))
        waits_s = int(
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", 0])[1]
        )
        assert pod["terminationGracePeriodSeconds"] >= drain_s + waits_s + 15
        starts_s = probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"]
        assert deployment["spec"]["progressDeadlineSeconds"] > starts_s
        if "Classifier" in str(container["args"]):
            assert starts_s == 1200
    gateways = [each for each in containers(cases[name]) if each[1]["name"] == "gateway"]
    for _, container in gateways:
        assert ("lifecycle" in container) == (cases[name].values["gateway"].get("preStopSeconds") != 0)


@each_case
def test_pods_have_no_rights(cases: dict[str, Case], name: str) -> None:
    for deployment, container in containers(cases[name]):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]  # noqa: S108


@each_case
def test_one_pod_at_a_time_is_evicted_and_a_single_one_is_not_kept(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    budgets = {each["metadata"]["name"]: each["spec"] for each in case.of_kind("PodDisruptionBudget")}
    is_on = case.values.get("podDisruptionBudget", {}).get("enabled", True)
    for deployment in case.of_kind("Deployment"):
        budget = budgets.pop(deployment["metadata"]["name"], None)
        assert (budget is not None) == (is_on and deployment["spec"].get("replicas", 2) > 1)
        if budget is not None:
            assert budget["maxUnavailable"] == 1
            assert budget["selector"] == deployment["spec"]["selector"]
    assert budgets == {}


@each_case
def test_selectors_match(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    for deployment in case.of_kind("Deployment"):
        labels = deployment["spec"]["selector"]["matchLabels"]
        assert case.selected(labels) == [deployment["spec"]["template"]], "exactly its own pods"
    for service in case.of_kind("Service"):
        pods = case.selected(service["spec"]["selector"])
        is_of_all = service["metadata"]["name"].endswith("-metrics")
        assert len(pods) == (len(case.of_kind("Deployment")) if is_of_all else 1)
        for port in service["spec"]["ports"]:
            for pod in pods:
                assert port["targetPort"] in {each["name"] for each in ports_of(pod)}
    for monitor in case.of_kind("ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (
            each for each in case.of_kind("Service") if labels.items() <= each["metadata"]["labels"].items()
        )
        assert {each["name"] for each in service["spec"]["ports"]} == {"metrics"}
        assert service["spec"]["publishNotReadyAddresses"]


def ports_of(pod: Object) -> list[Object]:
    found: list[Object] = pod["spec"]["containers"][0]["ports"]
    return found


@each_case
def test_ports_are_those_that_services_are_told(cases: dict[str, Case], name: str) -> None:
    for deployment, container in containers(cases[name]):
        arguments = container["args"]
        told = {
            int(arguments[at + 1]) for at, each in enumerate(arguments) if each in ("--port", "--grpc-port")
        }
        assert {each["containerPort"] for each in ports_of(deployment["spec"]["template"])} == told | {9464}


def test_network_policies_let_in_what_is_served_and_out_what_is_needed(cases: dict[str, Case]) -> None:
    case = cases["monitored"]
    for policy in case.of_kind("NetworkPolicy"):
        pods = case.selected(policy["spec"]["podSelector"]["matchLabels"])
        assert pods
        for rule in policy["spec"].get("ingress", ()):
            served = set.intersection(*({each["containerPort"] for each in ports_of(pod)} for pod in pods))
            assert {each["port"] for each in rule["ports"]} <= served
    rules = case.one("NetworkPolicy", "gateway")["spec"]["ingress"]
    assert {"podSelector": {}} in rules[0]["from"]
    assert rules[1] == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}],
        "ports": [{"port": 8000}],
    }
    (of_all,) = (each for each in case.of_kind("NetworkPolicy") if each["metadata"]["name"] == "rel-carpool")
    dns, redis, collector = of_all["spec"]["egress"]
    assert dns == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    assert redis == {
        "ports": [{"port": 6379}, {"port": 26379}],
        "to": [{"podSelector": {"matchLabels": {"app": "redis"}}}],
    }
    assert collector == {"ports": [{"port": 4318}]}
    (of_all,) = (
        each for each in cases["all"].of_kind("NetworkPolicy") if each["metadata"]["name"] == "rel-pool"
    )
    assert of_all["spec"]["egress"][1:] == [{"ports": [{"port": 6379}, {"port": 26379}, {"port": 6390}]}]


def test_alerts_are_those_of_prometheus(cases: dict[str, Case]) -> None:
    alerts = yaml.safe_load((ROOT / "ops/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    (rule,) = cases["monitored"].of_kind("PrometheusRule")
    assert rule["spec"]["groups"] == alerts
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (fewer,) = cases["all"].of_kind("PrometheusRule")
    names = [each["alert"] for each in fewer["spec"]["groups"][0]["rules"]]
    assert names == [each["alert"] for each in alerts[0]["rules"] if each["alert"] != "CarpoolDeadLetters"]


def test_gpus(cases: dict[str, Case]) -> None:
    found = {
        container["args"][1].partition("=")[0]: (
            container["resources"]["limits"].get("nvidia.com/gpu"),
            env(container)["CARPOOL_REPLICAS"],
            deployment["spec"]["replicas"],
        )
        for deployment, container in containers(cases["gpus"])
        if container["name"] == "worker"
    }
    assert found == {"square": (1, "auto", 1), "on-cpu": (None, "1", 0), "two": (2, "auto", 1)}


def test_own_files_restart_their_pods_when_they_change(cases: dict[str, Case]) -> None:
    (config,) = cases["own-model"].of_kind("ConfigMap")
    own = cases["own-model"].one("Deployment", config["metadata"]["name"].removeprefix("rel-carpool-"))
    assert len(own["spec"]["template"]["metadata"]["annotations"]["checksum/files"]) == 64
    plain = cases["own-model"].one("Deployment", "worker-classifier")
    assert "annotations" not in plain["spec"]["template"]["metadata"]
    assert not any(
        "version" in label or "chart" in label for label in plain["spec"]["template"]["metadata"]["labels"]
    )


def test_everything_else_that_values_say_arrives(cases: dict[str, Case]) -> None:
    case = cases["all"]
    for deployment, container in containers(case):
        pod = deployment["spec"]["template"]
        assert pod["metadata"]["annotations"]["a"] == "b"
        assert pod["metadata"]["labels"]["team"] == "x"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert container["imagePullPolicy"] == "Always"
        assert env(container)["TZ"] == "UTC"
        assert env(container)["CARPOOL_PREFIX"] == "acme"
        assert env(container)["CARPOOL_LOG_LEVEL"] == (
            "warning" if container["name"] == "batcher" else "debug"
        )
        is_own = "Classifier" in str(container["args"])
        image = "registry.example/classifier:7" if is_own else r"registry\.example/team/carpool-\w+:9"
        assert re.fullmatch(image, container["image"])


def test_notes_say_how_to_reach_it(cases: dict[str, Case]) -> None:
    notes = {name: case.texts["carpool/templates/NOTES.txt"] for name, case in cases.items()}
    assert "port-forward service/rel-carpool-gateway 8000" in notes["least"]
    assert "without a password" in notes["least"]
    assert "without a password" not in notes["roles-and-tls"]
    assert '-H "Authorization: Bearer $KEY"' in notes["roles-and-tls"]
    assert "No model is served yet" not in notes["nodes"]
