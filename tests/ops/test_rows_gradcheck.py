"""Every differentiable row through Tensors and the engine: `gradcheck` and `gradgradcheck` over its drawn arguments.

The tables alone are checked elsewhere, without any Tensor; here it is recording, node classes, placement and create_graph as well. Each row is
checked on one loop only: which loop it is does not matter to a rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.functional.gradient_check import gradcheck, gradgradcheck
from aiograd.ops import ROWS
from tests.ops import domains_core, domains_nn
from tests.ops.domain import Domain, arrays, cases
from tests.sweeps import swept

DOMAINS: dict[str, Domain] = {
    **domains_core.DOMAINS,
    **domains_nn.DOMAINS,
    "to_device": cases(arrays((2, 3), device="cpu", source="cpu")),  # between devices: see the tests of devices
}
DIFFERENTIABLE = sorted(name for name, row in ROWS.items() if row.differentiable)

#: cases per row, spread over the varieties, and how many elements they may have: both Jacobians cost a pass or two per element, and larger
#: cases are checked on the bare tables
ONCE = (12, 60)
TWICE = (4, 30)


def test_every_differentiable_row_has_a_domain() -> None:
    missing = sorted(set(DIFFERENTIABLE) - set(DOMAINS))
    assert not missing, f"rows without a domain in tests/ops/domains_*.py: {', '.join(missing)}"
    unknown = sorted(set(DOMAINS) - set(ROWS))
    assert not unknown, f"domains of rows that do not exist: {', '.join(unknown)}"
    assert len(DIFFERENTIABLE) > 120


def floating(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fc"


def drawn(domain: Domain, most: int, elements: int, imaginary: bool) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Up to `most` cases of at most so many elements, evenly over the varieties; the smallest where all have more."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for variety in range(domain.varieties):
        rng = np.random.default_rng([variety, 11])
        args, kwargs = domain.draw(rng, variety)
        if imaginary:
            args = tuple(np.asarray(a + 1j * rng.uniform(0.1, 0.4, a.shape)) if floating(a) else a for a in args)
        found.append((args, kwargs))
    small = [case for case in found if _size(case) <= elements] or [min(found, key=_size)]
    return small[:: max(1, len(small) // most)][:most]


def _size(case: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    return sum(a.size for a in case[0] if floating(a))


async def check(name: str, imaginary: bool = False) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for twice in (False, True) if domain.second_order else (False,):
        for args, kwargs in drawn(domain, *(TWICE if twice else ONCE), imaginary):
            keys = [i for i, a in enumerate(args) if floating(a)]
            inputs = tuple(ag.tensor(args[i], requires_grad=True) for i in keys)

            def function(*tensors: Any, args: Any = args, kwargs: Any = kwargs, keys: Any = keys) -> Any:
                full = list(args)
                for i, tensor in zip(keys, tensors, strict=True):
                    full[i] = tensor
                out = domain.call(row, full, kwargs)
                outputs = out if isinstance(out, tuple) else (out,)
                return tuple(output for output in outputs if output.dtype.kind in "fc")

            if twice:
                assert await gradgradcheck(function, inputs, atol=1e-4, rtol=1e-3)
            else:
                assert await gradcheck(function, inputs)


def test_a_row_that_returns_memory_of_an_argument_is_marked_as_a_view() -> None:
    found = set()
    for name, domain in DOMAINS.items():
        for args, kwargs in drawn(domain, 4, 60, False):
            given = tuple(args) if domain.prepare is None else domain.prepare(*args)
            made = ROWS[name](*given, **kwargs)
            arrays = [(i, x) for i, x in enumerate(given) if isinstance(x, np.ndarray)]
            for out in made if isinstance(made, tuple) else (made,):
                found |= {name for i, x in arrays if np.shares_memory(out, x) and not (i == 0 and ROWS[name].view)}
    assert found == {"to_device"}, "a Tensor asks for this one only where the device is another"


@pytest.mark.parametrize("name", swept(DIFFERENTIABLE, keep=80))
def test_row(name: str) -> None:
    ag.run(check(name), tune_gc=False)


@pytest.mark.parametrize("name", swept((name for name in DIFFERENTIABLE if name in DOMAINS and DOMAINS[name].complex), keep=10))
def test_row_on_complex_numbers(name: str) -> None:
    ag.run(check(name, imaginary=True), tune_gc=False)
