"""Latent semantic indexing with numpy alone: terms and passages as vectors of one space.

Words that occur together have similar vectors, so a query can find a passage that has none of its words.
The method is Deerwester et al., "Indexing by latent semantic analysis" (1990); its subspace is found by the
randomised range finder with one subspace iteration of Halko, Martinsson and Tropp, "Finding structure with
randomness" (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.intp]

K1: Final = 1.2
"""BM25's k1 at its usual value: how fast repetitions of a term in one text stop adding to its weight."""
SCORE_RESOLUTION: Final = 1e-4
"""Smaller differences of scores are ignored: float32 sums differ with the order in which BLAS adds."""

_GROUPS: Final = 256


@dataclass(frozen=True)
class _Sparse:
    """A sparse matrix as triplets sorted by row: `value[i]` is in `row[i]`, `column[i]`; `rows` in all."""

    rows: int
    row: Integers
    column: Integers
    value: Floats

    def transpose(self, columns: int) -> _Sparse:
        order = np.argsort(self.column, kind="stable")
        return _Sparse(columns, self.column[order], self.row[order], self.value[order])

    def __matmul__(self, dense: Floats) -> Floats:
        """The product with a dense matrix, row by row: what a row needs fits into the cache, and its sums are
        one call of BLAS. In chunks of many rows it takes twice as long."""
        product = np.zeros((self.rows, dense.shape[1]), np.float32)
        ends = np.searchsorted(self.row, np.arange(self.rows), side="right").tolist()
        for row, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                np.dot(self.value[start:end], dense[self.column[start:end]], out=product[row])
        return product


class LatentIndex:
    """An index of texts, which are lists of terms. It searches for many queries at a time.

    `vectors` has a row of length 1 for each text, or of zeros for a text without terms: float32, texts x
    dims.
    `dims` must be well below the number of texts and the number of terms, which limit the rank of the matrix.
    """

    def __init__(self, texts: Sequence[Sequence[str]], dims: int, seed: int = 0) -> None:
        self._column = {term: column for column, term in enumerate(sorted(set(chain.from_iterable(texts))))}
        counts = self._count(texts)
        self._weight = np.log((1 + len(texts)) / np.bincount(counts.column)).astype(np.float32)
        weighted = self._weigh(counts)
        self._basis = _principal_subspace(weighted, len(self._column), dims, seed)
        # In column order, because the products read it transposed: each dimension is contiguous in memory.
        self.vectors = np.asfortranarray(_normalised(weighted @ self._basis))

    def search(self, queries: Sequence[Sequence[str]], limit: int) -> list[list[tuple[int, float]]]:
        """For each query, the rows and cosines (to four decimals) of the `limit` nearest texts, best first.

        Texts of equal score are in the order of the index. A query without a known term finds nothing.
        """
        vectors = self._embed(queries)
        known = np.flatnonzero(vectors.any(axis=1))
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        for query, hits in zip(known.tolist(), nearest(self._cosines(vectors[known]), limit), strict=True):
            found[query] = hits
        return found

    def _cosines(self, queries: Floats) -> Floats:
        """Queries x texts, as one product, so that the matrix is read from memory once."""
        if len(queries) < 4:
            # For a matrix product BLAS repacks the whole matrix, which pays only from four rows on.
            rows = [query @ self.vectors.T for query in queries]
            return np.array(rows, np.float32).reshape(-1, len(self.vectors))
        return queries @ self.vectors.T

    def _embed(self, queries: Sequence[Sequence[str]]) -> Floats:
        """A row of length 1 for each query, or of zeros for a query without a known term."""
        weighted = self._weigh(self._count(queries))
        columns, inverse = np.unique(weighted.column, return_inverse=True)
        compact = np.zeros((len(queries), len(columns)), np.float32)
        compact[weighted.row, inverse] = weighted.value
        return _normalised(compact @ self._basis[columns])

    def _count(self, texts: Sequence[Sequence[str]]) -> _Sparse:
        """The number of times each text has each known term: texts x terms."""
        column = self._column
        found = [[column[term] for term in text if term in column] for text in texts]
        row = np.repeat(np.arange(len(texts)), np.fromiter(map(len, found), np.intp))
        flat = np.fromiter(chain.from_iterable(found), np.intp, count=len(row))
        cell, count = np.unique(row * len(column) + flat, return_counts=True)
        return _Sparse(len(texts), cell // len(column), cell % len(column), count.astype(np.float32))

    def _weigh(self, counts: _Sparse) -> _Sparse:
        """Counts as BM25's saturated frequency x inverse document frequency, rows scaled to length 1."""
        value = counts.value * (K1 + 1) / (counts.value + K1) * self._weight[counts.column]
        length = np.sqrt(np.bincount(counts.row, value * value, minlength=counts.rows))
        scaled = (value / length[counts.row]).astype(np.float32)
        return _Sparse(counts.rows, counts.row, counts.column, scaled)


def nearest(scores: Floats, limit: int) -> list[list[tuple[int, float]]]:
    """For each row of `scores` (queries x texts), the columns and scores of the `limit` highest, best first.

    Scores are rounded to four decimals. Equal scores are in the order of their columns.
    """
    queries, texts = scores.shape
    floor = _lower_bounds(scores, limit) - SCORE_RESOLUTION
    row, column = np.divmod(np.flatnonzero(scores >= floor[:, None]), texts)
    score = np.round(scores[row, column].astype(np.float64), 4)
    order = np.lexsort((column, -score, row))
    start = np.searchsorted(row, np.arange(queries))
    end = np.searchsorted(row, np.arange(queries), side="right")
    hits = list(zip(column[order].tolist(), score[order].tolist(), strict=True))
    return [hits[first : min(first + limit, last)] for first, last in zip(start, end, strict=True)]


def _lower_bounds(scores: Floats, limit: int) -> Floats:
    """For each row, a score that at least `limit` of its columns reach.

    It is the `limit`-th highest of the maxima of disjoint groups of columns. That takes a tenth of the time
    of partitioning the row itself, and rejects almost as many columns, because the best are seldom in one
    group.
    """
    queries, texts = scores.shape
    size = texts // _GROUPS
    if size > 1 and limit <= _GROUPS:
        scores = scores[:, : size * _GROUPS].reshape(queries, size, _GROUPS).max(axis=1)
    limit = min(limit, scores.shape[1])
    return np.partition(scores, -limit, axis=1)[:, -limit]


def _principal_subspace(matrix: _Sparse, columns: int, dims: int, seed: int) -> Floats:
    """An orthonormal basis, columns x dims, of nearly the best subspace of that size for the matrix's rows.

    A singular value decomposition is not needed: cosines within a subspace are the same in each of its bases.
    """
    sketch = np.random.default_rng(seed).standard_normal((columns, dims), dtype=np.float32)
    sketch = matrix.transpose(columns) @ (matrix @ sketch)
    # QR by Cholesky, from the small Gram matrix: QR by Householder reflections would take a second.
    gram = (sketch.T @ sketch).astype(np.float64)
    return sketch @ np.linalg.inv(np.linalg.cholesky(gram)).T.astype(np.float32)


def _normalised(rows: Floats) -> Floats:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
