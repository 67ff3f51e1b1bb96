"""Native functions in odd circumstances: other arguments than expected, threads, results that outlive them, forks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.calls import ArrayCode
from tests.compiler.native.codes import Both, Recorder, assert_same, needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("sizes")]


class Other(np.ndarray):
    """Another class of arrays."""


def both_of(length: int) -> Both:
    """``x * y + y`` with a view of it, and a sum."""
    recorder = Recorder()
    x, y = (recorder.parameter(np.ones(length)) for _ in "xy")
    total = recorder.call(np.add, recorder.call(np.multiply, x, y), y)
    return Both(recorder.code((total, [recorder.index(total, slice(1, None)), None], recorder.call(np.exp, total))))


@pytest.mark.parametrize("length", [3, 16, 40, 5000])
def test_arguments_that_are_no_plain_arrays(length: int) -> None:
    """An unaligned array, one of another class, a masked one, a tuple: numpy's function answers."""
    both = both_of(length)
    plain = np.linspace(0.0, 1.0, length)
    odd = np.frombuffer(bytearray(8 * length + 1), np.float64, length, 1)
    odd[:] = plain
    assert not odd.flags.aligned
    for number, strange in enumerate((odd, plain.view(Other), np.ma.array(plain))):
        found, expected = both.native(strange, plain), both.plain(strange, plain)
        assert type(found[0]) is type(expected[0]) and np.array_equal(found[0], expected[0])
        assert both.asked == number + 1
    both.check([plain, plain])


def test_numbers_where_arrays_were() -> None:
    recorder = Recorder()
    x, y = recorder.parameter(np.ones((), "f")), recorder.parameter(np.ones(3, "f"))
    both = Both(recorder.code((recorder.call(np.multiply, x, y), recorder.call(np.add, y, 1.0))))
    assert both.native(np.float32(3.0), np.ones(3, "f"))[0].tolist() == [3.0] * 3
    assert both.asked == 1
    both.check([np.full((), 3.0, "f"), np.ones(3, "f")])


@pytest.mark.parametrize("count", [2, 7, 8, 9, 20])
@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_of_arrays(count: int, kind: type) -> None:
    """A parameter that is a tuple takes lists too; arrays in it are handed on, and may be odd."""
    recorder = Recorder()
    refs = tuple(recorder.parameter(np.ones(3)) for _ in range(count))
    total = refs[0]
    for ref in refs[1:]:
        total = recorder.call(np.add, total, ref)
    both = Both(ArrayCode("f", (("items", refs),), tuple(recorder.calls), (total, list(refs), (None, refs[-1]))))
    arrays = [np.random.default_rng(i).standard_normal(3) for i in range(count)]
    both.check([kind(arrays)])
    _, found, (_, last) = both.native(kind(arrays))
    assert all(one is other for one, other in zip(found, arrays, strict=True)) and last is arrays[-1]
    arrays[count // 2] = arrays[count // 2].view(Other)
    both.native(kind(arrays))
    assert both.asked == 1


def test_results_outlive_the_function() -> None:
    """Results, and views in them, keep their memory; the function is freed once it is not used."""
    both = both_of(40)
    arrays = [np.arange(40.0), np.full(40, 2.0)]
    results = both.native(*arrays)
    gone = weakref.ref(both)
    expected = both.plain(*arrays)
    del both
    gc.collect()
    assert gone() is None
    filled = [np.full(40, np.nan) for _ in range(100)]
    for one, other in ((results[0], expected[0]), (results[1][0], expected[1][0]), (results[2], expected[2])):
        assert_same(one, other)
    view, results = results[1][0], None
    gc.collect()
    assert_same(view, expected[1][0])
    assert len(filled) == 100


def test_a_call_keeps_no_memory() -> None:
    """Neither arguments nor results are held after a call, nor is a reference lost, also where numpy's function answers."""
    both = both_of(40)
    arrays = [np.arange(40.0), np.full(40, 2.0)]
    odd = [arrays[0].view(Other), arrays[1]]
    for given in (arrays, odd):
        result = weakref.ref(both.native(*given)[0])
        assert result() is None
    counts = [sys.getrefcount(each) for each in (*arrays, None, both.native)]
    for _ in range(1000):
        both.native(*arrays)
    assert [abs(one - sys.getrefcount(each)) < 100 for one, each in zip(counts, (*arrays, None, both.native), strict=True)] == [True] * 4


@pytest.mark.parametrize("length", [16, 3000, 200_000])
def test_many_threads(length: int) -> None:
    """One function on many threads at once, with its own memory in use and the lock released: each has its own results."""
    recorder = Recorder()
    x, y = (recorder.parameter(np.ones(length)) for _ in "xy")
    total = x
    for _ in range(4):
        total = recorder.call(np.tanh, recorder.call(np.add, recorder.call(np.multiply, total, y), x))
    both = Both(recorder.code((total, recorder.call(np.add.reduce, total, None, None, None, False))))
    begin, wrong = threading.Barrier(6), []

    def work(seed: int) -> None:
        arrays = [np.random.default_rng(seed + i).standard_normal(length) for i in range(2)]
        expected = both.plain(*arrays)
        begin.wait()
        for _ in range(30):
            try:
                assert_same(both.native(*arrays), expected)
            except AssertionError as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not both.asked


def test_a_call_within_a_call() -> None:
    """The function that errors are told to calls the native function once more."""
    recorder = Recorder()
    x, y = (recorder.parameter(np.ones(3000)) for _ in "xy")
    total = recorder.call(np.exp, recorder.call(np.exp, recorder.call(np.divide, x, y)))
    both = Both(recorder.code(recorder.call(np.add, total, y)))
    inner: list[Any] = []

    def tell(kind: str, _: int) -> None:
        with np.errstate(all="ignore"):
            inner.append((kind, both.native(np.full(3000, 0.5), np.ones(3000))))

    with np.errstate(divide="call", over="ignore", call=tell):
        outer = both.native(np.ones(3000), np.zeros(3000))
    assert inner[0][0] == "divide by zero" and np.isinf(outer).all()
    assert_same(inner[0][1], both.plain(np.full(3000, 0.5), np.ones(3000)))


@pytest.mark.one_loop
async def test_a_program_that_is_freed_before_its_backward() -> None:
    found = []
    for tier in ("numpy", "native"):
        function: Any = ag.compile(lambda x: (ag.tanh(x * x) + x).sum(), tier=tier)
        x = ag.tensor(np.linspace(-1.0, 1.0, 30), requires_grad=True)
        function(x)
        loss = function(x)
        del function
        gc.collect()
        await loss.backward()
        found.append((loss.numpy().tobytes(), x.grad.numpy().tobytes()))
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_calls_the_function() -> None:
    both = both_of(3000)
    arrays = [np.arange(3000.0) / 3000, np.ones(3000)]
    expected = both.native(*arrays)
    child = os.fork()
    if not child:
        code = 1
        try:
            assert_same(both.native(*arrays), expected)
            assert_same(both_of(40).native(np.ones(40), np.ones(40))[0], np.full(40, 2.0))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
