"""Steps of optimizers inside of compiled steps: statements of numpy calls in the place of a call of `Optimizer.step`.

Note [An inlined step]
    The text repeats the optimizer's work for its parameters: the same calls, of the same arrays, in the same order. So the bits
    are the same, and where one of them raises the same has happened. Options are read at every run. Before anything is written it looks if all is
    as it was when the text was made: the same groups of the same parameters, each with a gradient, the state where it was. Where that is not so,
    where the step is traced, and for optimizers and sizes of parameters that are not known here, `Optimizer.step` is called.

Note [Native updates]
    The calls that write become a native function by the tiers of programs. It writes all, or nothing where an array is otherwise than
    expected or a floating point error is to be told; the calls of numpy follow then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.native.build import load_native, native_text
from aiograd.compiler.native.tiers import HOT, NativeReport, Timed, compiler, is_simulated, native_problem, note_failure
from aiograd.compiler.native.update_rules import AdamRule, MomentumRule, PlainRule, update_code
from aiograd.compiler.source import Names, SourceFile, load_text
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.kernels.selection import THRESHOLD
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


class NativeUpdate:
    """A native function that updates the parameters of one group, once it is there.

    Args:
        rule: see `aiograd.compiler.native.update_rules`.
        dtype: of the arrays.
        shapes: of the parameters.
        tier: see `aiograd.compiler.native.tiers`.
    """

    def __init__(self, rule: Any, dtype: np.dtype[Any], shapes: list[Any], tier: str) -> None:
        self._rule, self._dtype, self._shapes = rule, dtype, shapes
        self._function: Callable[..., Any] | None = None
        self.report = NativeReport()
        #: calls until the function is asked for; below 0: it has been
        self._left = -1 if tier == "numpy" else HOT
        if tier == "native" and native_problem() is None:
            self._left = -1
            self._make()

    @property
    def is_native(self) -> bool:
        """True once the function is there."""
        return self._function is not None

    def numbers(self, group: dict[str, Any], key: Any) -> Any:
        """The numbers of a step; None: it is not to be native."""
        return None if self._function is None and self._left < 0 else self._rule.numbers(group, key, self._dtype)

    def __call__(self, numbers: Any, *arrays: Any) -> bool:
        """Update the parameters; False: nothing has been done.

        Args:
            numbers: of the rule.
            *arrays: of each parameter the array and its gradient, then the lines of state.
        """
        function = self._function
        if function is None:
            self._left -= 1
            if self._left == 0 and not is_simulated():
                compiler.submit(self._make)
            return False
        if numbers is None:
            return False
        owners = [array if array.base is None else array.base for array in arrays]  # each owns memory of its own, or the function refuses
        return len({*map(id, owners)}) == len(owners) and function(numbers, *arrays) is None

    def _make(self) -> None:
        if native_problem() is not None:
            return
        try:
            with Timed(self.report), np.errstate(all="ignore"):
                code, updates = update_code(self._rule, self._dtype, self._shapes)
                text = native_text(code, updates=updates)
                function = load_native(text, _refused)
        except Exception as error:
            note_failure(self.report, "step", error)
            return
        self.report.parts.texts.append(text)
        self._function = function


def _refused(*_: Any) -> bool:
    """Stands where a native function calls numpy's: nothing has been done."""
    return False


def inlined_step(optimizer: Any, comment: str, file: SourceFile, tier: str, updates: list[NativeUpdate]) -> Inlined | None:
    """A function that does what ``optimizer.step()`` does; None where there is none. See the module's Note.

    Args:
        optimizer: the optimizer that has taken a step.
        comment: the user's line.
        file: the file that its text is added to.
        tier: of the program.
        updates: receives the native functions in it.
    """
    if type(optimizer) not in (SGD, Adam, AdamW) or sum(len(group["params"]) for group in optimizer.param_groups) > MOST:
        return None
    try:
        text = _Text(optimizer, comment, tier)
        step = text.load(file)
        updates += text.updates
        return step
    except _NotKnown:
        return None


class _Text:
    """The text of one step: first the lines that may refuse, then the lines that write."""

    def __init__(self, optimizer: Any, comment: str, tier: str) -> None:
        self._optimizer = optimizer
        self._tier = tier
        self.updates: list[NativeUpdate] = []
        self._names = Names()
        self._checks = [f"def step():  # {comment}", f"    if {self._of('is_traced', tracing.is_traced)}(): return False"]
        self._writes: list[str] = []
        self._depth = 0
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
        self._writes.append(f"{'    ' * self._depth}      {text}")

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
            self._plain(number, group, places, kind)
        else:
            self._packed(number, group, places)

    def _native(self, params: list[Any], rule: Any) -> str:
        """The name of the native function for a group; empty if it can have none."""
        arrays = [p._data for p in params]
        flags = [array.flags for array in arrays]
        dtype, size = arrays[0].dtype, sum([array.size for array in arrays])
        if not size or size >= THRESHOLD or dtype.itemsize < 4 or not all([each.owndata and each.c_contiguous for each in flags]):
            return ""  # from `THRESHOLD` on kernels may have other bits
        self.updates.append(NativeUpdate(rule, dtype, [array.shape for array in arrays], self._tier))
        return self._of("native", self.updates[-1])

    def _plain(self, number: int, group: dict[str, Any], places: range, kind: str) -> None:
        """As `SGD._update` without momentum."""
        self._check(f"if {_has_more(number)}: return False")
        self._check(f"rate{number} = {self._of('array', np.array)}(group{number}['lr'], {kind})")
        native = self._native(group["params"], PlainRule())
        if native:
            self._write(f"if {native}(rate{number}, {_pairs(places)}):")
            self._inside(lambda: self._count_all(places))
            self._write("else:")
        self._inside(lambda: self._plain_calls(number, places), deep=bool(native))

    def _plain_calls(self, number: int, places: range) -> None:
        for i in places:
            subtract, multiply = self._of("subtract", np.subtract), self._of("multiply", np.multiply)
            self._write(f"{subtract}(d{i}, {multiply}(g{i}, rate{number}), d{i})")
            self._counted(i)

    def _inside(self, write: Callable[[], Any], *, deep: bool = True) -> None:
        """Write lines that belong to the one before."""
        self._depth += deep
        write()
        self._depth -= deep

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
        sums = type(optimizer) is SGD
        rule = MomentumRule(group, len(names)) if sums else AdamRule(group, len(names), decoupled=type(optimizer) is AdamW)
        native = self._native(params, rule)
        if native:
            self._write(f"if not {native}({native}.numbers(group{number}, {key}), {_pairs(places)}, *{line}.state):")
        self._inside(lambda: self._packed_calls(number, places, pack, line, key), deep=bool(native))

    def _packed_calls(self, number: int, places: range, pack: Any, line: str, key: str) -> None:
        copy = self._of("copyto", np.copyto)
        for i, (place, gradient) in zip(places, pack.places, strict=True):
            self._write(f"{copy}({self._of('place', place)}, d{i}); {copy}({self._of('slope', gradient)}, g{i})")
        self._write(f"optimizer._kernel(group{number}, {key}, {line}.parameter, {line}.gradient, {line}.state)")
        for i, (place, _) in zip(places, pack.places, strict=True):
            self._write(f"{copy}(d{i}, {self._of('place', place)})")

    def _count_all(self, places: range) -> None:
        for i in places:
            self._counted(i)

    def _counted(self, i: int) -> None:
        """Count a modification of the parameter."""
        self._write(f"if p{i}._vc is None: p{i}._vc = [1]")
        self._write(f"else: p{i}._vc[0] += 1")


def _pairs(places: range) -> str:
    """The arrays of parameters, each with its gradient."""
    return ", ".join([f"d{i}, g{i}" for i in places])


def _has_more(number: int) -> str:
    """The condition that a group of `SGD` is more than a rate."""
    return f"group{number}['momentum'] or group{number}['weight_decay'] or group{number}['maximize']"


def step_of(function: Any, args: tuple[Any, ...]) -> Any:
    """The optimizer of a call of `step` with the gradients of its parameters; None for any other call."""
    return args[0] if function is Optimizer.step and len(args) == 2 and args[1] is None else None
