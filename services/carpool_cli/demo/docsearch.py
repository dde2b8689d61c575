"""A ready-made model: semantic search in the Python documentation of this machine.

It benefits from batching: one query reads the whole matrix of passages from memory and uses each number once;
a batch of 64 queries reads it once for all of them, in one matrix product.
"""

from __future__ import annotations

from typing import Any, Final

from carpool.errors import InvalidArgumentError
from carpool_cli.demo.docsearch_corpus import Passage, passages
from carpool_cli.demo.docsearch_index import LatentIndex
from carpool_cli.demo.docsearch_words import Analyzer

DIMS: Final = 768
ANSWERS: Final = 5
QUERY_CHARS_MAX: Final = 1000
NAME_WEIGHT: Final = 2
"""How many times the words of a passage's name count."""


class DocSearch:
    """Answers a query with the five passages nearest to it, by the cosine of their vectors.

    The passages are paragraphs of the docstrings of the standard library's public names, and of the language
    reference that `help` shows. The vectors are those of latent semantic indexing (`docsearch_index`).
    """

    name = "docsearch"
    max_batch_size = 64

    _passages: tuple[Passage, ...]
    _analyzer: Analyzer
    _index: LatentIndex

    def load(self, device: str) -> None:
        """Read and index the documentation, in a few seconds. The model uses the CPU whatever `device` is.

        Raises RuntimeError if the source of the standard library is not installed.
        """
        self._passages = passages()
        if not self._passages:
            raise RuntimeError(
                "the source of the standard library was not found, so there is nothing to search"
            )
        self._analyzer = Analyzer(f"{passage.name} {passage.text}" for passage in self._passages)
        texts = [self._passage_terms(passage) for passage in self._passages]
        self._index = LatentIndex(texts, DIMS)

    def validate(self, body: object) -> None:
        """Raise InvalidArgumentError unless `body` is a string of 1 to 1,000 characters."""
        if not isinstance(body, str):
            raise InvalidArgumentError(f"body: must be a string, not {type(body).__name__}")
        if not 1 <= len(body) <= QUERY_CHARS_MAX:
            raise InvalidArgumentError(
                f"body: must have 1 to {QUERY_CHARS_MAX:,} characters, not {len(body):,}"
            )

    def predict(self, batch: list[str]) -> list[list[dict[str, Any]]]:
        """The five nearest passages of each query, best first: `{"score": 0.61, "name": ..., "text": ...}`.

        The score is a cosine, at most 1, to four decimals. A query without any known word gets an empty list.
        """
        found = self._index.search([self._analyzer.terms(query) for query in batch], ANSWERS)
        return [[self._answer(row, score) for row, score in hits] for hits in found]

    def _passage_terms(self, passage: Passage) -> list[str]:
        return self._analyzer.terms(passage.name) * NAME_WEIGHT + self._analyzer.terms(passage.text)

    def _answer(self, row: int, score: float) -> dict[str, Any]:
        passage = self._passages[row]
        return {"score": score, "name": passage.name, "text": passage.text}
