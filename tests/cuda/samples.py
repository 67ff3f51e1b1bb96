"""Arguments for every row of the op tables, whether it has gradients or not: the list of rows that a device is tried on, simulated or real."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.ops.op import ROWS
from tests.ops import domains_core, domains_nn
from tests.ops.domain import Arguments, Domain, apart, arrays, binary, cases

#: the rows with gradients, as the tests of the host draw their arguments
DOMAINS: dict[str, Domain] = {**domains_core.DOMAINS, **domains_nn.DOMAINS}
#: rows that are no functions of one device: a copy between two
NOT_ON_DEVICES = frozenset({"to_device"})
#: rows that leave the memory of their result as it is: only shape and dtype count
UNWRITTEN = frozenset({"empty_like"})
#: rows with results that are as long as their values say, which a device refuses where the length does not follow from the shapes
LONG_AS_VALUES_SAY = frozenset({"nonzero", "unique_values"})
DTYPES = ("float64", "float32", "float16")
SPECIAL = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 3.0])


def _integers(low: int, *shapes: tuple[int, ...], high: int = 9) -> Any:
    return lambda rng: (tuple(rng.integers(low, high, shape) for shape in shapes), {})


def _truths(*shapes: tuple[int, ...], **statics: Any) -> Any:
    def draw(rng: np.random.Generator) -> Arguments:
        return tuple(np.asarray(rng.integers(0, 2, shape).astype(np.float64)) for shape in shapes), dict(statics)

    return draw


def _fixed(*args: Any, **statics: Any) -> Any:
    return lambda rng: (tuple(np.asarray(arg) for arg in args), dict(statics))


_WHOLE = cases(_integers(0, (2, 3), (3,)), _integers(1, (4,), (4,)), _integers(-9, (2, 1), (1, 3)))
_SHIFTS = cases(_integers(0, (2, 3), (3,), high=5), _integers(0, (), (4,), high=7), _integers(0, (2, 1), (1, 3)))
_LOGICAL = cases(_truths((2, 3), (3,)), _truths((4,), ()), _fixed(SPECIAL, np.float64(1)))
_COMPARED = cases(_truths((3, 4), (4,)), _fixed(SPECIAL, SPECIAL[::-1].copy()), arrays((2, 1), (1, 3)), arrays((0, 3), (3,)))
_TESTED = cases(_fixed(SPECIAL), arrays((2, 3)), arrays((0,)))
_FOUND = cases(apart((5,)), apart((3, 4), axis=0), apart((3, 4), axis=-1, keepdims=True))
_REDUCED = cases(_truths((5,)), _truths((3, 4), axis=0), _truths((2, 3, 2), axis=(0, 2), keepdims=True), arrays((0,)))
_MADE = cases(arrays((2, 3)), arrays((4,), dtype=np.dtype(np.float32)), arrays((), shape=(2, 2)))

#: the rows without gradients
SAMPLES: dict[str, Domain] = {
    **dict.fromkeys(("all", "any", "count_nonzero"), _REDUCED),
    **dict.fromkeys(("argmax", "argmin"), _FOUND),
    "argsort": cases(apart((5,)), apart((3, 4), axis=0), apart((3, 4), descending=True)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "lcm"), _WHOLE),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _SHIFTS),
    "bitwise_not": cases(_integers(-9, (2, 3)), _integers(0, (4,))),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like"), _MADE),
    "full_like": cases(arrays((2, 3), fill_value=2.5), arrays((4,), fill_value=-1, dtype=np.dtype(np.float32)), arrays((), fill_value=0, shape=(2,))),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _COMPARED),
    "floor_divide": binary((-9.0, 9.0), (-3.0, 3.0), away=((), (0.0,)), apart=0.25),
    "isclose": cases(_truths((3, 4), (4,)), _fixed(SPECIAL, SPECIAL, equal_nan=True), _fixed(SPECIAL, SPECIAL)),
    "isin": cases(_truths((3, 4), (2,)), _fixed([1.0, 2.0, 3.0], [2.0, 5.0], invert=True)),
    **dict.fromkeys(("isfinite", "isinf", "isnan", "signbit"), _TESTED),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _LOGICAL),
    "logical_not": cases(_truths((2, 3)), _fixed(SPECIAL)),
    "nonzero": cases(_fixed([1.0, 0.0, 2.0]), _fixed([[0.0, 1.0], [0.0, 0.0]])),
    "searchsorted": cases(_fixed([1.0, 2.0, 4.0], [0.5, 2.0, 9.0]), _fixed([1.0, 2.0, 4.0], [[2.0, 1.0], [4.0, 3.0]], side="right")),
    "unique_values": cases(_fixed([1.0, 2.0, 1.0]), _fixed([3.0, 1.0, 3.0, 2.0])),
}
#: the number of cases of a row's arguments that the tests of all rows take
VARIETIES = 3
#: every case of `tests.cuda.on_both.row_agrees`: name of a row, and a dtype
ROW_CASES = [(name, dtype) for name in sorted(ROWS.keys() - NOT_ON_DEVICES) for dtype in DTYPES]


def domain_of(name: str) -> Domain:
    """How the arguments of a row are drawn."""
    return DOMAINS[name] if name in DOMAINS else SAMPLES[name]
