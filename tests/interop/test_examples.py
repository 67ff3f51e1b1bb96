"""Examples in docstrings of `aiograd.interop.torch` and `aiograd.interop.jax`, run where the library is installed."""

from __future__ import annotations

import doctest
import importlib.util

import pytest

from tests.test_examples_in_docstrings import examples, run

EXAMPLES = [
    pytest.param(example, id=example.name)
    for library in ("torch", "jax")
    if importlib.util.find_spec(library) is not None
    for example in examples(importlib.import_module(f"aiograd.interop.{library}"))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_what_it_says(example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(example, monkeypatch)
    assert results.failed == 0 and results.attempted > 0
