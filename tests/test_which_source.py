"""Code asks what a source can do (`SourceCapabilities`), never which source it has. The counts here only go down."""

from __future__ import annotations

import ast

from tests.test_which_sink import classes, places, questions_in


def test_no_code_asks_which_source_it_has():
    assert places("Source") == []


def test_a_test_of_which_source_is_found():
    """The rules of this file find what they are for."""
    sources = classes("Source")
    assert {"FileSource", "DeltaTableSource", "KafkaSource", "PostgresSource", "ChainedSource"} <= sources
    text = "isinstance(input, Source | FileSource)\ntype(source) is KafkaSource\nreader.source.kind == 'file'"
    assert [line for line, _ in questions_in(ast.parse(text), "Source", sources)] == [1, 2, 3]
    text = "isinstance(input, Source)\nfile.kind == INPUT\nFileSource('a')\nsource.kind"
    assert list(questions_in(ast.parse(text), "Source", sources)) == []
