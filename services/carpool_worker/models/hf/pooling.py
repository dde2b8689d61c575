"""What a folder says of how an embedding is made of the vectors of its tokens. Pure, but for reading files.

The files are those of the library sentence-transformers. A folder without them has the mean of the vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MODES: Final = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens")
_SPELT: Final = {  # in a folder's file, as a flag
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize")


class Pooling(NamedTuple):
    """How an embedding is made.

    `tokens_max`: of a text; None: what the network takes. `prompt`: what precedes each text. `network`: the
    folder of the network, relative to that of the model. `lowers`: texts become lower case.
    """

    mode: str = "mean"
    normalizes: bool = False
    tokens_max: int | None = None
    prompt: str = ""
    network: str = ""
    lowers: bool = False


def read_pooling(folder: Path) -> Pooling:
    """What the files of a folder say. Raises ValueError for what is not supported, which names the file."""
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return Pooling()
    modules = {_kind(module): str(module.get("path", "")) for module in _read(modules_file)}
    unknown = [kind for kind in modules if kind not in _KNOWN_MODULES]
    if unknown:
        raise ValueError(
            f"{modules_file}: has a module {unknown[0]}; supported are {', '.join(_KNOWN_MODULES)}. Write "
            "a class that loads it with sentence-transformers"
        )
    network = modules.get("Transformer", "")
    of_network = _read_if_there(folder / network / "sentence_bert_config.json")
    of_texts = _read_if_there(folder / "config_sentence_transformers.json")
    prompts, name = of_texts.get("prompts") or {}, of_texts.get("default_prompt_name")
    return Pooling(
        mode=_mode(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else "mean",
        normalizes="Normalize" in modules,
        tokens_max=of_network.get("max_seq_length"),
        prompt=str(prompts.get(name, "")) if name else "",
        network=network,
        lowers=bool(of_network.get("do_lower_case")),
    )


def _kind(module: Mapping[str, Any]) -> str:
    """`Pooling` of sentence_transformers.models.Pooling."""
    return str(module.get("type", "")).rpartition(".")[2]


def _mode(file: Path) -> str:
    declared = _read(file)
    modes = [mode for flag, mode in _SPELT.items() if declared.get(flag)]
    named = declared.get("pooling_mode")
    if named:
        modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(
            f"{file}: pools by {' and '.join(map(str, modes)) or 'nothing'}; supported is one of {MODES}"
        )
    if declared.get("include_prompt") is False:
        raise ValueError(f"{file}: include_prompt is false, which is not supported")
    return str(modes[0])


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _read_if_there(file: Path) -> Mapping[str, Any]:
    found = _read(file) if file.is_file() else {}
    return found if isinstance(found, Mapping) else {}
