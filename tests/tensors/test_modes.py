"""Modes: what they switch, on what kind of function, for which task, and that they never leak."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ModeError
from aiograd.running.modes import current_mode
from tests.support import assert_raises, leaf

# -------------------------------------------------------------------- blocks


def test_no_grad_records_nothing_and_enable_grad_records_again() -> None:
    x = leaf([1.0])
    before = current_mode()
    assert ag.is_grad_enabled()
    with ag.no_grad():
        assert not ag.is_grad_enabled() and not (x * 2).requires_grad
        with ag.enable_grad():
            assert ag.is_grad_enabled() and (x * 2).requires_grad
            with ag.no_grad():
                assert not ag.is_grad_enabled()
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled() and current_mode() is before


def test_a_block_may_be_used_again_and_within_itself() -> None:
    scope = ag.no_grad()
    with scope, scope:
        assert not ag.is_grad_enabled()
    with scope:
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled()


def test_an_exception_ends_the_mode() -> None:
    with pytest.raises(ZeroDivisionError), ag.no_grad():
        raise ZeroDivisionError
    assert ag.is_grad_enabled()


def test_set_grad_enabled_as_block_and_as_call() -> None:
    with ag.set_grad_enabled(False):
        assert not ag.is_grad_enabled()
        with ag.set_grad_enabled(True):
            assert ag.is_grad_enabled()
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled()
    ag.set_grad_enabled(False)
    assert not ag.is_grad_enabled()
    ag.set_grad_enabled(True)
    assert ag.is_grad_enabled()
    scope = ag.set_grad_enabled(False)  # at once, and until the end of the block
    assert not ag.is_grad_enabled()
    with scope:
        assert not ag.is_grad_enabled()
        with scope:
            assert not ag.is_grad_enabled()
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled()


def test_a_switch_within_a_block_of_another_mode_outlasts_it() -> None:
    with ag.detect_anomaly():
        ag.set_grad_enabled(False)
    assert not ag.is_grad_enabled()
    ag.set_grad_enabled(True)
    with ag.no_grad():
        ag.set_grad_enabled(True)
        assert ag.is_grad_enabled()
    assert ag.is_grad_enabled()
    with ag.no_grad():
        with ag.detect_anomaly():
            ag.set_default_dtype(np.float64)
        assert not ag.is_grad_enabled()
    assert ag.is_grad_enabled() and ag.get_default_dtype() == np.float64
    ag.set_default_dtype(np.float32)


def test_blocks_left_in_another_order_are_an_error() -> None:
    def check() -> None:
        outer, inner = ag.no_grad(), ag.detect_anomaly()
        outer.__enter__()
        inner.__enter__()
        assert_raises(ModeError, "leaving no_grad: it is not the innermost mode", outer.__exit__, None, None, None)
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        assert_raises(ModeError, None, outer.__exit__, None, None, None)

    contextvars.copy_context().run(check)


def test_a_block_left_in_another_context_is_an_error() -> None:
    scope = ag.no_grad()
    elsewhere = contextvars.copy_context()
    elsewhere.run(scope.__enter__)
    assert_raises(ModeError, "entered in another task, thread or generator", scope.__exit__, None, None, None)
    assert ag.is_grad_enabled()
    assert not elsewhere.run(ag.is_grad_enabled)


# -------------------------------------------------------------------- decorators


def test_generators_may_be_interleaved_and_recursive() -> None:
    @ag.no_grad()
    def off(depth: int) -> Generator[bool, None, None]:
        yield ag.is_grad_enabled()
        if depth:
            yield from on(depth - 1)
        yield ag.is_grad_enabled()

    @ag.enable_grad()
    def on(depth: int) -> Generator[bool, None, None]:
        yield ag.is_grad_enabled()
        if depth:
            yield from off(depth - 1)
        yield ag.is_grad_enabled()

    assert list(off(3)) == [False, True, False, True, True, False, True, False]
    one, other = off(0), on(0)
    with ag.no_grad():
        assert [next(one), next(other), next(one), next(other)] == [False, True, False, True]
        assert not ag.is_grad_enabled()


def test_classes_cannot_be_decorated() -> None:
    with pytest.raises(ArgumentError, match="decorates functions; Model is a class"):

        @ag.no_grad()
        class Model:
            pass


# -------------------------------------------------------------------- tasks and threads


def test_threads_start_with_the_default() -> None:
    seen: list[bool] = []
    with ag.no_grad():
        thread = threading.Thread(target=lambda: seen.append(ag.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


# -------------------------------------------------------------------- default dtype


def test_the_default_dtype_is_that_of_python_floats() -> None:
    assert ag.get_default_dtype() == np.float32
    assert ag.tensor([1.0, 2]).dtype == np.float32 and ag.tensor(1.5).dtype == np.float32
    assert ag.tensor([1, 2]).dtype == np.int64 and ag.tensor(True).dtype == np.bool_
    assert ag.tensor(1j).dtype == np.complex64
    assert ag.tensor(np.array([1.0])).dtype == np.float64
    ag.set_default_dtype(np.float64)
    try:
        assert ag.tensor([1.0]).dtype == np.float64 and ag.tensor([1j]).dtype == np.complex128
    finally:
        ag.set_default_dtype(np.float32)


@pytest.mark.parametrize("dtype", [int, np.complex64, bool, "U3"])
def test_the_default_dtype_is_real_floating(dtype: Any) -> None:
    assert_raises(ArgumentError, "expected a real floating dtype", ag.set_default_dtype, dtype)
    assert ag.get_default_dtype() == np.float32


async def test_the_default_dtype_belongs_to_the_task() -> None:
    async def other() -> Any:
        ag.set_default_dtype(np.float64)
        await asyncio.sleep(0)
        return ag.get_default_dtype()

    assert await asyncio.create_task(other()) == np.float64
    assert ag.get_default_dtype() == np.float32


def test_a_number_that_is_given_a_dtype_is_not_rounded_on_the_way() -> None:
    assert ag.tensor(0.1, dtype=np.float64).item() == 0.1
    assert ag.tensor([0.1], dtype=np.float64).tolist() == [0.1]
    assert ag.asarray([0.1], dtype=np.float64).tolist() == [0.1]
