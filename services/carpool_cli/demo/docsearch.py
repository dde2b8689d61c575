"""A ready-made model: search by meaning in the documentation of Python that is on this machine.

It is what batching is for. One query reads the whole matrix of passages from memory to use each number once;
sixty-four read it once between them, in one matrix product.
"""

from __future__ import annotations

from typing import Any, Final

from carpool.errors import InvalidArgumentError
from carpool_cli.demo.docsearch_corpus import Passage, passages
from carpool_cli.demo.docsearch_index import LatentIndex
from carpool_cli.demo.docsearch_words import Analyzer

DIMS: Final = 768
ANSWERS: Final = 5
MAX_QUERY_CHARS: Final = 1000
NAME_WEIGHT: Final = 2
"""How many times over the words of a passage's name count."""


class DocSearch:
    """Answers a query with the five passages nearest to it, by the cosine of their vectors.

    The passages are the docstrings of the standard library's public names and the language reference that
    `help` shows, a paragraph or so each; the space is that of latent semantic indexing (`docsearch_index`).
    """

    name = "docsearch"
    max_batch_size = 64

    _passages: tuple[Passage, ...]
    _analyzer: Analyzer
    _index: LatentIndex

    def load(self, device: str) -> None:
        """Read the documentation and index it, a few seconds; it stays on the CPU whatever `device` is.

        Raises RuntimeError if this Python has come without its source.
        """
        self._passages = passages()
        if not self._passages:
            raise RuntimeError("no source of the standard library was found, so there is nothing to search")
        self._analyzer = Analyzer(f"{passage.name} {passage.text}" for passage in self._passages)
        texts = [self._passage_terms(passage) for passage in self._passages]
        self._index = LatentIndex(texts, DIMS)

    def validate(self, body: object) -> None:
        """Raises InvalidArgumentError unless `body` is text of 1 to 1,000 characters."""
        if not isinstance(body, str):
            raise InvalidArgumentError(f"body: must be a string, not {type(body).__name__}")
        if not 1 <= len(body) <= MAX_QUERY_CHARS:
            raise InvalidArgumentError(
                f"body: must be of 1 to {MAX_QUERY_CHARS:,} characters, not {len(body):,}"
            )

    def predict(self, batch: list[str]) -> list[list[dict[str, Any]]]:
        """For each query its five nearest passages, best first: `{"score": 0.61, "name": ..., "text": ...}`.

        The score is a cosine, 1 at the most, to four decimals. A query of which no word is known gets none.
        """
        found = self._index.search([self._analyzer.terms(query) for query in batch], ANSWERS)
        return [[self._answer(row, score) for row, score in hits] for hits in found]

    def _passage_terms(self, passage: Passage) -> list[str]:
        return self._analyzer.terms(passage.name) * NAME_WEIGHT + self._analyzer.terms(passage.text)

    def _answer(self, row: int, score: float) -> dict[str, Any]:
        passage = self._passages[row]
        return {"score": score, "name": passage.name, "text": passage.text}
