"""What a worker registers about its model: a Redis hash of settings and tensor declarations.

Settings are text, as `ModelSettings.as_text` writes them. `stepping` is `true` for a stepping model,
`stateful` for one whose states of sequences are in Redis, and `bound` for one that has them in its processes
(`ModelKind`). The fields `inputs` and `outputs` are JSON lists of declared tensors, named as in the Open
Inference Protocol. `parameters` is a JSON map of what the model was loaded with, as text for people; secrets
are hidden. `settings_from` is one of the settings that are not the model's own, with what gives them:
`--set`, `file` or `load`. `version` is the name of the model's version, if it declares one; `versions`, which
no worker declares, those of all living workers, with spaces between them. `speaks` and `understands` are JSON
lists of what it declares of OpenAI's API (`carpool.spoken`).

Each worker declares such a hash. What is registered is made of those of living workers (`combined`).

Why: docs/decisions/0097.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from carpool.model_settings import ModelKind, ModelSettings
from carpool.spoken import NOT_SPOKEN, SPEAKS, UNDERSTANDS, Spoken
from carpool.wire.tensors import TensorSpec

VERSION: Final = "version"
VERSIONS: Final = "versions"
_TENSORS: Final = ("inputs", "outputs")
_SETTINGS_FROM: Final = "settings_from"
_DECLARED: Final = (*_TENSORS, "parameters", _SETTINGS_FROM, VERSION, SPEAKS, UNDERSTANDS)
OPTIONAL_FIELDS: Final = (*_DECLARED, VERSIONS)

Registration = Mapping[str, str]
"""The fields of such a hash."""

FIELDS: Final = (*ModelSettings.names(), *ModelKind.PLAIN.fields, *OPTIONAL_FIELDS)
_SHOWN_CHARS_MAX: Final = 60
_SPEC_FIELDS: Final = ("name", "datatype", "shape")
_SPEC_OPTIONS: Final = ("text", "labels", "optional")  # are there if they are set


def encode_registration(
    settings: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    kind: ModelKind = ModelKind.PLAIN,
    parameters: Mapping[str, str] | None = None,
    version: str = "",
    spoken: Spoken = NOT_SPOKEN,
) -> dict[str, str]:
    """The fields of the hash. A model that declares no inputs has no field `inputs`; likewise for outputs and
    parameters, for an empty version, and for what it does not say of OpenAI's API."""
    fields = {**settings, **kind.fields, **({VERSION: version} if version else {}), **spoken.fields}
    if parameters:
        fields["parameters"] = json.dumps(parameters)
    for name, specs in zip(_TENSORS, (inputs, outputs), strict=True):
        if specs:
            fields[name] = json.dumps([_fields_of(spec) for spec in specs])
    return fields


def encode_settings_from(given: Mapping[str, str]) -> dict[str, str]:
    """The field that says what gives settings in place of the model; no field if nothing does."""
    return {_SETTINGS_FROM: json.dumps(given)} if given else {}


def _fields_of(spec: TensorSpec) -> dict[str, Any]:
    fields = {name: getattr(spec, name) for name in _SPEC_FIELDS}
    return fields | {name: value for name in _SPEC_OPTIONS if (value := getattr(spec, name))}


def decode_inputs(registration: Mapping[str, str]) -> list[TensorSpec]:
    """The tensors that a registered model declares as inputs. Raises ValueError if malformed."""
    return _decode_specs(registration, "inputs")


def decode_outputs(registration: Mapping[str, str]) -> list[TensorSpec]:
    """The tensors that a registered model declares as outputs. Raises ValueError if malformed."""
    return _decode_specs(registration, "outputs")


def decode_parameters(registration: Mapping[str, str]) -> dict[str, str]:
    """What a registered model was loaded with, for people; empty if malformed."""
    return _decode_texts(registration, "parameters")


def decode_settings_from(registration: Mapping[str, str]) -> dict[str, str]:
    """What gives the settings that are not the model's own, as the worker that registered last declares it;
    empty if malformed."""
    return _decode_texts(registration, _SETTINGS_FROM)


def _decode_texts(registration: Mapping[str, str], name: str) -> dict[str, str]:
    try:
        found = json.loads(registration.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return {name: str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def _decode_specs(registration: Mapping[str, str], name: str) -> list[TensorSpec]:
    try:
        return [TensorSpec(**spec) for spec in json.loads(registration.get(name, "[]"))]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"registered {name} are not a list of tensors: {error}") from None


def combined(
    own: Registration, others: Sequence[Registration], registered: Registration | None = None
) -> dict[str, str]:
    """What is to be registered of a model whose workers declare `own` and `others`.

    Settings are the tightest of those whose kind the model has (`ModelSettings.tightest`). What has no order
    is that of the worker that registered last, as long as one declares it: the kind, the version, the
    tensors, the policy and the weights of tenants. `registered`: what is registered so far; None: that of
    `own` registers now.
    """
    latest = own if registered is None else registered
    kind = ModelKind.of(latest)
    if all(ModelKind.of(declared) is not kind for declared in (own, *others)):
        kind = ModelKind.of(own)
    of_kind = [declared for declared in (own, *others) if ModelKind.of(declared) is kind]

    def latest_of(name: str) -> str | None:
        declared = [fields.get(name) for fields in of_kind]
        return latest.get(name) if latest.get(name) in declared else declared[0]

    unordered = {name: latest_of(name) for name in ("policy", "tenant_weights", *_DECLARED)}
    fields = {name: text for name, text in unordered.items() if text is not None}
    if versions := " ".join(filter(None, versions_of((own, *others)))):
        fields[VERSIONS] = versions
    settings = [ModelSettings.from_readable(declared) for declared in of_kind]
    tightest = ModelSettings.tightest(settings, ModelSettings.from_readable(fields))
    return {**tightest.as_text(), **kind.fields, **fields}


def differing(declared: Sequence[Registration]) -> dict[str, dict[str, int]]:
    """Fields that workers declare differently, but for versions and what gives a setting: of each how many
    workers declare which value, which is empty for a field that one does not have."""
    names = sorted({name for fields in declared for name in fields} - {VERSION, VERSIONS, _SETTINGS_FROM})
    counts = {name: Counter(fields.get(name, "") for fields in declared) for name in names}
    return {name: dict(of_one) for name, of_one in counts.items() if len(of_one) > 1}


def versions_of(declared: Sequence[Registration]) -> dict[str, int]:
    """How many workers declare which version of the model, which is empty for those that declare none."""
    return dict(sorted(Counter(fields.get(VERSION, "") for fields in declared).items()))


def describe_versions(found: Mapping[str, int]) -> str:
    """What `versions_of` found, for a person, such as `1 (1 worker), 2 (2 workers)`."""
    return ", ".join(_of_workers(version, workers) for version, workers in found.items())


def describe_differing(found: Mapping[str, Mapping[str, int]]) -> str:
    """What `differing` found, for a person, such as `max_batch_size: 4 (1 worker), 64 (2 workers)`."""

    def of_field(workers: Mapping[str, int]) -> str:
        by_number = sorted(workers.items(), key=lambda of_one: (len(of_one[0]), of_one[0]))
        return ", ".join(_of_workers(*of_one) for of_one in by_number)

    return "; ".join(f"{name}: {of_field(workers)}" for name, workers in found.items())


def _of_workers(text: str, workers: int) -> str:
    shown = text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
    return f"{shown or 'none'} ({workers} worker{'s' if workers > 1 else ''})"
