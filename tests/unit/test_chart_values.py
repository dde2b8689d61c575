"""The values of the Helm chart: what is written from the code and from values.yaml is up to date."""

from __future__ import annotations

import re

from support import chart


def test_schema_and_readme_are_up_to_date() -> None:
    """Else: cd tests && python -m support.chart --write"""
    assert chart.SCHEMA.read_text(encoding="utf-8") == chart.schema_text(), "see the docstring of this test"
    readme, values = (
        path.read_text(encoding="utf-8") for path in (chart.README, chart.CHART / "values.yaml")
    )
    assert readme == chart.with_table(readme, values), "see the docstring of this test"


def test_each_value_has_a_description_and_each_note_a_text() -> None:
    values = list(chart.values_of((chart.CHART / "values.yaml").read_text(encoding="utf-8")))
    assert len(values) > 80
    said_by_their_group = r"Context\.|\.resources\.|^redis\.keys\.|Replicas$"
    lacking = [each.path for each in values if not each.meaning]
    assert [path for path in lacking if not re.search(said_by_their_group, path)] == []
    notes = {found for each in values for found in re.findall(r"\((\d)\)$", each.meaning)}
    assert set(re.findall(r"^(\d)\. ", chart.README.read_text(encoding="utf-8"), re.MULTILINE)) == notes


def test_values_are_read_from_lines() -> None:
    text = "# group\na:\n  # what it is,\n  # in two lines (1)\n  b: 3 # why\n  c: [1]\nd: {}\n"
    assert list(chart.values_of(text)) == [
        chart.Value("a", "", "group"),
        chart.Value("a.b", "3", "what it is, in two lines (1)"),
        chart.Value("a.c", "[1]", ""),
        chart.Value("d", "{}", ""),
    ]
