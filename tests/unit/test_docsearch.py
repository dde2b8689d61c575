"""The documentation search, on the documentation of the Python that runs the tests."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from carpool.errors import InvalidArgumentError
from carpool_cli.demo import docsearch
from carpool_cli.demo.docsearch import ANSWERS, DIMS, DocSearch
from carpool_cli.demo.docsearch_corpus import (
    PASSAGE_CHARS_MAX,
    PASSAGE_CHARS_MIN,
    SHOWN_QUERIES,
    first_sentence,
    passages,
    queries,
    split,
)
from carpool_cli.demo.docsearch_index import LatentIndex, nearest
from carpool_cli.demo.docsearch_words import Analyzer, stem, words


@pytest.fixture(scope="module")
def model() -> DocSearch:
    loaded = DocSearch()
    loaded.load("cpu")
    return loaded


@pytest.fixture(scope="module")
def drawn() -> list[str]:
    """Queries from the installed packages. To draw them parses some of these packages."""
    return queries(64)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("how do I read a zip file", "zipfile.ZipFile.read"),
        ("copy a directory tree", "shutil.copytree"),
        ("parse command line arguments", "argparse.ArgumentParser"),
        ("run a subprocess with a timeout", "subprocess.run"),
        ("compare two sequences and show the differences", "difflib.Differ.compare"),
        ("convert a datetime to a string", "datetime.datetime.__str__"),
        ("find the shortest path of a temporary directory", "tempfile.TemporaryDirectory"),
        ("wait for a coroutine with a timeout", "asyncio.tasks.wait_for"),
        ("split a string like a shell would", "shlex.split"),
        ("merge several sorted inputs", "heapq.merge"),
        ("measure the execution time of small code snippets", "timeit"),
    ],
)
def test_expected_passage_is_among_the_five_answers(model: DocSearch, query: str, name: str) -> None:
    [answers] = model.predict([query])
    assert name in {answer["name"] for answer in answers}


def test_each_query_gets_five_answers_best_first_as_json(model: DocSearch) -> None:
    found = model.predict(list(SHOWN_QUERIES))
    assert [len(answers) for answers in found] == [ANSWERS] * len(SHOWN_QUERIES)
    for answers in found:
        scores = [answer["score"] for answer in answers]
        assert scores == sorted(scores, reverse=True)
        assert all(0 < score <= 1 and score == round(score, 4) for score in scores)
        assert all(set(answer) == {"score", "name", "text"} for answer in answers)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("size", [2, 5, 64])
def test_batched_query_gets_the_same_answers_as_a_lone_one(
    model: DocSearch, drawn: list[str], size: int
) -> None:
    batch = drawn[:size]
    for query, answers in zip(batch, model.predict(batch), strict=True):
        [alone] = model.predict([query])
        scores = {(answer["name"], answer["text"]): answer["score"] for answer in alone}
        assert [answer["score"] for answer in answers] == pytest.approx(list(scores.values()), abs=2e-4)
        others = [answer for answer in answers if (answer["name"], answer["text"]) not in scores]
        # Rounding may exchange passages only if their scores are equal.
        assert all(answer["score"] <= alone[-1]["score"] + 2e-4 for answer in others)


def test_query_of_unknown_words_finds_nothing_and_others_are_unaffected(model: DocSearch) -> None:
    found = model.predict(["qwxzqj", "copy a directory tree", "what is the", " ", "copy a directory tree"])
    assert [len(answers) for answers in found] == [0, ANSWERS, 0, 0, ANSWERS]
    assert found[1] == found[4]
    assert model.predict(["qwxzqj"]) == [[]]


@pytest.mark.parametrize("body", [None, 3, b"zip", ["zip"], {"query": "zip"}, "", "z" * 1001])
def test_body_of_wrong_type_or_length_is_rejected(model: DocSearch, body: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^INVALID_ARGUMENT: body: "):
        model.validate(body)


@pytest.mark.parametrize("body", ["z", "zip " * 250])
def test_body_of_up_to_a_thousand_characters_is_valid(model: DocSearch, body: str) -> None:
    model.validate(body)


def test_model_does_not_load_without_library_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docsearch, "passages", lambda: ())
    with pytest.raises(RuntimeError, match="source"):
        DocSearch().load("cpu")


def test_index_has_a_row_of_length_one_for_each_passage(model: DocSearch) -> None:
    vectors = model._index.vectors
    assert vectors.shape == (len(passages()), DIMS)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(vectors)), abs=1e-4)


def test_passages_are_distinct_public_and_within_length_limits() -> None:
    found = passages()
    assert len(set(found)) == len(found) > 5000
    assert all(PASSAGE_CHARS_MIN <= len(passage.text) <= PASSAGE_CHARS_MAX for passage in found)
    parts = {part for passage in found for part in passage.name.split(".")}
    assert not {part for part in parts if part.startswith("_") and not part.endswith("__")}
    assert {"zipfile", "decimal", "help('with')"} <= {passage.name for passage in found}


def test_split_joins_short_paragraphs_and_splits_long_ones() -> None:
    prose = "A paragraph that is long enough to stand alone, which takes sixty characters."
    assert split(f"Short.\n\n{prose}\n\n{prose}") == [f"Short. {prose}", prose]
    assert split(f"{prose[:-1]}:\n\n    code()\n\n{prose}") == [f"{prose[:-1]}: code()", prose]
    assert split(f"{prose}\n\n>>> code()\n3") == [f"{prose} >>> code() 3"]
    assert split(" ".join([prose] * 9)) == [" ".join([prose] * 7), " ".join([prose] * 2)]
    assert split("Tiny.") == split("") == []


def test_passage_has_no_character_that_utf8_cannot_encode() -> None:
    [passage] = split("A lone surrogate, \ud800, in a docstring.")
    assert passage.encode() == b"A lone surrogate, ?, in a docstring."


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("Return the peer's address. More follows.", "Return the peer's address"),
        ("Return the\n    peer's address\n\nMore follows.", "Return the peer's address"),
        ("Return it.", None),
        ("Return the value of `key` here.", None),
        ("Return the value >>> get(1) of it.", None),
        ("Return the value: :param key of it.", None),
        ("return the address of it.", None),
        ("Return the café's address now.", None),
        ("Return " + "very " * 20 + "much.", None),
        ("", None),
    ],
)
def test_first_sentence_accepts_only_plain_sentences(document: str, sentence: str | None) -> None:
    assert first_sentence(document) == sentence


def test_queries_are_distinct_repeatable_and_not_passages(drawn: list[str]) -> None:
    assert len(set(drawn)) == len(drawn) == 64
    assert queries(64) == drawn
    assert not set(drawn) & {passage.text.rstrip(" .") for passage in passages()}
    assert queries(0) == []


def test_queries_come_from_public_definitions_and_repeat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passages()  # read before the paths change
    sources = {
        "one.py": '"""A module docstring is no query."""\ndef f(): "Frobnicate the first widget."',
        "two/inner.py": 'class A:\n "Frobnicate the second widget."\n def _p(self): "A private one is out."',
        "two/again.py": 'if True:\n  async def g(): "Frobnicate the first widget. Twice."',
        "tests/test_one.py": 'def f(): "A test docstring is no query."',
        "broken.py": 'def f(: "A broken file is skipped."',
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    paths = {**sysconfig.get_paths(), "purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    first, second, *rest = queries(5)
    assert {first, second} == {"Frobnicate the first widget", "Frobnicate the second widget"}
    assert rest == [first, second, first]


def test_queries_need_an_installed_package_with_docstrings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passages()
    paths = {**sysconfig.get_paths(), "purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    with pytest.raises(RuntimeError, match="docstring"):
        queries(1)


def test_words_splits_identifiers() -> None:
    assert words("readZipFile read_zip_file HTTPServer base64.b64decode") == (
        ["read", "zip", "file", "read", "zip", "file", "http", "server", "base", "64", "b", "64", "decode"]
    )


@pytest.mark.parametrize(
    "forms",
    [
        ("parse", "parses", "parsed", "parsing"),
        ("copy", "copies", "copied", "copying"),
        ("stop", "stops", "stopped", "stopping"),
        ("process", "processes", "processed", "processing"),
        ("directory", "directories"),
    ],
)
def test_stem_is_the_same_for_forms_of_a_word(forms: tuple[str, ...]) -> None:
    assert len({stem(form) for form in forms}) == 1


@pytest.mark.parametrize("word", ["string", "class", "status", "is", "need"])
def test_stem_keeps_letters_that_only_resemble_an_ending(word: str) -> None:
    assert stem(word) == word


def test_compound_gives_itself_and_its_parts_as_terms() -> None:
    analyzer = Analyzer(["copy the tree"] * Analyzer.PART_OCCURRENCES_MIN)
    assert analyzer.terms("copytree") == [stem("copytree"), "copy", stem("tree")]
    assert analyzer.terms("copyright the tree " + "copy" * 10) == ["copyright", stem("tree"), "copy" * 10]


def test_indexes_of_the_same_texts_are_equal() -> None:
    texts = [["zip", "file"], ["tar", "file"], ["tree"], []]
    first, second = LatentIndex(texts, dims=3), LatentIndex(texts, dims=3)
    assert np.array_equal(first.vectors, second.vectors)
    assert first.search([["tree"], ["file", "zip"]], limit=1) == [[(2, 1.0)], [(0, 1.0)]]


@pytest.mark.parametrize("texts", [1, 3, 255, 512, 700, 5000])
@pytest.mark.parametrize("levels", [2, 1000])
def test_nearest_equals_a_full_sort(texts: int, levels: int) -> None:
    numbers = np.random.default_rng(texts).integers(-levels, levels, (7, texts))
    scores = (numbers / levels).astype(np.float32)
    expected = [
        sorted(
            ((column, round(float(score), 4)) for column, score in enumerate(row)), key=lambda hit: -hit[1]
        )
        for row in scores
    ]
    assert nearest(scores, 5) == [hits[:5] for hits in expected]
