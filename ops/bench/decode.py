"""How long a device waits for images of 1080p: decoded in `preprocess`, or beside the batches.

    .venv/bin/python ops/bench/decode.py [--device-ms 50,100,200,400] [--seconds 15] [--workers N] [--write]

The device is a model that sleeps for so long for a batch, and takes no CPU: see decoding_models.py. One
producer keeps four batches in flight; Redis, batcher, worker and all that decodes are on one machine. The
device waits from the end of a batch there to the beginning of the next one. Its share tells what decoding
costs, whatever the device does. `--write` writes DECODE.md.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from decoding_models import SIDE, pixels
from grid import machine
from PIL import Image
from service_processes import start, stop

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

HERE: Final = Path(__file__).parent
WAYS: Final = {
    "`preprocess`": "Preprocessing",
    "`decode_in` threads": "Threads",
    "`decode_in` processes": "Processes",
}
BATCH_SIZE: Final = 16
BATCHES_IN_FLIGHT: Final = 4
WIDTH, HEIGHT = 1920, 1080
QUALITY: Final = 85
WARM_UP_BATCHES: Final = 6
IMAGES: Final = 8  # different ones


class Figures(NamedTuple):
    """What was measured of one way."""

    device_ms: float
    way: str
    images_per_s: float
    waits: float  # share of the time


def image(number: int) -> bytes:
    """A JPEG of 1080p as of a photograph: smooth areas, edges and some noise."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [np.sin(x / random.uniform(20, 400) + y / random.uniform(20, 400)) for _ in range(3)]
    noise = random.normal(0, 8, (HEIGHT, WIDTH, 3))
    values = np.stack(waves, axis=2) * 80 + 128 + noise
    values[300:700, 500:1400] *= 0.5
    file = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def decode_ms(images: Sequence[bytes]) -> float:
    """How long one of them takes to decode here, the least of several times."""
    times_s = []
    for body in [*images, *images]:
        started_s = time.perf_counter()
        pixels(body)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s) * 1e3


async def busy_times(url: str, name: str, images: Sequence[bytes], seconds: float) -> list[tuple[int, int]]:
    """When the device was busy with each batch (ns), after a warm-up, in order."""
    found: set[tuple[int, int]] = set()
    async with AsyncClient(url) as client:
        await client.wait_ready(name, 120)
        until_s = float("inf")

        async def one_after_another(number: int) -> None:
            nonlocal until_s
            while time.monotonic() < until_s:
                body = images[number % len(images)]
                times = await client.infer(name, body, content_type="image/jpeg", accept="application/json")
                found.add((times[0], times[1]))
                if until_s == float("inf") and len(found) > WARM_UP_BATCHES:
                    until_s = time.monotonic() + seconds

        await asyncio.gather(*[one_after_another(n) for n in range(BATCHES_IN_FLIGHT * BATCH_SIZE)])
    in_order = sorted(found)
    return in_order[WARM_UP_BATCHES : -BATCHES_IN_FLIGHT or None]


def measure(way: str, device_ms: float, images: Sequence[bytes], options: argparse.Namespace) -> Figures:
    """One way, with a stack of its own."""
    name = WAYS[way].lower()
    model = f"{name}={HERE / 'decoding_models.py'}:{WAYS[way]}"
    environment = {
        "BENCH_DEVICE_MS": str(device_ms),
        "BENCH_BATCH_SIZE": str(BATCH_SIZE),
        "BENCH_WORKERS": str(options.workers),
    }
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as server:
        services = [
            start(server.url, log, "carpool_batcher"),
            start(server.url, log, "carpool_worker", model, **environment),
        ]
        try:
            busy = asyncio.run(busy_times(server.url, name, images, options.seconds))
        finally:
            stop(services)
    span_ns = busy[-1][1] - busy[0][0]
    busy_ns = sum(ended_ns - began_ns for began_ns, ended_ns in busy)
    return Figures(device_ms, way, len(busy) * BATCH_SIZE / span_ns * 1e9, 1 - busy_ns / span_ns)


def table(figures: Sequence[Figures]) -> str:
    """A row for each time on the device, and of each way how long that waits."""
    ways = list(WAYS)
    lines = [
        "| a batch on the device | " + " | ".join(f"{way}: waits, images/s" for way in ways) + " |",
        "|---|" + "---:|" * len(ways),
    ]
    for device_ms in dict.fromkeys(one.device_ms for one in figures):
        cells = [
            f"{one.waits:.0%}, {one.images_per_s:.0f}"
            for way in ways
            for one in figures
            if (one.device_ms, one.way) == (device_ms, way)
        ]
        lines.append(f"| {device_ms:g} ms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(figures: Sequence[Figures], each_ms: float, size_bytes: int, load: str) -> str:
    """DECODE.md."""
    described = " ".join(machine.sentences(machine.describe(Path(sys.executable))))
    per_batch_ms = BATCH_SIZE * each_ms
    return f"""# How long a device waits for decoded images

Written by `.venv/bin/python ops/bench/decode.py --write`. JPEGs of {WIDTH} x {HEIGHT}, about
{size_bytes // 1024} KiB each, made {SIDE} x {SIDE} x 3 by Pillow, which takes {each_ms:.1f} ms of one
core; in batches of {BATCH_SIZE}. The device sleeps for a batch, and takes no CPU. {BATCHES_IN_FLIGHT} batches
are in flight. {described}
Load average before: {load}.

{table(figures)}

With `preprocess` the device waits while one core decodes a batch, {per_batch_ms:.0f} ms. Beside the batches,
it waits only for what all cores together do not decode in the time of a batch, and Redis, batcher, worker and
producer need some of that. So the number of cores says from which time on the device is always busy.
"""


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device-ms", default="50,100,200,400", help="how long a batch takes on the device")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each way is measured")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="decode_workers")
    parser.add_argument("--write", action="store_true", help="write DECODE.md")
    options = parser.parse_args()
    images = [image(number) for number in range(IMAGES)]
    each_ms = decode_ms(images)
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{each_ms:.1f} ms to decode an image; load average {load}", file=sys.stderr)
    figures: list[Figures] = []
    for device_ms in map(float, options.device_ms.split(",")):
        for way in WAYS:
            figures.append(measure(way, device_ms, images, options))
            print(figures[-1], file=sys.stderr, flush=True)
    print(table(figures))
    if options.write:
        size_bytes = sum(map(len, images)) // len(images)
        (HERE / "DECODE.md").write_text(document(figures, each_ms, size_bytes, load), encoding="utf-8")


if __name__ == "__main__":
    main()
