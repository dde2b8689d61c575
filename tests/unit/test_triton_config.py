"""Triton's `config.pbtxt`: protobuf's text format, and the fields of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_worker.triton.config import empty_config, read_config
from carpool_worker.triton.text_format import DEPTH_MAX, Field, Scalar, parse


def plain(fields: tuple[Field, ...]) -> list[Any]:
    """Fields as pairs, with their values as text."""
    return [(name, value.text if isinstance(value, Scalar) else plain(value)) for name, value, _ in fields]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", []),
        ("# nothing\n", []),
        ('a: "x"', [("a", "x")]),
        ("a: 'x' b: -1, c: true; d: TYPE_FP32", [("a", "x"), ("b", "-1"), ("c", "true"), ("d", "TYPE_FP32")]),
        ('a: "one" \n \'two\' # and\n "three"', [("a", "onetwothree")]),
        (r'a: "\n\t\"\'\\\x41\101é\U0001F600"', [("a", "\n\t\"'\\AAé\U0001f600")]),
        ("a: [1, 2]", [("a", "1"), ("a", "2")]),
        ("a: [ ]", []),
        ("a [ { b: 1 }, { b: 2 } ]", [("a", [("b", "1")]), ("a", [("b", "2")])]),
        ("a { b < c: 0x1F > }", [("a", [("b", [("c", "0x1F")])])]),
        ("a: { b: 1.5e-3f c: -inf d: nan }", [("a", [("b", "1.5e-3f"), ("c", "-inf"), ("d", "nan")])]),
        ("a{b:1}c{}", [("a", [("b", "1")]), ("c", [])]),
    ],
)
def test_a_text_is_read(text: str, fields: list[Any]) -> None:
    assert plain(parse(text, "f")) == fields


def test_fields_know_their_lines() -> None:
    fields = parse('a: 1\n\nb {\n  c: "x"\n     "y"\n}\nd: [ 1,\n 2 ]', "f")
    assert [field.line for field in fields] == [1, 3, 7, 8]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a", "f, line 1: expected ':' or '{' after a, found the end of the file"),
        ("a:\n", "f, line 2: expected a value for a, found the end of the file"),
        ("a: }", "f, line 1: expected a value for a, found '}'"),
        ("a: 1\n}", "f, line 2: expected the name of a field, found '}'"),
        ("a {\n b: 1\n", "f, line 3: expected the name of a field or '}', found the end of the file"),
        ("a { b: 1 >", "f, line 1: expected the name of a field or '}', found '>'"),
        ("a: [1 2]", "f, line 1: expected ',' or ']' in the list a, found '2'"),
        ("a: 1\nb = 2", "f, line 2: '= 2' is not valid here"),
        ('a: "x\ny"', "f, line 1: '\"x' is not valid here"),
        (r'a: "\q"', r"f, line 1: '\\q' in a text is no escape; write \\ for a backslash"),
        ("[a.b]: 1", "f, line 1: expected the name of a field, found '['"),
        ("a {" * (DEPTH_MAX + 1), f"f, line 1: messages are nested in more than {DEPTH_MAX} levels"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text, "f")
    assert str(caught.value) == error


PIECES = r"""input name dims key value parameters max_batch_size { } < > [ ] : , ; "x" ' " 1 -1 0x 1e9 true
    TYPE_FP32 # \\ é"""


@given(st.lists(st.sampled_from(PIECES.split()), max_size=30).map(" ".join) | st.text(max_size=40))
def test_any_text_is_read_or_refused_with_a_line(text: str) -> None:
    try:
        read_config(text, "f")
    except ValueError as error:
        assert str(error).startswith("f, line ")


def test_a_configuration_has_all_fields_with_their_defaults() -> None:
    config = read_config(
        """
        name: "m" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] }
        dynamic_batching { priority_queue_policy { key: 2 value { max_queue_size: 5 } } }
        parameters { key: "a" value { string_value: "b" } } parameters { key: "c" }
        """,
        "f",
    )
    given = {name: value for name, value in config.items() if value != empty_config().get(name)}
    assert given == {
        "name": "m",
        "max_batch_size": 8,
        "input": [
            {
                "name": "x",
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [-1, 3],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "dynamic_batching": {
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
            "priority_levels": 0,
            "default_priority_level": 0,
            "priority_queue_policy": {
                "2": {
                    "timeout_action": "REJECT",
                    "default_timeout_microseconds": 0,
                    "allow_timeout_override": False,
                    "max_queue_size": 5,
                }
            },
        },
        "parameters": {"a": {"string_value": "b"}, "c": {"string_value": ""}},
    }
    assert empty_config()["backend"] == "" and "version_policy" not in empty_config()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_batch_sise: 8", "f, line 1: max_batch_sise: unknown field; did you mean max_batch_size?"),
        ("input {\n dim: 8 }", "f, line 2: input.dim: unknown field; did you mean dims?"),
        (
            "version_policy { zzz: 1 }",
            "f, line 1: version_policy.zzz: unknown field; there are latest, all, specific",
        ),
        ("max_batch_size: '8'", "f, line 1: max_batch_size: expected a whole number, found '8'"),
        ("max_batch_size: 1.5", "f, line 1: max_batch_size: expected a whole number, found '1.5'"),
        ("max_batch_size: 012x", "f, line 1: expected ':' or '{' after x, found the end of the file"),
        ("name: m", "f, line 1: name: expected a text in quotes, found 'm'"),
        ("name { }", "f, line 1: name: expected a text in quotes, found { ... }"),
        ("input: 1", "f, line 1: input: expected { ... }, found '1'"),
        ("input { optional: 2 }", "f, line 1: input.optional: expected true or false, found '2'"),
        (
            "instance_group { kind: CPU }",
            "f, line 1: instance_group.kind: expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, "
            "found 'CPU'",
        ),
        ('name: "a"\nname: "b"', "f, line 2: name: is given in line 1 already; remove one"),
        (
            "dynamic_batching { }\nsequence_batching { }",
            "f, line 2: sequence_batching: dynamic_batching is given as well; remove one of them",
        ),
        ('parameters { name: "a" }', "f, line 1: parameters: expected { key: ... value: ... }"),
        (
            'parameters {\n key: "a" value: { text: "b" } }',
            "f, line 2: parameters.a.text: unknown field; there are string_value",
        ),
    ],
)
def test_wrong_fields_are_told_with_their_lines(text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_config(text, "f")
    assert str(caught.value) == error
