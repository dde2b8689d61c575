"""Commands to copy: each sends one request to a running stack, from a shell, curl, redis-cli or Python."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.model_settings import ModelKind
from carpool.redis_url import PORT, parse
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.wire.tensors import TensorSpec
from carpool_cli.local.example import Example, example, spoken_example

_WHOLE_SEQUENCE: Final = " --sequence-id try --sequence-start --sequence-end"
_FLAGS: Final = {
    ModelKind.PLAIN: "",
    ModelKind.STEPPING: " --stream",
    ModelKind.STATEFUL: _WHOLE_SEQUENCE,
    ModelKind.BOUND: _WHOLE_SEQUENCE,
}
_HEADERS: Final = {
    ModelKind.PLAIN: "",
    ModelKind.STEPPING: " -N -H 'Accept: text/event-stream'",
    **dict.fromkeys(
        (ModelKind.STATEFUL, ModelKind.BOUND),
        " -H 'Carpool-Sequence-Id: try' -H 'Carpool-Sequence-Start: true' -H 'Carpool-Sequence-End: true'",
    ),
}
_FIELDS: Final = " sequence_id try sequence_start 1 sequence_end 1"
_OPTIONS: Final = ', sequence_id="try", sequence_start=True, sequence_end=True'
_DEFAULT_URLS: Final = ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379")


def lines(
    url: str,
    model: str,
    prefix: str = DEFAULT_PREFIX,
    inputs: Sequence[TensorSpec] = (),
    kind: ModelKind = ModelKind.PLAIN,
    gateway_url: str = "",
    spoken: Spoken = NOT_SPOKEN,
) -> list[str]:
    """Commands for `carpool infer`, for curl if there is a gateway, for redis-cli and for Python. A body too
    large for JSON has only the last. If the model steps, the first two print chunks as they come;
    if it keeps states, each command sends a sequence of one request. If it speaks OpenAI's API, so does curl.

    No command contains a password: it is taken from the environment.
    """
    body = example(model, inputs, spoken)
    python = _python(url, model, prefix, body, kind)
    if not (body.json or body.json_maker):
        return [python]
    return [*_shell(url, model, prefix, body, kind, gateway_url, spoken), python]


def _shell(
    url: str, model: str, prefix: str, body: Example, kind: ModelKind, gateway_url: str, spoken: Spoken
) -> list[str]:
    keys, cli = Keys(model, prefix), _redis_cli(url)
    prefix_flag = "" if prefix == DEFAULT_PREFIX else f" --prefix {shlex.quote(prefix)}"
    url_flag = "" if _is_default(url) or _has_password(url) else f" --redis-url {shlex.quote(url)}"
    flags = f"{_FLAGS[kind]}{url_flag}{prefix_flag}"
    fields = _FIELDS if kind.has_sequences else ""
    if body.json:
        before, text = "", shlex.quote(body.json.strip('"'))  # `carpool infer` sends text as a JSON string
        data = f"-d {shlex.quote(body.json)}"
        add = f"{cli} XADD {shlex.quote(keys.requests)} '*'{fields} body {shlex.quote(body.json)}"
    else:
        maker = shlex.quote(f"import json; print(json.dumps({body.json_maker}))")
        before, text = f"{command('python')} -c {maker} | ", "-"
        data = "--data-binary @-"
        add = f"{before}{cli} -x XADD {shlex.quote(keys.requests)} '*'{fields} body"
    curl = f"{before}curl {data}{_HEADERS[kind]} {gateway_url}/carpool/v1/models/{model}/infer"
    if spoken.speaks:
        curl = spoken_curl(model, spoken, gateway_url, is_stream=kind is ModelKind.STEPPING)
    return [
        f"{before}{command('carpool')} infer {model} {text}{flags}",
        *([curl] if gateway_url else []),
        f'{cli} BLPOP "{keys.result(f"$({add})")}" 5',
    ]


def spoken_curl(model: str, spoken: Spoken, gateway_url: str, *, is_stream: bool) -> str:
    """A command for curl, for a model that speaks OpenAI's API."""
    path, body = spoken_example(model, spoken, is_stream=is_stream)
    return f"curl -N -d {shlex.quote(body)} {gateway_url}{path}"


def _python(url: str, model: str, prefix: str, body: Example, kind: ModelKind) -> str:
    client = [] if _is_default(url) or _has_password(url) else [json.dumps(url)]
    client += [] if prefix == DEFAULT_PREFIX else [f"prefix={json.dumps(prefix)}"]
    options = _OPTIONS if kind.has_sequences else ""
    call = f'Client({", ".join(client)}).infer("{model}", {body.value}{options})'
    script = f"{body.imports}from carpool import Client; print({call})"
    return f"{command('python')} -c {shlex.quote(script)}"


def needs_environment(url: str) -> bool:
    """Whether the commands need CARPOOL_REDIS_URL in the environment."""
    return _has_password(url)


def command(name: str) -> str:
    """How to call, from the current directory, the `carpool` or `python` of this installation."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        return name
    found = shutil.which(name)
    if found and Path(found) == path:
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _redis_cli(url: str) -> str:
    redis = parse(url)
    authority = redis.tls.get("ssl_ca_certs")
    tls = f" --cacert {shlex.quote(str(authority))}" if authority else ""
    if redis.has_password:
        return f'redis-cli -u "$CARPOOL_REDIS_URL"{tls}'
    database = f" -n {redis.database}" if redis.database else ""
    if redis.scheme == "unix":
        return f"redis-cli -s {shlex.quote(redis.path)}{database}"
    host, port = redis.addresses[0]
    if redis.scheme == "redis" and not redis.kind and host == "127.0.0.1":
        return f"redis-cli{'' if port == PORT else f' -p {port}'}{database}"
    return f"redis-cli -u {shlex.quote(url.partition('?')[0])}{tls}{database}"


def _is_default(url: str) -> bool:
    return url in _DEFAULT_URLS


def _has_password(url: str) -> bool:
    return parse(url).has_password
