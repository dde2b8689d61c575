"""Pictures of the operators' page for docs/console.md, taken from a real browser: `make pictures`.

cd tests && ../.venv/bin/python -m support.pictures      # writes docs/pictures

What they show is made up, and the same each time: there is no batcher and no worker, and a thread writes the
reports and details that these would publish.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from PIL import Image

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.wire.detail import (
    BatchDetail,
    ErrorDetail,
    LaneDetail,
    LearnedPoint,
    ModelDetail,
    PriorityDetail,
    TenantDetail,
)
from carpool.wire.report import BatcherReport, Gauges
from support.browser import Visitor, chromium
from support.console import printed_password
from support.stack import Stack

FOLDER: Final = Path(__file__).parents[2] / "docs/pictures"
SECONDS: Final = 40  # of history that curves show
WIDTH_PX: Final = 1180
HEIGHTS_PX: Final = {"models": 470, "model": 1330, "dead_letters": 390}
COLOURS: Final = 48  # of a picture: text and a few lines have no more
FOR_LONG_MS: Final = 10_000_000_000_000
LEARNED: Final = ((1, 4200, 5100), (16, 9800, 13_000), (64, 31_000, 39_000))  # size, and two times in µs
RATES: Final = {"resize": 400, "embed": 1250, "translate": 60}  # requests a second


def _report(model: str, second: int, began_us: int) -> str:
    """What a batcher reports in this second. Counters grow evenly."""
    at_us = began_us + second * 1_000_000
    rate = RATES[model]
    hurts = model == "resize"
    waiting = 1830 if hurts else 3
    return BatcherReport(
        batcher="batch-1-0a1b2c",
        began_us=began_us - 3_600_000_000,
        at_us=at_us,
        gauges=Gauges(waiting, waiting * 900, 8.4 if hurts else 0.01, 4, 96, 2),
        batches={"full": (3600 + second) * rate // 48, "delay": (3600 + second) * rate // 480},
        requests=(3600 + second) * rate,
        fill_percent=(3600 + second) * rate // 48 * (91 if hurts else 64),
        refused={"RESOURCE_EXHAUSTED/queue_full": second * 2} if hurts else {},
        learned=((1, 4200), (16, 9800), (64, 31_000)),
        quantiles_us=(310_000, 9_120_000) if hurts else (11_000, 24_000),
        policy="adaptive",
        missed={"dispatched_late": second * 3} if hurts else {},
        failed={"INTERNAL": second} if hurts else {},
        last_error=("OSError: image file is truncated", at_us) if hurts else None,
    ).encode()


def _detail(at_us: int) -> str:
    """What a batcher tells of the model that hurts: one lane is slow, and one tenant floods."""
    ago = [at_us - number * 420_000 for number in range(8)]
    worker = "gpu-7-4f2a11/0"
    slow, usual = ("4096px", 890_000, 16, 8_300_000), ("512px", 38_000, 64, 240_000)
    kinds = [slow, usual, usual, slow, usual, usual, slow, usual]
    batches = [
        BatchDetail(
            f"{17_000 + at}-0", "full", size, 1.0, lane, "", worker, settled - 900_000, settled, wait_us,
            61_000, execution_us, {"INTERNAL": 1} if at == 2 else {},
            "OSError: image file is truncated" if at == 2 else "",
        )
        for at, (settled, (lane, execution_us, size, wait_us)) in enumerate(zip(ago, kinds, strict=True))
    ]  # fmt: skip
    return ModelDetail(
        batcher="batch-1-0a1b2c",
        at_us=at_us,
        over_us=60_000_000,
        arrivals_over_us=60_000_000,
        arrived=24_000,
        lanes=(
            LaneDetail("4096px", "", 1640, 8.4, 66, 1056, (6_400_000, 9_120_000), (870_000, 1_020_000)),
            LaneDetail("512px", "", 190, 0.3, 352, 22_528, (290_000, 410_000), (38_000, 52_000)),
        ),
        lanes_number=2,
        tenants=(
            TenantDetail("import-job", 1702, 8.4, 20_640, 0.86),
            TenantDetail("web", 112, 0.3, 2880, 0.12),
            TenantDetail("mobile", 16, 0.2, 480, 0.02),
        ),
        tenants_number=3,
        priorities=(PriorityDetail(4, 1830, 8.4),),
        batches=tuple(batches),
        errors=(
            ErrorDetail(
                "model", "INTERNAL", "", "OSError: image file is truncated (# bytes not processed)", 37,
                "OSError: image file is truncated (12 bytes not processed)", at_us - 1_300_000, "img-20931",
            ),
            ErrorDetail(
                "batcher", "RESOURCE_EXHAUSTED", "queue_full", "the queue is full", 74, "the queue is full",
                at_us - 400_000, "img-20977",
            ),
        ),
        learned=tuple(LearnedPoint(*point) for point in LEARNED),
    ).encode()  # fmt: skip


def _write_models(redis: Any) -> None:
    """Registrations, processes and queues; one model has no worker, and one is paused."""
    for model in (*RATES, "classify"):
        keys = Keys(model)
        redis.sadd("carpool:models", model)
        redis.hset(keys.registration, mapping={**ModelSettings().as_text(), "max_batch_size": 64})
        if model != "classify":
            redis.zadd(keys.workers, {f"gpu-7-4f2a11/{at}": FOR_LONG_MS for at in range(2)})
            redis.set(keys.batcher, "batch-1-0a1b2c")
    for _ in range(12):
        redis.xadd(Keys("classify").requests, {"body": "1"})
    paused = {
        "mode": "wait",
        "reason": "new weights are checked",
        "who": "ann",
        "since": _now_ms(redis) - 240_000,
    }
    redis.hset(Keys("translate").paused, mapping=paused)


def _write_letters(redis: Any) -> None:
    """Dead letters of three kinds, whose ages are the same each time."""
    reasons = (
        ("its model process died 2 times: killed by the kernel, no memory at {} MB", 97, 1_200_000),
        ("its model process died 2 times: SIGSEGV in libjpeg, frame {}", 12, 5_400_000),
        ("its worker died 2 times while it was executed alone", 3, 82_000_000),
    )
    now_ms = _now_ms(redis)
    letters = [
        (now_ms - age_ms - at * 1000, reason.format(4096 + at), f"img-{age_ms // 1000 + at}")
        for reason, number, age_ms in reasons
        for at in range(number)
    ]
    for number, (at_ms, reason, name) in enumerate(sorted(letters)):
        fields = {"correlation_id": name, "content_type": "image/jpeg", "body": "x" * 2048}
        redis.xadd(
            Keys("resize").dead,
            {**fields, "reason": reason, "attempts": 2, "entry_id": "1-1"},
            id=f"{at_ms}-{number}",
        )


def _now_ms(redis: Any) -> int:
    seconds, micros = redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _keep_publishing(redis: Any, ends: threading.Event) -> None:
    """What batchers write in each second."""
    began_s, began_us = time.monotonic(), _now_ms(redis) * 1000
    second = 0
    while not ends.wait(max(0.0, began_s + second - time.monotonic())):
        for model in RATES:
            redis.set(Keys(model).report, _report(model, second, began_us))
        redis.set(Keys("resize").detail, _detail(began_us + second * 1_000_000))
        second += 1


def _save(page: Any, name: str) -> None:
    """A part of the page as a PNG with few colours."""
    shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH_PX, "height": HEIGHTS_PX[name]})
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    FOLDER.mkdir(exist_ok=True)
    picture.save(FOLDER / f"{name}.png", optimize=True)


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        _write_models(stack.redis)
        _write_letters(stack.redis)
        ends = threading.Event()
        threading.Thread(target=_keep_publishing, args=(stack.redis, ends), daemon=True).start()
        console = stack.console()
        name, password = printed_password(console)
        with (
            chromium() as browser,
            Visitor(browser, console.url, width=WIDTH_PX, color_scheme="light") as visitor,
        ):
            page = visitor.page
            page.goto("/")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Sign in").click()
            for _ in range(SECONDS // 2):  # each is an update
                with page.expect_response(lambda answer: "x-carpool-live" in answer.request.headers):
                    pass
            _save(page, "models")
            page.goto("/models/resize")
            page.set_viewport_size({"width": WIDTH_PX, "height": max(HEIGHTS_PX.values())})
            page.get_by_role("heading", name="Recent batches").wait_for()
            _save(page, "model")
            page.goto("/models/resize/dead/errors")
            _save(page, "dead_letters")
        ends.set()


if __name__ == "__main__":
    main()
