"""Steps of optimizers inside of compiled steps: statements of numpy calls in the place of a call of `Optimizer.step`.

Note [An inlined step]
    The text repeats the optimizer's work for its parameters: the same calls, of the same arrays, in the same order. So the bits
    are the same, and where one of them raises the same has happened. Options are read at every run. Before anything is written it looks if all is
    as it was when the text was made: the same groups of the same parameters, each with a gradient, the state where it was. Where that is not so,
    where the step is traced, and for optimizers and sizes of parameters that are not known here, `Optimizer.step` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.source import Names, SourceFile, load_text
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.optim.adam import Adam, AdamW
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.packing import PACKED_SIZE
from aiograd.optim.sgd import SGD, SMALL
from aiograd.running import tracing
from aiograd.tensors.core import TENSOR_CLASS

#: parameters of one step; for more of them a call more does not matter, and text takes time to compile
MOST = 64

#: takes the step and returns True; False: nothing has been done
Inlined = Callable[[], bool]


class _NotKnown(Exception):
    """Raised for a step that cannot be inlined and has to be called."""


def inlined_step(optimizer: Any, comment: str, file: SourceFile) -> Inlined | None:
    """A function that does what ``optimizer.step()`` does; None where there is none. See the module's Note.

    Args:
        optimizer: the optimizer that has taken a step.
        comment: the user's line.
        file: the file that its text is added to.
    """
    if type(optimizer) not in (SGD, Adam, AdamW) or sum(len(group["params"]) for group in optimizer.param_groups) > MOST:
        return None
    try:
        return _Text(optimizer, comment).load(file)
    except _NotKnown:
        return None


class _Text:
    """The text of one step: first the lines that may refuse, then the lines that write."""

    def __init__(self, optimizer: Any, comment: str) -> None:
        self._optimizer = optimizer
        self._names = Names()
        self._checks = [f"def step():  # {comment}", f"    if {self._of('is_traced', tracing.is_traced)}(): return False"]
        self._writes: list[str] = []
        self._count = 0

    def load(self, file: SourceFile) -> Inlined:
        """The function that makes the step; its text is added to a file."""
        groups = self._optimizer.param_groups
        names = "".join([f"group{i}, " for i in range(len(groups))])
        self._checks += [f"    with {self._of('optimizer', self._optimizer)}._lock:", "      try:"]
        self._check(f"{names}= optimizer.param_groups")
        for number, group in enumerate(groups):
            self._group(number, group)
        self._checks += ["      except (ValueError, KeyError): return False", "      optimizer._knows_gradients = True"]
        text = "\n".join([*self._checks, *self._writes, "      return True"]) + "\n"
        return load_text("step", text, self._names, file)

    def _of(self, name: str, thing: Any) -> str:
        return self._names.of(name, thing)

    def _check(self, text: str) -> None:
        self._checks.append(f"        {text}")

    def _write(self, text: str) -> None:
        self._writes.append(f"      {text}")

    def _group(self, number: int, group: dict[str, Any]) -> None:
        params = group["params"]
        dtypes = {p._data.dtype for p in params}
        if not params or len(dtypes) != 1 or any([type(p._data) is not np.ndarray or type(p._node) is not AccumulateGrad for p in params]):
            raise _NotKnown
        (dtype,) = dtypes
        places = range(self._count, self._count + len(params))
        self._count += len(params)
        self._check(f"{''.join([f'p{i}, ' for i in places])}= group{number}['params']")
        plain = type(self._optimizer) is SGD and not (group["momentum"] or group["weight_decay"] or group["maximize"])
        tensor, ndarray, kind = self._of("Tensor", TENSOR_CLASS[0]), self._of("ndarray", np.ndarray), self._of(dtype.name, dtype)
        for i, p in zip(places, params, strict=True):
            if p._data.size > (SMALL if plain else PACKED_SIZE) or dtype.kind != "f":
                raise _NotKnown
            self._check(f"n{i}, d{i} = p{i}._node, p{i}._data")
            same = f"p{i} is not {self._of('leaf', p)} or n{i}.__class__ is not {self._of('AccumulateGrad', AccumulateGrad)} or n{i}.is_hidden"
            self._check(f"if {same} or d{i}.__class__ is not {ndarray} or d{i}.dtype is not {kind} or d{i}.size != {p._data.size}: return False")
            self._check(f"g{i} = n{i}.grad")
            self._check(f"if g{i}.__class__ is {tensor}: g{i} = g{i}._data")
            self._check(f"if g{i}.__class__ is not {ndarray}: return False")
        if plain:
            self._plain(number, places, kind)
        else:
            self._packed(number, group, places)

    def _plain(self, number: int, places: range, kind: str) -> None:
        """As `SGD._update` without momentum."""
        self._check(f"if {_has_more(number)}: return False")
        self._check(f"rate{number} = {self._of('array', np.array)}(group{number}['lr'], {kind})")
        for i in places:
            subtract, multiply = self._of("subtract", np.subtract), self._of("multiply", np.multiply)
            self._write(f"{subtract}(d{i}, {multiply}(g{i}, rate{number}), d{i})")
            self._counted(i)

    def _packed(self, number: int, group: dict[str, Any], places: range) -> None:
        """As `Optimizer._update` of parameters that lie in one line."""
        optimizer, params = self._optimizer, group["params"]
        names = optimizer._state_names(group)
        slot = (number, id(params[0]))
        pack = optimizer._packs.get(slot)
        states = [optimizer.state.get(p) for p in params]
        if pack is None or None in states or not pack.holds([(p, None, s) for p, s in zip(params, states, strict=True)], names):
            raise _NotKnown
        if type(optimizer) is SGD:
            self._check(f"if not ({_has_more(number)}): return False")
        self._check(f"if optimizer._packs.get({slot}) is not {self._of('pack', pack)}: return False")
        self._check(f"if optimizer._state_names(group{number}) != {names}: return False")
        counts = "step" in states[0]
        line = self._of("pack", pack)
        for i, state in zip(places, states, strict=True):
            self._check(f"s{i} = optimizer.state[p{i}]")
            for name in names:
                self._check(f"if s{i}[{name!r}] is not {self._of('state', state[name])}: return False")
            if counts:
                self._check(f"if s{i}['step'] != s{places[0]}['step']: return False")
        key = f"s{places[0]}['step']" if counts else "False"
        for i in places:
            if counts:
                self._write(f"s{i}['step'] = int(s{i}['step']) + 1")
            self._counted(i)
        copy = self._of("copyto", np.copyto)
        for i, (place, gradient) in zip(places, pack.places, strict=True):
            self._write(f"{copy}({self._of('place', place)}, d{i}); {copy}({self._of('slope', gradient)}, g{i})")
        self._write(f"optimizer._kernel(group{number}, {key}, {line}.parameter, {line}.gradient, {line}.state)")
        for i, (place, _) in zip(places, pack.places, strict=True):
            self._write(f"{copy}(d{i}, {self._of('place', place)})")

    def _counted(self, i: int) -> None:
        """Count a modification of the parameter."""
        self._write(f"if p{i}._vc is None: p{i}._vc = [1]")
        self._write(f"else: p{i}._vc[0] += 1")


def _has_more(number: int) -> str:
    """The condition that a group of `SGD` is more than a rate."""
    return f"group{number}['momentum'] or group{number}['weight_decay'] or group{number}['maximize']"


def step_of(function: Any, args: tuple[Any, ...]) -> Any:
    """The optimizer of a call of `step` with the gradients of its parameters; None for any other call."""
    return args[0] if function is Optimizer.step and len(args) == 2 and args[1] is None else None
