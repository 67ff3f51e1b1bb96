"""Payloads of rounds: packed values come back, means are the same everywhere, and malformed ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.coordination.buckets import ParameterSpec
from aiograd.distributed.local_steps.payload_form import PayloadForm
from aiograd.errors import ArgumentError, ProtocolError
from aiograd.tensors.core import make

SPECS = {
    "a": ParameterSpec((3, 5), np.dtype(np.float32)),
    "b": ParameterSpec((), np.dtype(np.float64)),
    "c": ParameterSpec((70,), np.dtype(np.float32)),
}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "top-k": {"compress": dist.TopK(1 / 4, bits=4, block=64)},
    "blockwise": {"compress": dist.Blockwise(8, block=64)},
    "answers": {"compress": dist.Blockwise(8, block=64), "answer": dist.TopK(1 / 2, bits=8, block=64)},
}

#: shapes and dtypes of arrays that are no payloads
ODD: list[tuple[Any, Any]] = [(3, np.uint8), (348, np.float32), ((348, 1), np.uint8)]


def values(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(spec.shape), spec.dtype) for spec in SPECS.values()]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_members_compute_the_mean_of_the_answer(name: str, count: int) -> None:
    form = PayloadForm(SPECS, **FORMS[name])
    rows = [1 + seed for seed in range(count)]
    payloads = [make(form.pack(values(seed), (), form.compress)[0]) for seed in range(count)]
    kind, sent, residuals = form.formed(payloads, rows, ())
    means = form.means(kind, sent, rows)
    decoded = [form.unpack(payload, form.compress) for payload in payloads]
    total = [sum(value.astype(np.float64) * n for value, n in zip(each, rows, strict=True)) for each in zip(*decoded, strict=True)]
    if form.answer is None:
        assert kind == ("each" if sum(p._data.nbytes for p in payloads) <= form.size else "mean") and residuals == []
        for mean, whole, spec in zip(means, total, SPECS.values(), strict=True):
            assert mean.dtype == spec.dtype and mean.shape == spec.shape
            np.testing.assert_array_equal(mean, (whole / sum(rows)).astype(spec.dtype))
    else:
        assert kind == "sum"
        for mean, whole, rest, spec in zip(means, total, residuals, SPECS.values(), strict=True):
            np.testing.assert_allclose(mean, (whole - rest) / sum(rows), rtol=1e-5, atol=1e-6)
            assert mean.dtype == spec.dtype


def test_what_is_packed_comes_back() -> None:
    form = PayloadForm(SPECS)
    payload, residuals = form.pack(values(0))
    assert residuals == [] and payload.nbytes == form.size == 15 * 4 + 8 + 70 * 4
    for one, other in zip(form.unpack(make(payload)), values(0), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["dense", "top-k"])
@pytest.mark.parametrize("payload", [b"", None, 3, "text", *(make(np.zeros(shape, dtype)) for shape, dtype in ODD)])
def test_malformed_payloads(name: str, payload: Any) -> None:
    form = PayloadForm(SPECS, **FORMS[name])
    with pytest.raises(ProtocolError, match="the payload of a round is"):
        form.unpack(payload, form.compress)


def test_malformed_answers() -> None:
    form = PayloadForm(SPECS)
    payload = make(form.pack(values(0))[0])
    for kind, payloads, rows in (("each", [payload], [1, 2]), ("mean", [], [1]), ("mean", [payload], []), ("sum", [payload], [1])):
        with pytest.raises(ProtocolError, match="answer of a round"):
            form.means(kind, payloads, rows)


def test_values_that_are_not_finite_are_named() -> None:
    given = values(0)
    given[0][2, 3] = np.inf
    for options in FORMS.values():
        form = PayloadForm(SPECS, **options)
        with pytest.raises(ArgumentError, match=r"pseudo-gradient of a is inf at \[2, 3\]"):
            form.pack(given, (), form.compress)


def test_dtypes_that_cannot_be_compressed() -> None:
    specs = {**SPECS, "d": ParameterSpec((1,), np.dtype(np.float16))}
    assert PayloadForm(specs).size == PayloadForm(SPECS).size + 2
    for options in ({"compress": dist.TopK()}, {"answer": dist.TopK()}):
        with pytest.raises(ArgumentError, match="d is float16"):
            PayloadForm(specs, **options)
    assert ag.float16
