"""The rules of optimizers as calls of numpy on whole parameters, for native functions that write parameters and state in place.

Note [Updates]
    Each rule repeats the numpy kernel of its optimizer (`aiograd.kernels.optimizer`) operation by operation; all of them are exact, so the bits do
    not depend on how elements are put together. New values are computed apart, and written once no floating point error is left to
    tell: until then the function has changed nothing, and numpy's calls can still be made instead. Numbers such as the rate are an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.running.types import Shape

#: beyond these a number may become another one in float32, with an error that numpy tells
_SMALLEST, _LARGEST = 1e-30, 1e30


class UpdateWriter:
    """Writes the calls of one update.

    Args:
        dtype: of all arrays.
        shape: of the array of numbers.
    """

    def __init__(self, dtype: np.dtype[Any], shape: Shape) -> None:
        self._dtype = dtype
        self._count = 0
        self._calls: list[Call] = []
        self._numbers = self._ref(shape)
        self._given = [self._numbers]
        self._updates: list[tuple[Ref, Ref]] = []

    def _ref(self, shape: Shape) -> Ref:
        self._count += 1
        return Ref(f"u{self._count}", shape, self._dtype, np.empty(shape, self._dtype).strides)

    def given(self, shape: Shape) -> Ref:
        """A further argument."""
        ref = self._ref(shape)
        self._given.append(ref)
        return ref

    def line(self, ref: Ref) -> Ref:
        """An argument as one axis."""
        size = math.prod(ref.shape or ())
        return self._add(Form.METHOD, "reshape", (ref, (size,)), (size,))

    def part(self, ref: Ref, begin: int, end: int) -> Ref:
        """Some of a line."""
        return self._add(Form.INDEX, None, (ref, (slice(begin, end),)), (end - begin,))

    def number(self, place: int) -> Ref:
        """One of the numbers."""
        return self._add(Form.INDEX, None, (self._numbers, (place, ...)), ()) if self._numbers.shape else self._numbers

    def __call__(self, function: np.ufunc, *arguments: Ref) -> Ref:
        """The result of an element-wise call."""
        shape = max([ref.shape or () for ref in arguments], key=len)
        return self._add(Form.CALL, function, arguments, shape, fresh=True)

    def _add(self, form: Form, function: Any, arguments: tuple[Any, ...], shape: Shape, *, fresh: bool = False) -> Ref:
        result = self._ref(shape)
        label = function if form is Form.METHOD else getattr(function, "__name__", "")
        self._calls.append(Call(form, function, label, arguments, (result,), fresh=fresh))
        return result

    def writes(self, target: Ref, value: Ref) -> None:
        """Write a value into an argument at the end."""
        self._updates.append((target, value))

    def code(self) -> tuple[ArrayCode, tuple[tuple[Ref, Ref], ...]]:
        """The code, and what is written at its end."""
        return ArrayCode("update", tuple(self._given), tuple(self._calls), None), tuple(self._updates)


class PlainRule:
    """``p -= g * rate``, as `SGD` without momentum; the rate is an array of no axes."""

    places: Shape = ()
    states = 0

    def new_values(self, write: UpdateWriter, p: Ref, g: Ref, state: Sequence[Ref]) -> tuple[Ref, ...]:
        """The new parameter."""
        return (write(np.subtract, p, write(np.multiply, g, write.number(0))),)


class PackedRule:
    """A rule with numbers that depend on options and on the number of the step.

    Args:
        group: the options when the rule is made; others may change the numbers, but not which operations there are.
        states: the number of state arrays.
        decoupled: of `Adam`.
    """

    places: Shape = (8,)

    def __init__(self, group: dict[str, Any], states: int, *, decoupled: bool = False) -> None:
        self.states = states
        self._decoupled = decoupled
        self._decays, self._maximizes, self._nesterov = self._kind(group)

    def _kind(self, group: dict[str, Any]) -> tuple[bool, bool, bool]:
        return bool(group["weight_decay"]), bool(group["maximize"]), bool(group.get("nesterov"))

    def numbers(self, group: dict[str, Any], key: Any, dtype: np.dtype[Any]) -> Any:
        """The numbers of one step; None where the step is to be made by numpy's calls."""
        if self._kind(group) != (self._decays, self._maximizes, self._nesterov):
            return None
        try:
            found = self._values(group, key)
            for number in found:
                if (number.__class__ is not float and number.__class__ is not int) or not (_SMALLEST < abs(number) < _LARGEST or number == 0):
                    return None
        except (ArithmeticError, TypeError, ValueError):  # the kernel raises it
            return None
        return np.array(found, dtype)

    def _values(self, group: dict[str, Any], key: Any) -> list[Any]:
        raise NotImplementedError

    def _slope(self, write: UpdateWriter, p: Ref, g: Ref, decay: Ref | None) -> Ref:
        d = write(np.negative, g) if self._maximizes else g
        return d if decay is None else write(np.add, d, write(np.multiply, p, decay))


class MomentumRule(PackedRule):
    """As `aiograd.kernels.optimizer.sgd`."""

    def _values(self, group: dict[str, Any], key: Any) -> list[Any]:
        return [group["lr"], group["momentum"], 1.0 - group["dampening"], group["weight_decay"], 0.0, 0.0, 0.0, 0.0]

    def new_values(self, write: UpdateWriter, p: Ref, g: Ref, state: Sequence[Ref]) -> tuple[Ref, ...]:
        """The new parameter and velocity."""
        d = self._slope(write, p, g, write.number(3) if self._decays else None)
        made: tuple[Ref, ...] = ()
        if state:
            u = write(np.add, write(np.multiply, state[0], write.number(1)), write(np.multiply, d, write.number(2)))
            d = write(np.add, d, write(np.multiply, u, write.number(1))) if self._nesterov else u
            made = (u,)
        return write(np.subtract, p, write(np.multiply, d, write.number(0))), *made


class AdamRule(PackedRule):
    """As `aiograd.kernels.optimizer.adam`."""

    def _values(self, group: dict[str, Any], key: Any) -> list[Any]:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        correction1, correction2 = 1.0 - beta1**key, 1.0 - beta2**key
        shrinks = 1.0 - lr * decay if self._decoupled else decay
        return [beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 / math.sqrt(correction2), group["eps"], lr / correction1, shrinks]

    def new_values(self, write: UpdateWriter, p: Ref, g: Ref, state: Sequence[Ref]) -> tuple[Ref, ...]:
        """The new parameter, means, and with a third state the largest mean of squares."""
        d = self._slope(write, p, g, write.number(7) if self._decays and not self._decoupled else None)
        if self._decays and self._decoupled:
            p = write(np.multiply, p, write.number(7))
        u, w, *top = state
        u = write(np.add, write(np.multiply, u, write.number(0)), write(np.multiply, d, write.number(1)))
        w = write(np.add, write(np.multiply, w, write.number(2)), write(np.multiply, write(np.multiply, d, d), write.number(3)))
        made = [u, w]
        if top:
            w = write(np.maximum, top[0], w)
            made.append(w)
        t = write(np.add, write(np.multiply, write(np.sqrt, w), write.number(4)), write.number(5))
        t = write(np.multiply, write(np.divide, u, t), write.number(6))
        return write(np.subtract, p, t), *made


def update_code(rule: Any, dtype: np.dtype[Any], shapes: Sequence[Shape]) -> tuple[ArrayCode, tuple[tuple[Ref, Ref], ...]]:
    """The code of a rule for some parameters, and what it writes at its end.

    Its arguments are the numbers, then of each parameter the array and its gradient, then the lines of state that all of them share.

    Args:
        rule: the rule.
        dtype: of all arrays.
        shapes: of the parameters.
    """
    write = UpdateWriter(dtype, rule.places)
    pairs = [(write.given(shape), write.given(shape)) for shape in shapes]
    lines = [write.given((sum(map(math.prod, shapes)),)) for _ in range(rule.states)]
    begin = 0
    for p, g in pairs:
        target = write.line(p)
        end = begin + math.prod(p.shape or ())
        state = [write.part(line, begin, end) for line in lines]
        begin = end
        for each, value in zip((target, *state), rule.new_values(write, target, write.line(g), state), strict=True):
            write.writes(each, value)
    return write.code()
