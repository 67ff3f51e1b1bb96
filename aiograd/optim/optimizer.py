"""Optimizer: parameters in groups, the state of each, and the step that updates them in place.

Note [A step]
    A step reads gradients and writes the memory of the parameters, outside of any graph, and counts as a modification: backward through a
    graph that has saved the old values is an error that says so. It is synchronous and takes about as long as reading the parameters
    once or twice; `Optimizer.astep` does the same on the engine's executor, for models so large that the event loop should not wait.

Note [Arrays in a line]
    For small parameters the cost of a step is not arithmetic but calls. So the small ones of a group that stand at the same step are
    copied next to each other, with their gradients and state (which stays there), and updated by one call. Every formula is
    elementwise, so the bits are the same as of separate calls. See `aiograd.optim.packing`.

Rejected: compiling the formulas for each set of shapes; keeping the parameters themselves in one buffer (modules, checkpoints and users
replace and share them as they like).

Source: semantics, defaults and the layout of state dicts are the same as in ``torch.optim``.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from aiograd.array_functions.creation import zeros_like
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError
from aiograd.kernels.pool import KernelBatch
from aiograd.ops.creation import zeros_like as zeros_of
from aiograd.optim.gradients import Gradients, Pair, by_parameter, with_gradients
from aiograd.optim.loading import OPTIONAL, check_entries, count, saved_array, saved_groups, saved_number
from aiograd.optim.packing import PACKED_SIZE, Pack
from aiograd.running import tracing
from aiograd.running.caller import is_awaited
from aiograd.running.devices import UpdatesParameters, device, device_name_of
from aiograd.running.modes import current_mode, tell_compiler
from aiograd.running.offloading import offload
from aiograd.tensors.core import TensorCore, counter_of, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.inplace import write
from aiograd.tensors.tensor import Tensor

Group = dict[str, Any]
Member = tuple[Tensor, Any, dict[str, Any]]


class _Options(dict[str, Any]):
    """A group of parameters with its options; a recording is told when one is set, since a program would not repeat that."""

    __slots__ = ()

    def __setitem__(self, name: str, value: Any) -> None:
        tell_compiler(f"sets the option {name!r} of an optimizer; a schedule's step() is repeated")
        super().__setitem__(name, value)

    def update(self, *args: Any, **options: Any) -> None:
        tell_compiler("sets options of an optimizer; a schedule's step() is repeated")
        super().update(*args, **options)


class Optimizer:
    """Base of optimizers. A subclass defines the state of a parameter and the formula of an update.

    Args:
        params: Tensors to update, or groups: dicts with ``params`` and options that differ from the defaults.
        defaults: options of groups that do not give them.

    Raises:
        ArgumentError: no parameters, one given twice, or one that is no leaf.
        ArgumentTypeError: one Tensor instead of several.

    >>> optimizer = ag.optim.Adam(ag.nn.Linear(3, 1).parameters(), lr=0.1)
    >>> isinstance(optimizer, ag.optim.Optimizer), optimizer.param_groups[0]["lr"]
    (True, 0.1)
    """

    #: True if a step updates each element of a parameter from the same element of its gradient and state, so that parts of parameters can be updated
    is_elementwise: ClassVar[bool] = False
    #: options of a group by name; an optimizer reads them at every step, so they may be changed in between
    param_groups: list[Group]
    #: state of each parameter that has been updated
    state: dict[Tensor, dict[str, Any]]
    #: how often `astep` counts a modification of a parameter before it has written anything
    _counted_ahead: ClassVar[int] = 1
    #: a gradient has arrived, or a warning has been given that none has
    _knows_gradients: bool = False
    #: entries of a parameter's state that are numbers
    _numbers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({"step": count})

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        if isinstance(params, TensorCore):
            raise ArgumentTypeError(f"{type(self).__name__}: expected an iterable of Tensors or groups, found one Tensor: pass [tensor]")
        self.defaults: dict[str, Any] = dict(defaults)
        self.param_groups = []
        self.state = {}
        self._lock = threading.Lock()
        self._packs: dict[Hashable, Pack] = {}
        if not isinstance(params, Iterable):
            raise ArgumentTypeError(f"{type(self).__name__}: expected an iterable of Tensors or groups, found {type(params).__name__}")
        given = list(params)
        if not given:
            raise ArgumentError(f"{type(self).__name__}: got an empty list of parameters")
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Update more parameters, with options of their own.

        Args:
            group: ``params`` (a Tensor or an iterable of them) and options; the defaults serve for all others.

        Raises:
            ArgumentError: a parameter twice, an unknown option, or no parameters.
            ArgumentTypeError: something else than a group of Tensors.
            GraphError: a Tensor that is no leaf.
        """
        if not isinstance(group, Mapping) or "params" not in group:
            raise ArgumentTypeError(f"{type(self).__name__}: a parameter group is a dict with 'params', found {type(group).__name__}")
        params = group["params"]
        params = [params] if isinstance(params, TensorCore) else list(params)
        known = {id(p) for other in self.param_groups for p in other["params"]}
        for p in params:
            if not isinstance(p, TensorCore):
                raise ArgumentTypeError(f"{type(self).__name__}: expected Tensors as parameters, found {type(p).__name__}")
            if not p.is_leaf:
                raise GraphError(f"{type(self).__name__}: can't optimize a non-leaf Tensor of shape {list(p.shape)}: it was made by an operation")
            if id(p) in known:
                raise ArgumentError(f"{type(self).__name__}: a parameter of shape {list(p.shape)} appears twice, in one or several groups")
            known.add(id(p))
        options = {name: value for name, value in group.items() if name != "params"}
        unknown = options.keys() - self.defaults.keys() - {"initial_lr"}
        if unknown:
            raise ArgumentError(f"{type(self).__name__}: unknown options {sorted(unknown)}; expected some of {sorted(self.defaults)}")
        full = _Options({"params": params, **self.defaults, **options})
        self._check(full)
        tell_compiler("adds parameters to an optimizer")
        self.param_groups.append(full)

    def _check(self, group: Group) -> None:
        """Raise where an option makes no sense."""

    def _check_numbers(self, group: Group, *names: str) -> None:
        for name in names:
            self._check_option(group, name, lambda value: value >= 0, "a number of at least 0")

    def _check_betas(self, group: Group) -> None:
        self._check_option(group, "betas", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
        group["betas"] = tuple(group["betas"])

    def _check_option(self, group: Group, name: str, is_right: Callable[[Any], Any], expected: str) -> None:
        try:
            fits = is_right(group[name])
        except TypeError:  # of a type that has no order, or no length
            fits = False
        if not fits:
            raise ArgumentError(f"{type(self).__name__}({name}={group[name]!r}): expected {expected}")

    # ---------------------------------------------------------------- stepping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or fill them with zeros.

        Args:
            set_to_none: False: fill with zeros.
        """
        trace = current_mode().trace
        if trace is not None:
            trace.acts("zero_grad", Optimizer.zero_grad, self, set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                node = p._node
                if set_to_none and node is not None:
                    node.grad = None
                elif p.grad is not None:
                    p.grad = None if set_to_none else zeros_like(p.grad)

    def step(self, gradients: Gradients | None = None) -> None:
        """Update every parameter that has a gradient, in place. The first time that none has one there is a warning.

        Args:
            gradients: gradients in place of the parameters' ``grad``: a mapping by parameter, as a distributed context has it, or one for each
                parameter, in order, as `aiograd.grad` returns them. A parameter without a gradient, or with None, is not updated.

        Raises:
            ArgumentError, ArgumentTypeError: `gradients` do not fit the parameters, or the call is awaited; no parameter has changed.
        """
        if is_awaited():
            raise ArgumentTypeError(
                f"await {type(self).__name__}.step(): this step is not awaited, and has not been taken: leave out `await`, or use "
                "`await optimizer.astep()`. Awaited are the steps of LBFGS, dist.DistributedOptimizer and dist.ZeroRedundancyOptimizer"
            )
        trace = current_mode().trace
        if trace is not None:
            trace.acts("step", Optimizer.step, self, gradients)
            return
        with tracing.span("optimizer step"):
            self._run(self._collected(gradients))

    async def astep(self, gradients: Gradients | None = None) -> None:
        """Take a step as `step` does, on the engine's executor: the event loop stays free while millions of parameters are updated.

        Parameters change while it runs: a forward at the same time may see some old and some new values, and its backward then fails with
        `ModifiedError`. A step that is cancelled before it has begun is not taken; once begun it is carried out to its end, never left half
        done, and the next `step` or `state_dict` waits for that. The gradients are read at the moment of the call.

        Args:
            gradients: as in `step`.

        Raises:
            ArgumentError, ArgumentTypeError: as `step`.

        >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> optimizer = ag.optim.SGD([p], lr=0.1)
        >>> await (p * p).sum().backward()
        >>> await optimizer.astep()
        >>> p.detach()
        tensor([0.8, 1.6])
        """
        trace = current_mode().trace
        if trace is not None:
            await trace.awaits("astep", Optimizer.astep, self, gradients)
            return
        collected = self._collected(gradients)
        for pairs in collected:
            for p, _ in pairs:
                counter_of(p)[0] += 1  # on this thread and before anything is written: a backward pass that reads it meanwhile notices
        withdrawn: list[bool] = []
        try:
            await offload(self._run, collected, withdrawn)
        except BaseException:
            withdrawn.append(True)
            raise

    def _collected(self, gradients: Gradients | None) -> list[list[Pair]]:
        if gradients is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            gradients = by_parameter(f"{type(self).__name__}.step(gradients)", gradients, params)
        collected = [with_gradients(group["params"], gradients) for group in self.param_groups]
        if gradients is None and not self._knows_gradients:
            self._knows_gradients = True
            if not any(collected):
                warnings.warn(
                    f"{type(self).__name__}: a step without any gradient: no parameter has one, and none has had one before, so nothing is updated. "
                    "Was `await loss.backward()` forgotten, or its `await`, or were the gradients not given to step(gradients)?",
                    UserWarning,
                    stacklevel=3,
                )
        return collected

    def _run(self, collected: list[list[Pair]], withdrawn: Sequence[bool] = ()) -> None:
        with self._lock:
            if withdrawn:
                return
            for index, pairs in enumerate(collected):
                self._update(index, self.param_groups[index], pairs)

    def _update(self, index: int, group: Group, pairs: list[Pair]) -> None:
        """Update the parameters of one group."""
        names = self._state_names(group)
        packable: dict[tuple[Any, Hashable], list[Member]] = {}
        elsewhere: dict[tuple[str, Any, Hashable], list[Member]] = {}
        batch = KernelBatch()
        try:
            for p, grad in pairs:
                state = self.state.setdefault(p, {})
                first = {name: make(self._initial(name, p._data, group)) for name in names if name not in state}  # there may be no memory
                key = self._begin(p, state, group)
                if first:
                    state.update(first)
                data = p._data
                if data.__class__ is not np.ndarray:
                    elsewhere.setdefault((device_name_of(data), data.dtype, key), []).append((p, grad, state))
                elif data.size <= PACKED_SIZE and data.dtype.kind == "f":
                    packable.setdefault((data.dtype, key), []).append((p, grad, state))
                else:
                    self._update_here(p, grad, group, key, state, names, batch)
                counter_of(p)[0] += 1
        finally:  # a parameter with a counted step is updated
            batch.run()
            for (name, _, key), members in elsewhere.items():
                self._update_on_device(name, members, group, key, names)
            for (_, key), members in packable.items():
                if len(members) == 1:
                    self._update_here(*members[0][:2], group, key, members[0][2], names)
                    continue
                slot = (index, id(members[0][0]))
                pack = self._packs.get(slot)
                if pack is None or not pack.holds(members, names):
                    pack = self._packs[slot] = Pack(members, names)
                pack.load(members)
                self._kernel(group, key, pack.parameter, pack.gradient, pack.state)
                pack.unload()

    def _update_here(
        self, p: Tensor, grad: Any, group: Group, key: Any, state: dict[str, Any], names: tuple[str, ...], batch: KernelBatch | None = None
    ) -> None:
        """Update one parameter on the host."""
        data = p._data
        work = data if data.flags.c_contiguous and data.flags.aligned else np.array(data, order="C")
        arrays = [work, np.ascontiguousarray(grad), *(state[name]._data for name in names)]
        if data.dtype.kind == "c":  # a complex number is two real ones
            real = np.zeros((), data.dtype).real.dtype
            arrays = [array.reshape(-1).view(real) for array in arrays]
        # arrays that may share memory are updated one after the other
        self._kernel(group, key, arrays[0], arrays[1], arrays[2:], batch if work is data and data.flags.owndata else None)
        if work is not data:
            data[...] = work

    def _update_on_device(self, name: str, members: list[Member], group: Group, key: Any, names: tuple[str, ...]) -> None:
        """Update parameters of one device: all at once where it has kernels for that, else with arithmetic that it does, one by one."""
        there, rule = device(name), self._rule(group, key)
        if rule is not None and isinstance(there, UpdatesParameters):
            kind, options = rule
            if there.update_parameters(kind, [(p._data, grad, [state[n]._data for n in names]) for p, grad, state in members], options):
                return
        for p, grad, state in members:
            value, *rest = self._formula(group, key, p._data, grad, [state[n]._data for n in names])
            p._data[...] = value
            for n, array in zip(names, rest, strict=True):
                write(state[n], array)

    # ---------------------------------------------------------------- what subclasses say

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """Names of the arrays in a parameter's state."""
        raise NotImplementedError

    def _initial(self, name: str, parameter: Any, group: Group) -> Any:
        """The first value of an array of the state."""
        return zeros_of(parameter)

    def _begin(self, p: Tensor, state: dict[str, Any], group: Group) -> Hashable:
        """Count the step in the state; returns the numbers of it that the formula needs, by default the count."""
        state["step"] = step = int(state.get("step", 0)) + 1
        return step

    def _kernel(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any], batch: KernelBatch | None = None) -> None:
        """Update host arrays in place, when the batch is run where there is one."""
        raise NotImplementedError

    def _rule(self, group: Group, key: Any) -> tuple[str, Mapping[str, Any]] | None:
        """The update as `aiograd.running.devices.UpdatesParameters` takes it; None where it knows no such update."""
        return None

    def _formula(self, group: Group, key: Any, parameter: Any, gradient: Any, state: list[Any]) -> tuple[Any, ...]:
        """New values of the parameter and of its state, computed with operators that every kind of array has."""
        raise NotImplementedError

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """State and options: ``state`` by number of the parameter, ``param_groups`` with these numbers as ``params``.

        The arrays share the optimizer's memory.

        Returns:
            A dict for `load_state_dict`.
        """
        with self._lock:
            number: dict[int, int] = {}
            groups = []
            for group in self.param_groups:
                for p in group["params"]:
                    number[id(p)] = len(number)
                groups.append({**group, "params": [number[id(p)] for p in group["params"]]})
            state = {
                number[id(p)]: {name: value.detach() if isinstance(value, TensorCore) else value for name, value in values.items()}
                for p, values in self.state.items()
            }
            return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; values are copied, to the dtype and device of each parameter.

        Args:
            state_dict: the state.

        Raises:
            ArgumentError: groups, parameters, options, shapes or dtypes do not fit, or a part is missing; nothing has changed.
        """
        what = f"{type(self).__name__}.load_state_dict"
        groups, by_number = saved_groups(what, self.param_groups, state_dict, self.defaults)
        for group in groups:
            self._check(group)
        group_of = {id(p): group for group in groups for p in group["params"]}
        state: dict[Tensor, dict[str, Any]] = {}
        for n, values in state_dict["state"].items():
            if n not in by_number:
                raise ArgumentError(f"{what}: there is state for parameter {n!r}, which is in no group")
            p = by_number[n]
            state[p] = {name: self._loaded(what, n, name, value, p) for name, value in values.items() if value is not None or name not in OPTIONAL}
            self._check_state(f"{what}: the state of parameter {n}", state[p], group_of[id(p)])
        with self._lock:
            self.state = state
            self._packs = {}
            for mine, group in zip(self.param_groups, groups, strict=True):
                mine.clear()
                mine.update(group)

    def _loaded(self, what: str, n: Any, name: str, value: Any, p: Tensor) -> Any:
        """A value of a saved state as this optimizer keeps it."""
        if name in self._numbers:
            return saved_number(f"{what}: the state of parameter {n}", name, self._numbers[name], value)  # a Tensor elsewhere
        if not isinstance(value, (TensorCore, np.ndarray)):
            return value
        saved_array(f"{what}: {name} of parameter {n}", value, p.shape, p.dtype)
        array = np.array(asarray(value).detach().cpu().numpy(), dtype=p.dtype, order="C")
        return make(array) if p.device == "cpu" else make(array).to(p.device)

    def _check_state(self, what: str, values: Mapping[str, Any], group: Group) -> None:
        """Raise unless the state of a parameter, of `_loaded` values, has what a step reads."""
        check_entries(what, values, self._numbers, self._state_names(group))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_packs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _packs={})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.param_groups):
            options = ", ".join(f"{name}={value}" for name, value in group.items() if name != "params")
            lines.append(f"  group {i}: {len(group['params'])} parameters, {options}")
        return f"{type(self).__name__}(\n" + "\n".join(lines) + "\n)"
