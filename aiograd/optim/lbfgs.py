"""LBFGS: a quasi-Newton method that remembers a few gradients, with an awaited closure.

Note [All or nothing]
    A step evaluates the closure at several points, so parameters move while it runs. One that fails or is cancelled puts them back to where
    they were, and the state stays as after the last complete step.

Source: Liu and Nocedal, On the limited memory BFGS method (1989); stopping rules and options as in ``torch.optim.LBFGS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.optim.line_search import LinePoint, inner, strong_wolfe
from aiograd.optim.loading import count, saved_array, saved_number
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.inplace import write
from aiograd.tensors.tensor import Tensor

Closure = Callable[[], Any | Awaitable[Any]]
#: curvature below which a pair of steps and gradients is not remembered
_SMALLEST_CURVATURE = 1e-10


class LBFGS(Optimizer):
    """Steps along ``-H @ gradient``, where `H` approximates the inverse Hessian by the last steps. One group of parameters, of one real dtype.

    The vectors are kept and combined on the host.

    Args:
        params: Tensors to update.
        lr: length of a step without a line search, and of the first try with one.
        max_iter: iterations of one `step`.
        max_eval: evaluations of the closure in one `step`; None: ``max_iter * 5 / 4``.
        tolerance_grad: it ends where no element of the gradient is larger.
        tolerance_change: it ends where neither loss nor parameters change by more.
        history_size: how many steps are remembered.
        line_search_fn: None or "strong_wolfe".

    Raises:
        ArgumentError: an option that makes no sense, several groups or dtypes.

    >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ag.optim.LBFGS([p], line_search_fn="strong_wolfe")
    >>> optimizer.param_groups[0]["history_size"]
    100
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
    ) -> None:
        options = {"lr": lr, "max_iter": max_iter, "max_eval": max_iter * 5 // 4 if max_eval is None and isinstance(max_iter, int) else max_eval}
        options |= {"tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change, "history_size": history_size}
        super().__init__(params, {**options, "line_search_fn": line_search_fn})
        dtypes = {p.dtype for p in self.param_groups[0]["params"]}
        if len(self.param_groups) != 1 or len(dtypes) != 1 or dtypes.pop().kind != "f":
            raise ArgumentError("LBFGS: expected one group of parameters of one real floating dtype")

    def _check(self, group: Group) -> None:
        for name in ("lr", "max_iter", "history_size"):
            self._check_option(group, name, lambda value: value > 0, "a number above 0" if name == "lr" else "an int above 0")
        self._check_option(group, "max_eval", lambda value: value > 0, "an int above 0")
        self._check_numbers(group, "tolerance_grad", "tolerance_change")
        if group["line_search_fn"] not in (None, "strong_wolfe"):
            raise ArgumentError(f"LBFGS(line_search_fn={group['line_search_fn']!r}): expected None or 'strong_wolfe'")

    async def step(self, closure: Closure) -> Any:  # type: ignore[override]
        """Up to ``max_iter`` iterations; a step that fails or is cancelled changes nothing, see Note [All or nothing].

        Args:
            closure: ``async def``, or ``def``: clears the gradients, computes the loss, awaits its backward and returns it.

        Returns:
            The loss before the step.

        Raises:
            ArgumentTypeError: no closure, or one that returns no number. Exceptions of the closure pass through.

        >>> p = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> optimizer = ag.optim.LBFGS([p], line_search_fn="strong_wolfe")
        >>> async def closure():
        ...     optimizer.zero_grad()
        ...     loss = ((p - 3) ** 2).sum()
        ...     await loss.backward()
        ...     return loss
        >>> (await optimizer.step(closure)).detach()
        tensor(5.)
        >>> p.detach()
        tensor([3.       , 3.0000002])
        """
        if not callable(closure):
            raise ArgumentTypeError(f"LBFGS.step: expected a closure that computes the loss, found {type(closure).__name__}")
        trace = current_mode().trace
        if trace is not None:
            trace.breaks("it steps LBFGS, whose number of passes depends on values")
        start = await self._position()
        try:
            first, state = await self._iterate(closure, start)
        except BaseException:
            self._go_to(start)
            raise
        self.state[self._params[0]] = state
        return first

    astep = step  # type: ignore[assignment]

    @property
    def _params(self) -> list[Tensor]:
        params: list[Tensor] = self.param_groups[0]["params"]
        return params

    async def _iterate(self, closure: Closure, x: Any) -> tuple[Any, dict[str, Any]]:
        group = self.param_groups[0]
        state = _unpacked(self.state.get(self._params[0], {}))
        first = await _called(closure)
        loss, gradient = _number(first), await self._gradient()
        evaluations = 1
        state["func_evals"] += 1
        if np.abs(gradient).max(initial=0.0) <= group["tolerance_grad"]:
            return first, _packed(state)
        direction, t, iterations = state["d"], state["t"], 0
        while iterations < group["max_iter"]:
            iterations += 1
            state["n_iter"] += 1
            direction = self._direction(state, direction, t, gradient)
            before, state["prev_flat_grad"] = loss, gradient
            t = min(1.0, 1.0 / float(np.abs(gradient).sum())) * group["lr"] if state["n_iter"] == 1 else group["lr"]
            slope = inner(gradient, direction)
            state["prev_loss"] = before
            if slope > -group["tolerance_change"]:
                break
            used = 0
            if group["line_search_fn"] is not None:
                point, used = await self._searched(closure, x, LinePoint(0.0, loss, gradient, slope), direction, t, group["max_eval"] - evaluations)
                loss, gradient, t = point.loss, point.gradient, point.t
                x = x + t * direction
                self._go_to(x)
            else:
                x = x + t * direction
                self._go_to(x)
                if iterations != group["max_iter"]:
                    loss, used = _number(await _called(closure)), 1
                    gradient = await self._gradient()
            evaluations += used
            state["func_evals"] += used
            small = np.abs(gradient).max(initial=0.0) <= group["tolerance_grad"]
            still = np.abs(direction * t).max(initial=0.0) <= group["tolerance_change"] or abs(loss - before) < group["tolerance_change"]
            if small or still or evaluations >= group["max_eval"]:
                break
        state["d"], state["t"] = direction, t
        return first, _packed(state)

    def _direction(self, state: dict[str, Any], last: Any, t: float, gradient: Any) -> Any:
        """The next direction; remembers the last step."""
        if state["n_iter"] == 1:
            state["H_diag"] = 1.0
            return -gradient
        change, moved = gradient - state["prev_flat_grad"], last * t
        curvature = inner(change, moved)
        if curvature > _SMALLEST_CURVATURE:
            if len(state["old_dirs"]) == self.param_groups[0]["history_size"]:
                for name in ("old_dirs", "old_stps", "ro"):
                    state[name].pop(0)
            state["old_dirs"].append(change)
            state["old_stps"].append(moved)
            state["ro"].append(1.0 / curvature)
            state["H_diag"] = curvature / inner(change, change)
        q = -gradient
        shares = []
        for change, moved, ro in zip(reversed(state["old_dirs"]), reversed(state["old_stps"]), reversed(state["ro"]), strict=True):
            shares.append(inner(moved, q) * ro)
            q = q - shares[-1] * change
        q = q * state["H_diag"]
        for change, moved, ro, share in zip(state["old_dirs"], state["old_stps"], state["ro"], reversed(shares), strict=True):
            q = q + moved * (share - inner(change, q) * ro)
        return q

    async def _searched(self, closure: Closure, x: Any, start: LinePoint, direction: Any, t: float, most: int) -> tuple[LinePoint, int]:
        async def evaluate(distance: float) -> LinePoint:
            self._go_to(x + distance * direction)
            loss = _number(await _called(closure))
            gradient = await self._gradient()
            return LinePoint(distance, loss, gradient, inner(gradient, direction))

        change = self.param_groups[0]["tolerance_change"]
        length = float(np.abs(direction).max(initial=0.0))
        return await strong_wolfe(evaluate, start, t, length, tolerance_change=change, max_evaluations=most)

    async def _position(self) -> Any:
        return np.concatenate([(await _on_host(p)).reshape(-1) for p in self._params])

    async def _gradient(self) -> Any:
        parts = []
        for p in self._params:
            grad = np.zeros(p.size, p.dtype) if p.grad is None else await _on_host(p.grad)
            parts.append(grad.reshape(-1).astype(p.dtype, copy=False))
        return np.concatenate(parts)

    def _go_to(self, x: Any) -> None:
        place = 0
        for p in self._params:
            values = make(x[place : place + p.size].reshape(p.shape).astype(p.dtype))
            write(p, values._data if p.device == "cpu" else values.to(p.device)._data)
            place += p.size

    def _loaded(self, what: str, n: Any, name: str, value: Any, p: Tensor) -> Any:
        if name in ("func_evals", "n_iter"):
            return saved_number(what, name, count, value)
        if isinstance(value, (list, tuple)):
            return [self._loaded(what, n, name, each, p) for each in value]
        if not isinstance(value, (Tensor, np.ndarray)) or not value.shape:
            return None if value is None else saved_number(what, name, float, value)
        saved_array(f"{what}: {name}", value, (sum(each.size for each in self._params),), p.dtype)
        return make(np.array(host_array(asarray(value)), p.dtype))

    def _check_state(self, what: str, values: Mapping[str, Any], group: Group) -> None:
        has_begun = values.get("n_iter", 0) > 0
        for name in ("d", "prev_flat_grad"):
            if not isinstance(values.get(name), Tensor) and (has_begun or values.get(name) is not None):
                raise ArgumentError(f"{what}: {name} is {values.get(name)!r:.100} after {values.get('n_iter', 0)} iterations, expected a Tensor")
        for name in ("t", "H_diag"):
            if not isinstance(values.get(name, 1.0), float):
                raise ArgumentError(f"{what}: {name} is {values[name]!r:.100}, expected a number")
        kinds = {"old_dirs": Tensor, "old_stps": Tensor, "ro": float}
        lists = {name: values.get(name, []) for name in kinds}
        if not all(isinstance(found, list) and all(isinstance(each, kinds[name]) for each in found) for name, found in lists.items()):
            raise ArgumentError(f"{what}: expected lists of Tensors as old_dirs and old_stps, and of numbers as ro")
        if len({*map(len, lists.values())}) != 1:
            raise ArgumentError(f"{what}: expected as many {', '.join(lists)}, found {', '.join(str(len(found)) for found in lists.values())}")


async def _called(closure: Closure) -> Any:
    result = closure()
    if inspect.isawaitable(result):
        result = await result
    return await result if isinstance(result, TensorCore) else result


async def _on_host(tensor: Tensor) -> Any:
    return host_array(await tensor.detach().to("cpu"))


def _number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"LBFGS.step: the closure returned a {type(loss).__name__}; it has to return the loss, one number") from None


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """A working copy of the state, with arrays for Tensors."""
    empty: dict[str, Any] = {"func_evals": 0, "n_iter": 0, "d": None, "t": 0.0, "old_dirs": [], "old_stps": [], "ro": [], "H_diag": 1.0}

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        return host_array(value) if isinstance(value, TensorCore) else value

    return {**empty, "prev_flat_grad": None, "prev_loss": None, **{name: plain(value) for name, value in state.items()}}


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        return make(value) if isinstance(value, np.ndarray) else value

    return {name: kept(value) for name, value in state.items()}
