"""Examples in docstrings of `aiograd.cuda`, run in the simulator."""

from __future__ import annotations

import doctest

import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from tests.test_examples_in_docstrings import examples, run

EXAMPLES = [pytest.param(example, id=example.name) for example in examples(ag.cuda)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_what_it_says(example: doctest.DocTest, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(example, monkeypatch)
    assert results.failed == 0 and results.attempted > 0
