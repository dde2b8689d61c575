"""The model `writer` in batches, for comparison: each is written to the end of its longest text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool_cli.demo.writer import Writer
from carpool_worker.model_process.model import RequestInfo
from carpool_worker.model_process.stepping.requests import StepRequest


class WholeTexts:
    """Bodies and texts are those of `writer`."""

    max_batch_size = Writer.max_batch_size

    def load(self, device: str) -> None:
        """Read the weights."""
        self._writer = Writer()
        self._writer.load(device)

    def validate(self, body: object) -> None:
        """As that of `writer`."""
        self._writer.validate(body)

    def predict(self, batch: Sequence[Any], requests: Sequence[RequestInfo]) -> list[str]:
        """Write all texts to their ends."""
        texts = [_Text(info, body) for info, body in zip(requests, batch, strict=True)]
        self._writer.begin(texts)
        while running := [text for text in texts if not text.has_ended]:
            self._writer.step(running)
        for text in texts:
            self._writer.end(text)
        return ["".join(text.characters) for text in texts]


class _Text(StepRequest):
    """A request of `writer`, which keeps what was emitted."""

    def __init__(self, info: RequestInfo, body: Any) -> None:
        super().__init__(info.correlation_id, info.lane, info.fields, body)
        self.characters: list[str] = []

    def emit(self, value: Any) -> None:
        """Append a character."""
        if isinstance(value, str):
            self.characters.append(value)
