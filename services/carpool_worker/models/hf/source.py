"""Where the files of a model of transformers are: a folder, or a name on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_ON_HUB: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_name(source: str) -> str:
    """A valid model name: that of the folder, or the last part of the name on the Hub."""
    last = Path(source).resolve().name if Path(source).is_dir() else source.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-").rstrip("-")[:128] or "model"


def check_source(source: str, prefix: str) -> None:
    """Raise ValueError unless this is a folder with a config.json, or may be a name on the Hub."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{prefix}{source}: the folder has no config.json, so it is none that save_pretrained wrote"
            )
    elif folder.exists():
        raise ValueError(f"{prefix}{source}: it is a file; name the folder that it is in")
    elif not _ON_HUB.fullmatch(source) or source.startswith("."):
        raise ValueError(
            f"{prefix}{source}: there is no such folder, and it is no name on the Hugging Face Hub, such as "
            f"{prefix}Qwen/Qwen2.5-0.5B-Instruct"
        )


def cannot_load(source: str, prefix: str, error: Exception) -> RuntimeError:
    """What to tell of an exception that transformers raised for this source."""
    if not Path(source).is_dir() and isinstance(error, OSError):
        module = f" (An object of the module is {prefix[:-1]}.py:{source}.)" if source.isidentifier() else ""
        return RuntimeError(
            f"{prefix}{source}: there is no such folder, and as a name on the Hugging Face Hub it cannot be "
            f"loaded: {_first_line(error)}.{module}"
        )
    return RuntimeError(f"{prefix}{source} cannot be loaded: {_first_line(error)}")


def check_weights(source: str, prefix: str, missing: Iterable[str], unused: str = "") -> None:
    """Raise ValueError for weights that the files lack, which transformers makes up. `unused`: what the names
    of those begin with that are not needed."""
    names = sorted(name for name in missing if not (unused and name.startswith(unused)))
    if names:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        raise ValueError(
            f"{prefix}{source}: its files lack the weights {names[0]}{more}, which would be random; they are "
            "those of a network of another kind"
        )


def missing_framework(what: str, error: ImportError) -> RuntimeError:
    """What to tell where torch or transformers cannot be imported."""
    return RuntimeError(
        f"{what} needs PyTorch and transformers, which cannot be imported ({error}): install them with pip "
        "install 'PATH[transformers]', where PATH is a checkout of Carpool"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.'):.300}"
