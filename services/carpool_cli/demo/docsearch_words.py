"""Index terms of a text: identifiers split into words, no stop words, stemmed; compounds and their parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_VOWEL: Final = re.compile("[aeiouy]")


def words(text: str) -> list[str]:
    """Words in lower case, and numbers. `readZipFile`, `read_zip_file`, `read.zip.file` are three words."""
    return [word.lower() for word in _WORD.findall(text)]


_STOP_WORDS: Final = frozenset(
    words(
        """
        about all also am an and any are as at be because been being both but by can could did do does doing
        done each eg either else etc few for from further given had has have having he her here hers him his
        how ie if in into is it its itself just may me might more most must my need no nor not of off on
        once only onto or other our ours out over own per please same shall she should so some such than
        that the their theirs them then there these they this those through to too under until up upon us
        use used uses using very via want was way we were what when where whether which while who whom whose
        why will with within without would you your yours
        """
    )
)


def stem(word: str) -> str:
    """`word` without a plural, participle or gerund ending, and without a final e.

    The plurals are those of Harman's S stemmer ("How effective is suffixing?", 1991), -ed and -ing follow
    step 1b of Porter's ("An algorithm for suffix stripping", 1980).
    """
    if len(word) <= 3:
        return word
    return _without_participle(_without_plural(word)).removesuffix("e")


def _without_plural(word: str) -> str:
    if word.endswith(("ies", "ied")):
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "zes", "ches", "shes")):
        return word[:-2]
    return word if word.endswith(("ss", "us", "is")) else word.removesuffix("s")


def _without_participle(word: str) -> str:
    if word.endswith("eed"):
        return word
    for ending in ("ing", "ed"):
        base = word.removesuffix(ending)
        if base != word and len(base) >= 2 and _VOWEL.search(base):
            doubled = len(base) > 3 and base[-1] == base[-2] and base[-1] not in "lsz"
            return base[:-1] if doubled else base
    return word


class Analyzer:
    """Turns text into terms. It learns from the texts of the constructor which words are compounds.

    A compound gives itself and its two parts as terms, so that "tree" finds `copytree`. It is split where the
    geometric mean of the frequencies of the parts is highest, as in Koehn and Knight, "Empirical methods for
    compound splitting" (2003).
    """

    PART_LETTERS_MIN: Final = 3
    PART_OCCURRENCES_MIN: Final = 20
    COMPOUND_LETTERS_MAX: Final = 30

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in words(text))
        self._parts = {
            word: count
            for word, count in counts.items()
            if count >= self.PART_OCCURRENCES_MIN
            and len(word) >= self.PART_LETTERS_MIN
            and word not in _STOP_WORDS
        }
        self._terms = {word: self._analyze(word) for word in counts}

    def terms(self, text: str) -> list[str]:
        """The terms of a text in order, with repetitions."""
        known = self._terms
        return [
            term for word in words(text) for term in (known[word] if word in known else self._analyze(word))
        ]

    def _analyze(self, word: str) -> tuple[str, ...]:
        if len(word) < 2 or word in _STOP_WORDS:
            return ()
        return (stem(word), *map(stem, self._split(word)))

    def _split(self, word: str) -> tuple[str, ...]:
        if len(word) > self.COMPOUND_LETTERS_MAX:
            return ()
        cuts = range(self.PART_LETTERS_MIN, len(word) - self.PART_LETTERS_MIN + 1)
        splits = [(word[:cut], word[cut:]) for cut in cuts]
        known = [(head, tail) for head, tail in splits if head in self._parts and tail in self._parts]
        return max(known, key=lambda pair: self._parts[pair[0]] * self._parts[pair[1]], default=())
