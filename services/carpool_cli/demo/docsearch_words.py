"""From text to index terms: identifiers taken apart, stop words dropped, endings and compounds resolved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_VOWEL: Final = re.compile("[aeiouy]")


def words(text: str) -> list[str]:
    """Lower-case words and numbers; `readZipFile`, `read_zip_file` and `read.zip.file` all give three."""
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
    """`word` without the endings of plural, participle and gerund, and without a final e.

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
    """Turns text into terms; which words are compounds it learns from the texts it is made with.

    A compound counts as itself and as its two parts, so that `copytree` is found by "tree". Of all splits the
    one with the highest geometric mean of the parts' frequencies is taken, as in Koehn and Knight, "Empirical
    methods for compound splitting" (2003).
    """

    MIN_PART: Final = 3
    """Letters of a compound's part, at the least."""
    MIN_COUNT: Final = 20
    """Occurrences of a word that may be a compound's part, at the least."""
    MAX_COMPOUND: Final = 30
    """Letters of a compound, at the most."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in words(text))
        self._parts = {
            word: count
            for word, count in counts.items()
            if count >= self.MIN_COUNT and len(word) >= self.MIN_PART and word not in _STOP_WORDS
        }
        self._terms = {word: self._analyze(word) for word in counts}

    def terms(self, text: str) -> list[str]:
        """The terms of a text in order, repeated as they repeat in it."""
        known = self._terms
        return [
            term for word in words(text) for term in (known[word] if word in known else self._analyze(word))
        ]

    def _analyze(self, word: str) -> tuple[str, ...]:
        if len(word) < 2 or word in _STOP_WORDS:
            return ()
        return (stem(word), *map(stem, self._split(word)))

    def _split(self, word: str) -> tuple[str, ...]:
        if len(word) > self.MAX_COMPOUND:
            return ()
        cuts = range(self.MIN_PART, len(word) - self.MIN_PART + 1)
        splits = [(word[:cut], word[cut:]) for cut in cuts]
        known = [(head, tail) for head, tail in splits if head in self._parts and tail in self._parts]
        return max(known, key=lambda pair: self._parts[pair[0]] * self._parts[pair[1]], default=())
