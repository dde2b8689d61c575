"""Latent semantic indexing with numpy alone: terms and passages as vectors of one space.

Words that keep the same company get near to each other in it, so a passage can be found by words it lacks.
The method is Deerwester et al., "Indexing by latent semantic analysis" (1990); its subspace is found by the
randomised range finder with one subspace iteration of Halko, Martinsson and Tropp, "Finding structure with
randomness" (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.intp]

K1: Final = 1.2
"""How soon a term's repetition in one text stops counting: BM25's k1, at its customary value."""
TIE: Final = 1e-4
"""Scores are told apart to this much: float32 sums differ by less, however BLAS orders them."""

_GROUPS: Final = 256
_CHUNK: Final = 2048


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
        """The product with a dense matrix; in chunks, for what is gathered to stay in the cache."""
        product = np.zeros((self.rows, dense.shape[1]), np.float32)
        for start in range(0, len(self.row), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            row = self.row[chunk]
            first = np.flatnonzero(np.diff(row, prepend=-1))
            gathered = dense[self.column[chunk]] * self.value[chunk, None]
            product[row[first]] += np.add.reduceat(gathered, first, axis=0)
        return product


class LatentIndex:
    """An index of texts given as lists of terms, searched many queries at a time.

    `vectors` has a row of length 1 for each text, of zeros if it has no term: float32, texts x dims. `dims`
    has to be well below the number of texts and that of terms, for there is no more to be told apart.
    """

    def __init__(self, texts: Sequence[Sequence[str]], dims: int, seed: int = 0) -> None:
        self._column = {term: column for column, term in enumerate(sorted(set(chain.from_iterable(texts))))}
        counts = self._count(texts)
        self._weight = np.log((1 + len(texts)) / np.bincount(counts.column)).astype(np.float32)
        weighted = self._weigh(counts)
        self._basis = _principal_subspace(weighted, len(self._column), dims, seed)
        # In columns, because the products read it transposed: a run of memory for each dimension.
        self.vectors = np.asfortranarray(_normalised(weighted @ self._basis))

    def search(self, queries: Sequence[Sequence[str]], limit: int) -> list[list[tuple[int, float]]]:
        """For each query, rows and cosines (to four decimals) of the `limit` nearest texts, best first.

        Texts of equal score come in their order in the index; a query of no known term finds none.
        """
        vectors = self._embed(queries)
        known = np.flatnonzero(vectors.any(axis=1))
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        for query, hits in zip(known.tolist(), nearest(self._cosines(vectors[known]), limit), strict=True):
            found[query] = hits
        return found

    def _cosines(self, queries: Floats) -> Floats:
        """Queries x texts: one product for all of them, so that the matrix is read once."""
        if len(queries) < 4:
            # BLAS repacks the whole matrix to multiply it by a matrix; four rows and more are worth that.
            rows = [query @ self.vectors.T for query in queries]
            return np.array(rows, np.float32).reshape(-1, len(self.vectors))
        return queries @ self.vectors.T

    def _embed(self, queries: Sequence[Sequence[str]]) -> Floats:
        """One row of length 1 per query, of zeros if it has no known term."""
        weighted = self._weigh(self._count(queries))
        columns, inverse = np.unique(weighted.column, return_inverse=True)
        compact = np.zeros((len(queries), len(columns)), np.float32)
        compact[weighted.row, inverse] = weighted.value
        return _normalised(compact @ self._basis[columns])

    def _count(self, texts: Sequence[Sequence[str]]) -> _Sparse:
        """How often each text has each known term: texts x terms."""
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
    """For each row of `scores` (queries x texts), columns and scores of its `limit` highest, best first.

    Scores are rounded to four decimals; equal ones come in the order of their columns.
    """
    queries, texts = scores.shape
    floor = _lower_bounds(scores, limit) - TIE
    row, column = np.divmod(np.flatnonzero(scores >= floor[:, None]), texts)
    score = np.round(scores[row, column].astype(np.float64), 4)
    order = np.lexsort((column, -score, row))
    start = np.searchsorted(row, np.arange(queries))
    end = np.searchsorted(row, np.arange(queries), side="right")
    hits = list(zip(column[order].tolist(), score[order].tolist(), strict=True))
    return [hits[first : min(first + limit, last)] for first, last in zip(start, end, strict=True)]


def _lower_bounds(scores: Floats, limit: int) -> Floats:
    """For each row a score that at least `limit` of its columns reach.

    It is the `limit`-th highest of the highest scores of disjoint groups of columns: a tenth of the work of a
    partition of the row itself, and as good a sieve, for the best are seldom in one group.
    """
    queries, texts = scores.shape
    size = texts // _GROUPS
    if size > 1 and limit <= _GROUPS:
        scores = scores[:, : size * _GROUPS].reshape(queries, size, _GROUPS).max(axis=1)
    limit = min(limit, scores.shape[1])
    return np.partition(scores, -limit, axis=1)[:, -limit]


def _principal_subspace(matrix: _Sparse, columns: int, dims: int, seed: int) -> Floats:
    """An orthonormal basis, columns x dims, of nearly the best subspace of that size for the matrix's rows.

    No singular value decomposition need follow: cosines within a subspace are the same in any basis of it.
    """
    sketch = np.random.default_rng(seed).standard_normal((columns, dims), dtype=np.float32)
    sketch = matrix.transpose(columns) @ (matrix @ sketch)
    # Cholesky QR: where Householder's spends a second, the factor of the small Gram matrix is found at once.
    gram = (sketch.T @ sketch).astype(np.float64)
    return sketch @ np.linalg.inv(np.linalg.cholesky(gram)).T.astype(np.float32)


def _normalised(rows: Floats) -> Floats:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
