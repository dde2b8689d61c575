"""How long a device waits for bodies: decoded in `preprocess`, or beside the batches.

    .venv/bin/python ops/bench/decode.py [--device-ms 50,100,200,400] [--fetched-ms 25,50,100] [--write]

The device is a model that sleeps for so long for a batch, and takes no CPU: see decoding_models.py. One
producer keeps four batches in flight; Redis, batcher, worker and all that decodes are on one machine. The
device waits from the end of a batch there to the beginning of the next one. Its share tells what decoding
costs, whatever the device does. Bodies are JPEGs of 1080p, or names of what `decode` fetches, which takes no
CPU either. `--write` writes DECODE.md.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from decoding_models import FETCH_S, SIDE, pixels
from grid import machine
from PIL import Image
from service_processes import start, stop

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

HERE: Final = Path(__file__).parent
BATCHES_IN_FLIGHT: Final = 4


class Workload(NamedTuple):
    """What is decoded, and the models that do it, by what the table calls them."""

    ways: Mapping[str, str]
    batch_size: int
    workers: int | None  # decode_workers; None: a core each


IMAGES_OF_1080P: Final = Workload(
    {
        "`preprocess`": "Preprocessing",
        "`decode_in` threads": "Threads",
        "`decode_in` processes": "Processes",
    },
    16,
    None,
)
FETCHED: Final = Workload(
    {"`preprocess`": "FetchingBefore", "`decode_in` threads": "FetchingBeside"}, 128, 128
)
WIDTH, HEIGHT = 1920, 1080
QUALITY: Final = 85
WARM_UP_BATCHES: Final = 6
IMAGES: Final = 8  # different ones


class Figures(NamedTuple):
    """What was measured of one way."""

    device_ms: float
    way: str
    per_s: float
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


async def busy_times(
    url: str, name: str, bodies: Sequence[bytes], in_flight: int, seconds: float
) -> list[tuple[int, int]]:
    """When the device was busy with each batch (ns), after a warm-up, in order."""
    found: set[tuple[int, int]] = set()
    async with AsyncClient(url) as client:
        await client.wait_ready(name, 120)
        until_s = float("inf")

        async def one_after_another(number: int) -> None:
            nonlocal until_s
            while time.monotonic() < until_s:
                body = bodies[number % len(bodies)]
                times = await client.infer(name, body, content_type="image/jpeg", accept="application/json")
                found.add((times[0], times[1]))
                if until_s == float("inf") and len(found) > WARM_UP_BATCHES:
                    until_s = time.monotonic() + seconds

        await asyncio.gather(*[one_after_another(n) for n in range(in_flight)])
    in_order = sorted(found)
    return in_order[WARM_UP_BATCHES : -BATCHES_IN_FLIGHT or None]


def measure(
    workload: Workload, way: str, device_ms: float, bodies: Sequence[bytes], options: argparse.Namespace
) -> Figures:
    """One way, with a stack of its own."""
    name = workload.ways[way].lower()
    model = f"{name}={HERE / 'decoding_models.py'}:{workload.ways[way]}"
    environment = {
        "BENCH_DEVICE_MS": str(device_ms),
        "BENCH_BATCH_SIZE": str(workload.batch_size),
        "BENCH_WORKERS": str(workload.workers or options.workers),
    }
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as server:
        services = [
            start(server.url, log, "carpool_batcher"),
            start(server.url, log, "carpool_worker", model, **environment),
        ]
        try:
            in_flight = BATCHES_IN_FLIGHT * workload.batch_size
            busy = asyncio.run(busy_times(server.url, name, bodies, in_flight, options.seconds))
        finally:
            stop(services)
    span_ns = busy[-1][1] - busy[0][0]
    busy_ns = sum(ended_ns - began_ns for began_ns, ended_ns in busy)
    per_s = len(busy) * workload.batch_size / span_ns * 1e9
    return Figures(device_ms, way, per_s, 1 - busy_ns / span_ns)


def table(workload: Workload, figures: Sequence[Figures]) -> str:
    """A row for each time on the device, and of each way how long that waits."""
    ways = list(workload.ways)
    lines = [
        "| a batch on the device | " + " | ".join(f"{way}: waits, requests/s" for way in ways) + " |",
        "|---|" + "---:|" * len(ways),
    ]
    for device_ms in dict.fromkeys(one.device_ms for one in figures):
        cells = [
            f"{one.waits:.0%}, {one.per_s:.0f}"
            for way in ways
            for one in figures
            if (one.device_ms, one.way) == (device_ms, way)
        ]
        lines.append(f"| {device_ms:g} ms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(
    images: Sequence[Figures], fetched: Sequence[Figures], each_ms: float, size_bytes: int, load: str
) -> str:
    """DECODE.md."""
    described = " ".join(machine.sentences(machine.describe(Path(sys.executable))))
    size = IMAGES_OF_1080P.batch_size
    return f"""# How long a device waits for decoded bodies

Written by `.venv/bin/python ops/bench/decode.py --write`. The device sleeps for a batch, and takes no CPU; it
waits from the end of a batch to the beginning of the next one. {BATCHES_IN_FLIGHT} batches are in flight.
{described}
Load average before: {load}.

## Images

JPEGs of {WIDTH} x {HEIGHT}, about {size_bytes // 1024} KiB,
made {SIDE} x {SIDE} x 3 by Pillow, which took
at least {each_ms:.1f} ms; in batches of {size}.

{table(IMAGES_OF_1080P, images)}

With `preprocess` the device waits while one core decodes a batch. Beside the batches, it waits only for what
all cores together do not decode in the time of a batch, and Redis, batcher, worker and producer need some of
that. So the number of cores says from which time on the device is always busy.

## As with a core for each decoder

`decode` waits for {FETCH_S * 1e3:g} ms for each body and takes no CPU, as if it fetched it from an object
store; batches of {FETCHED.batch_size}, and as many `decode_workers`.

{table(FETCHED, fetched)}
"""


def main() -> None:
    """Measure all, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device-ms", default="50,100,200,400", help="how long a batch of images takes")
    parser.add_argument("--fetched-ms", default="25,50,100", help="how long a batch of what is fetched takes")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each way is measured")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="decode_workers for images")
    parser.add_argument("--write", action="store_true", help="write DECODE.md")
    options = parser.parse_args()
    images = [image(number) for number in range(IMAGES)]
    each_ms = decode_ms(images)
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{each_ms:.1f} ms to decode an image; load average {load}", file=sys.stderr)
    found: dict[str, list[Figures]] = {"images": [], "fetched": []}
    for name, workload, device_ms, bodies in (
        ("fetched", FETCHED, options.fetched_ms, [b"name"]),
        ("images", IMAGES_OF_1080P, options.device_ms, images),
    ):
        for one_ms in map(float, filter(None, device_ms.split(","))):
            for way in workload.ways:
                found[name].append(measure(workload, way, one_ms, bodies, options))
                print(found[name][-1], file=sys.stderr, flush=True)
        print(table(workload, found[name]))
    if options.write:
        size_bytes = sum(map(len, images)) // len(images)
        text = document(found["images"], found["fetched"], each_ms, size_bytes, load)
        (HERE / "DECODE.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
