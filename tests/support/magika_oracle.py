"""The file-type model in the `magika` wheel, and magika's own results as the expected ones.

The model takes the first and last 1024 bytes of a file, stripped of white space and padded, as int32, and
returns a score for each content type.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import os
import struct
import sysconfig
import tarfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from magika import Magika
from magika.types import Seekable
from numpy.typing import NDArray

from carpool.wire.tensors import Array

SAMPLES: Final = 60
SAMPLES_PER_SUFFIX: Final = 2
SAMPLE_BYTES: Final = range(64, 1 << 20)

# How much a content's score may differ between batch sizes. onnxruntime sums a single item in another order,
# and the model normalises by E[x^2] - E[x]^2, which magnifies that rounding (5e-4 was measured).
SCORE_TOLERANCE: Final = 1e-3


@functools.cache
def _magika() -> Magika:
    return Magika()


def _config() -> Any:
    return _magika()._model_config


def model_path() -> Path:
    """The wheel's model.onnx."""
    spec = find_spec("magika")
    assert spec is not None and spec.origin is not None, "magika is not installed"
    return Path(spec.origin).parent / "models" / _magika().get_model_name() / "model.onnx"


def features(data: bytes) -> NDArray[np.int32]:
    """The model's input for a file's content: int32, of the model's input length."""
    config = _config()
    found = Magika._extract_features_from_seekable(
        Seekable(io.BytesIO(data)),
        config.beg_size,
        config.mid_size,
        config.end_size,
        config.padding_token,
        config.block_size,
        config.use_inputs_at_offsets,
    )
    return np.array([*found.beg, *found.end], np.int32)


def consults_model(data: bytes) -> bool:
    """Whether magika runs its model on this content; very short ones it classifies by rules."""
    shortest, padding = _config().min_file_size_for_dl, _config().padding_token
    return len(data) >= shortest and bool(features(data)[shortest - 1] != padding)


def answer(data: bytes) -> tuple[str, float]:
    """magika's own result: its model's label (before thresholds and rules) and score."""
    result = _magika().identify_bytes(data)
    return str(result.dl.label), float(result.score)


def answers(paths: Sequence[Path]) -> list[tuple[str, float]]:
    """As `answer`, for files that magika executes as one batch."""
    results = _magika().identify_paths(paths)
    return [(str(result.dl.label), float(result.score)) for result in results]


def label_of(scores_row: Array) -> tuple[str, float]:
    """The label and score of one row of the model's output."""
    best = int(np.argmax(scores_row))
    return str(_config().target_labels_space[best]), float(scores_row[best])


@functools.cache
def sample_files() -> list[Path]:
    """About 60 files of the commonest kinds in the standard library and the installed packages."""
    by_suffix: defaultdict[str, list[str]] = defaultdict(list)
    for path in _installed_files():
        _, dot, suffix = path.rpartition("/")[2].rpartition(".")
        by_suffix[dot and suffix].append(path)
    found: list[Path] = []
    for paths in sorted(by_suffix.values(), key=len, reverse=True):
        found += itertools.islice(filter(_is_sample, map(Path, paths)), SAMPLES_PER_SUFFIX)
        if len(found) >= SAMPLES:
            break
    return found


def _is_sample(path: Path) -> bool:
    return path.stat().st_size in SAMPLE_BYTES and consults_model(path.read_bytes())


def _installed_files() -> list[str]:
    """Installed files in an order that depends on their names alone, without bytecode caches. As texts: there
    are tens of thousands."""
    found = []
    for root in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platlib")}):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted({*folders} - {"__pycache__", "site-packages"})
            found += [f"{folder}/{name}" for name in sorted(names)]
    return found


def generated_files() -> dict[str, bytes]:
    """Small contents by their obvious label, the same on every machine."""
    rows = [{"id": number, "name": f"name {number}", "price": number * 1.5} for number in range(60)]
    table = io.StringIO()
    csv.writer(table).writerows([rows[0].keys(), *(row.values() for row in rows)])
    text = "\n".join(f"Line {number} of a sample text." for number in range(40)).encode()
    page = b"<!DOCTYPE html>\n<html><head><title>Lines</title></head><body><p>%b</p></body></html>" % text
    return {
        "csv": table.getvalue().encode(),
        "gzip": gzip.compress(text, mtime=0),
        "html": page,
        "json": json.dumps(rows, indent=1).encode(),
        "png": _png(side=16),
        "tar": _tar("note.txt", text),
        "zip": _zip("note.txt", text),
    }


def _png(side: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes((x * y) % 256 for x in range(side)) for y in range(side))
    image = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + image + chunk(b"IEND", b"")


def _tar(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _zip(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
