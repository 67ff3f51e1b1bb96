"""`gradcheck`: compare the gradients of backward with finite differences.

The module is not called ``gradcheck`` because the package exports the function under this name.

Note [One real Jacobian]
    A complex number is treated as the pair of its parts, for inputs and outputs alike, so there is one Jacobian of reals and one comparison for
    all dtypes. The analytic one has a row per real part of an output: a backward pass seeded with 1, and for complex outputs another seeded
    with 1j. That is right for functions that are not holomorphic too, under the convention that the gradient of a real loss L with
    respect to z = x + iy is ∂L/∂x + i ∂L/∂y. The numeric one has a column per real part of an input, by central differences.

Note [Further checks]
    Forward and backward are run twice and must agree up to `nondet_tol`. Where a function has several outputs, each in turn is left out of the
    loss, and then all but one, so that backward gets None for them: the gradients must be those for a gradient of zeros. And if backward gets
    None for all outputs, the inputs must get no gradient, or zeros.

Source: PyTorch ``autograd/gradcheck.py``, with the same parameters; comparing None with zeros and not only looking for non-zeros is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, GradcheckError
from aiograd.functional.derivatives import call, jvp
from aiograd.functional.function import Function
from aiograd.ops import ROWS
from aiograd.running.caller import warn_caller
from aiograd.running.modes import enable_grad
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.passes import grad

Fn = Callable[..., Any]
Matrix = np.ndarray[Any, Any]

#: the number of the worst elements that a message shows
SHOWN = 5


async def gradcheck(
    fn: Fn,
    inputs: Any,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_forward_ad: bool = False,
    raise_exception: bool = True,
) -> bool:
    """True if the gradients of `fn` agree with central differences: ``|analytic - numeric| <= atol + rtol * |numeric|`` everywhere.

    Cancelling stops it. No ``grad`` is changed, and the inputs are not modified.

    Args:
        fn: function of the inputs that returns a Tensor or a tuple of them; ``def`` or ``async def``. Integer and boolean outputs beside
            floating ones are ignored.
        inputs: a Tensor or a tuple of anything `fn` takes. Tensors that require grad are checked; they should be float64 or complex128.
        eps: step of the differences.
        atol, rtol: see above.
        nondet_tol: the largest absolute difference between two runs.
        check_undefined_grad: check outputs with None for a gradient; see Note [Further checks].
        check_forward_ad: compare forward mode (`jvp`) with the differences too, one run per element of the inputs.
        raise_exception: raise instead of returning False.

    Returns:
        True if the check passed; False, with ``raise_exception=False``, if not.

    Raises:
        GradcheckError: it failed; names output and input and shows the worst elements. ArgumentError: nothing to check.

    >>> x = ag.tensor([1.0, 2.0], dtype=np.float64, requires_grad=True)
    >>> await ag.gradcheck(ag.sin, (x,))
    True
    """
    try:
        with enable_grad():
            await _check(_Checked("gradcheck", fn, inputs), eps, atol, rtol, nondet_tol, check_undefined_grad, check_forward_ad)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


async def gradgradcheck(
    fn: Fn,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    raise_exception: bool = True,
    seed: int = 0,
) -> bool:
    """True if the gradients of `fn` can themselves be differentiated: `gradcheck` of them, as a function of inputs and output gradients.

    Cancelling stops it.

    Args:
        fn, inputs: as for `gradcheck`.
        grad_outputs: gradient per output that requires grad (in order), of its shape; drawn from `seed` if None.
        eps, atol, rtol, nondet_tol, check_undefined_grad, raise_exception: as for `gradcheck`.
        seed: seed of the gradients that are drawn.

    Returns:
        True, or False where `raise_exception` is False and a gradient is wrong.

    Raises:
        GradcheckError: it failed. Inputs are numbered as the inputs of `fn`, with the output gradients after them.
        ArgumentError: as of `gradcheck`.

    >>> x = ag.tensor([1.0, 2.0], dtype=np.float64, requires_grad=True)
    >>> await ag.gradgradcheck(ag.sin, (x,))
    True
    """
    checked = _Checked("gradgradcheck", fn, inputs)
    with enable_grad():
        outputs = _differentiable(await checked.outputs())
        if not outputs:
            raise ArgumentError("gradgradcheck: no output of fn requires grad")
        if grad_outputs is None:
            rng = np.random.default_rng(seed)
            seeds = [make(_normal(rng, output)) for output in outputs]
        else:
            seeds = [given.detach() for given in (grad_outputs if isinstance(grad_outputs, (tuple, list)) else (grad_outputs,))]
        if len(seeds) != len(outputs):
            raise ArgumentError(f"gradgradcheck: got {len(seeds)} grad_outputs; {len(outputs)} outputs of fn require grad")
    for seed_tensor in seeds:
        seed_tensor.requires_grad_()
    count = len(checked.inputs)

    async def gradients(*args: Any) -> tuple[Any, ...]:
        made, _ = await call(fn, args[:count], "gradgradcheck", beside=True)
        wanted = [args[i] for i in checked.wanted]
        found = await grad(_differentiable(made), wanted, args[count:], create_graph=True, allow_unused=True)
        return tuple(make(np.zeros_like(tensor._data)) if gradient is None else gradient for tensor, gradient in zip(wanted, found, strict=True))

    try:
        with enable_grad():
            await _check(_Checked("gradgradcheck", gradients, (*checked.inputs, *seeds)), eps, atol, rtol, nondet_tol, check_undefined_grad)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


class _Checked:
    """A function and its inputs, some of which are varied."""

    def __init__(self, what: str, fn: Fn, inputs: Any) -> None:
        self.what = what
        self.fn = fn
        self.inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        #: numbers of the inputs that are checked
        self.wanted = [i for i, tensor in enumerate(self.inputs) if isinstance(tensor, TensorCore) and tensor.requires_grad]
        if not self.wanted:
            raise ArgumentError(f"{what}: expected at least one input Tensor that requires grad")
        for i in self.wanted:
            if self.inputs[i].dtype not in (np.float64, np.complex128):
                warn_caller(
                    f"{what}: input {i} requires grad and is {self.inputs[i].dtype}, not double precision: the check will likely fail. "
                    "Cast it with .double(), or choose a larger eps and tolerances."
                )
        #: the values around which the inputs are varied, on the host
        self.values = {i: np.array(host_array(self.inputs[i]), order="C") for i in self.wanted}

    def leaves(self, varied: int = -1, array: Matrix | None = None) -> list[Any]:
        """Fresh inputs: a new leaf for each that is checked; input `varied` gets the values of `array`."""
        return [
            self._leaf(i, array if i == varied and array is not None else self.values[i]) if i in self.values else tensor
            for i, tensor in enumerate(self.inputs)
        ]

    def _leaf(self, i: int, array: Matrix) -> Any:
        leaf = make(array.copy(), cls=type(self.inputs[i].detach()))  # a Parameter may be more than its data
        if self.inputs[i].device != "cpu":
            leaf = leaf.to(self.inputs[i].device)
        return leaf.requires_grad_()

    async def outputs(self, leaves: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The outputs of the function."""
        return (await call(self.fn, self.leaves() if leaves is None else leaves, self.what, beside=True))[0]


async def _check(
    checked: _Checked, eps: float, atol: float, rtol: float, nondet_tol: float, check_undefined_grad: bool, check_forward_ad: bool = False
) -> None:
    leaves = checked.leaves()
    every = await checked.outputs(leaves)
    numbers = [o for o, output in enumerate(every) if output.requires_grad]
    outputs = [every[o] for o in numbers]
    values = [_varying(output) for output in every]
    numeric = await _numeric(checked, values, eps)
    if check_forward_ad:
        for i in checked.wanted:
            for o, block in (await _by_forward_mode(checked, i, every)).items():
                _compare(checked.what, o, i, block, numeric[o][i], atol, rtol, mode="forward")
    if not outputs:
        for o, blocks in enumerate(numeric):
            for i, block in blocks.items():
                _compare(checked.what, o, i, np.zeros_like(block), block, atol, rtol, "No output of fn requires grad, yet they vary with the input. ")
        return
    await _check_repeatable(checked, values, numbers, outputs, leaves, nondet_tol)
    for k, o in enumerate(numbers):
        analytic = await _analytic(outputs, k, [leaves[i] for i in checked.wanted])
        for i, block in zip(checked.wanted, analytic, strict=True):
            _compare(checked.what, o, i, block, numeric[o][i], atol, rtol)
    if check_undefined_grad:
        try:
            await _check_undefined(checked, numbers, outputs, leaves, numeric, atol, rtol)
        except Exception as error:
            if isinstance(error, GradcheckError):
                raise
            raise GradcheckError(
                f"{checked.what}: backward fails where an output gets no gradient, with {type(error).__name__}: {error}. A None among the output "
                "gradients of backward stands for zeros; ctx.set_materialize_grads(True) makes it zeros."
            ) from error


# -------------------------------------------------------------------- the two Jacobians


async def _numeric(checked: _Checked, values: list[Matrix], eps: float) -> list[dict[int, Matrix]]:
    """Per output and varied input: the real Jacobian by central differences, rows of outputs and columns of inputs."""
    jacobians = [{i: np.zeros((value.size, _real(array).size)) for i, array in checked.values.items()} for value in values]
    for i, array in checked.values.items():
        for column in range(_real(array).size):
            ends: list[list[Matrix]] = []
            for step in (eps, -eps):
                moved = array.copy()
                _real(moved)[column] += step
                made = await checked.outputs(checked.leaves(i, moved))
                ends.append([_varying(output) for output in made])
            for o, (above, below) in enumerate(zip(*ends, strict=True)):
                if above.size != values[o].size:
                    raise GradcheckError(f"{checked.what}: the shape of output {o} depends on the values of input {i}")
                jacobians[o][i][:, column] = (above - below) / (2 * eps)
    return jacobians


async def _analytic(outputs: Sequence[Any], k: int, leaves: Sequence[Any]) -> list[Matrix]:
    """The real Jacobian of output `k` by backward, per input; the other outputs get zeros."""
    size = outputs[k].size
    directions = (1, 1j) if outputs[k].dtype.kind == "c" else (1,)
    blocks = [np.zeros((size * len(directions), _real(host_array(leaf)).size)) for leaf in leaves]
    for position in range(size):
        for part, direction in enumerate(directions):
            seeds = [_seed(output, position if number == k else None, direction) for number, output in enumerate(outputs)]
            gradients = await grad(outputs, leaves, seeds, retain_graph=True, allow_unused=True)
            for block, gradient in zip(blocks, gradients, strict=True):
                if gradient is not None:
                    block[position * len(directions) + part] = _real(host_array(gradient))
    return blocks


async def _by_forward_mode(checked: _Checked, i: int, outputs: Sequence[Any]) -> dict[int, Matrix]:
    """The real Jacobians by input `i`, per floating output: a run in forward mode for every real part of the input."""
    array = checked.values[i]
    numbers = [o for o, output in enumerate(outputs) if output.dtype.kind in "fc"]
    blocks = {o: np.zeros((_varying(outputs[o]).size, _real(array).size)) for o in numbers}
    is_complex = array.dtype.kind == "c"

    async def of_parts(*parts: Any) -> tuple[Any, ...]:
        leaves = [leaf.detach() if isinstance(leaf, TensorCore) else leaf for leaf in checked.leaves()]
        leaves[i] = ROWS["complex"](*parts) if is_complex else parts[0]
        made = await checked.outputs(leaves)
        return tuple([part for o in numbers for part in ((np.real(made[o]), np.imag(made[o])) if outputs[o].dtype.kind == "c" else (made[o],))])

    like = checked.leaves()[i]
    parts = [_like(np.ascontiguousarray(part), like) for part in ((array.real, array.imag) if is_complex else (array,))]
    for column in range(_real(array).size):
        position, of = divmod(column, len(parts))
        tangents = [_seed(part, position if k == of else None, 1) for k, part in enumerate(parts)]
        found = iter((await jvp(of_parts, tuple(parts), tuple(tangents)))[1])
        for o in numbers:
            rows = [host_array(next(found)).reshape(-1) for _ in range(1 + (outputs[o].dtype.kind == "c"))]
            blocks[o][:, column] = np.stack(rows, -1).reshape(-1)
    return blocks


def _seed(output: Any, position: int | None, direction: complex) -> Any:
    """Zeros, with `direction` at a flat position."""
    host = np.zeros(output.shape, output.dtype)
    if position is not None:
        host.reshape(-1)[position] = direction
    return _like(host, output)


def _like(host: Matrix, tensor: Any) -> Any:
    """A Tensor of a host array on the device of `tensor`."""
    return make(host) if tensor.device == "cpu" else make(host).to(tensor.device)


def _real(array: Matrix) -> Matrix:
    """The flat real parts, a view of a contiguous array; a complex number is two of them."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _varying(output: Any) -> Matrix:
    """The elements of an output that may vary with the inputs: none of integers, which have no derivative."""
    return _real(host_array(output)) if output.dtype.kind in "fc" else np.zeros(0)


def _normal(rng: np.random.Generator, output: Any) -> Matrix:
    drawn = rng.standard_normal(output.shape)
    return np.asarray(drawn + 1j * rng.standard_normal(output.shape) if output.dtype.kind == "c" else drawn, dtype=output.dtype)


def _differentiable(outputs: Sequence[Any]) -> list[Any]:
    return [output for output in outputs if output.requires_grad]


# -------------------------------------------------------------------- comparisons


def _compare(
    what: str, o: int, i: int, analytic: Matrix, numeric: Matrix, atol: float, rtol: float, remark: str = "", mode: str = "backward"
) -> None:
    """Raise where two Jacobians differ, of which `mode` gave the analytic one."""
    with np.errstate(invalid="ignore"):
        excess = np.abs(analytic - numeric) - (atol + rtol * np.abs(numeric))
    wrong = ~((excess <= 0) | (np.isnan(analytic) & np.isnan(numeric)))
    if not wrong.any():
        return
    ranked = np.where(np.isnan(excess), np.inf, np.where(wrong, excess, -np.inf)).reshape(-1)
    order = np.argsort(-ranked, kind="stable")[: min(SHOWN, int(wrong.sum()))]
    shown = "\n".join(
        f"  [{row}, {column}]  numerical {numeric[row, column]: .8g}   analytical {analytic[row, column]: .8g}"
        for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True)
    )
    in_mode, rule = ("", "backward") if mode == "backward" else (" in forward mode", "jvp")
    raise GradcheckError(
        f"{what}: Jacobian mismatch for output {o} with respect to input {i}{in_mode}. {remark}{int(wrong.sum())} of {wrong.size} elements differ by "
        f"more than {atol:g} + {rtol:g} * |numerical|; the worst, at [flat index of the output, of the input] (complex numbers count as two):\n"
        f"{shown}\nLook at the {rule} of this input; near kinks and poles, or with cancellation, try other inputs or another eps."
    )


async def _check_repeatable(
    checked: _Checked, values: list[Matrix], numbers: list[int], outputs: list[Any], leaves: list[Any], nondet_tol: float
) -> None:
    """Check that a second forward and backward, with random output gradients, agree with the first."""
    again_leaves = checked.leaves()
    again = await checked.outputs(again_leaves)
    for o, (first, second) in enumerate(zip(values, again, strict=True)):
        difference = _difference(first, _varying(second))
        if not difference <= nondet_tol:
            raise GradcheckError(
                f"{checked.what}: fn is not deterministic: two runs on the same inputs gave values of output {o} that differ by up to "
                f"{difference:.3g}; nondet_tol is {nondet_tol:g}. Fix the source of randomness (seed a Generator inside fn)."
            )
    rng = np.random.default_rng(0)
    seeds = [_like(_normal(rng, output), output) for output in outputs]
    wanted = checked.wanted
    base = await grad(outputs, [leaves[i] for i in wanted], seeds, retain_graph=True, allow_unused=True)
    runs = (
        ("twice on one graph", await grad(outputs, [leaves[i] for i in wanted], seeds, retain_graph=True, allow_unused=True)),
        ("on a second graph", await grad([again[o] for o in numbers], [again_leaves[i] for i in wanted], seeds, allow_unused=True)),
    )
    for how, run in runs:
        for i, first, second in zip(wanted, base, run, strict=True):
            difference = _difference(_dense(first, checked.values[i]), _dense(second, checked.values[i]))
            if not difference <= nondet_tol:
                raise GradcheckError(
                    f"{checked.what}: backward is not deterministic: run {how} with the same output gradients it gave gradients of input {i} that "
                    f"differ by up to {difference:.3g}; nondet_tol is {nondet_tol:g}."
                )


async def _check_undefined(
    checked: _Checked, numbers: list[int], outputs: list[Any], leaves: list[Any], numeric: list[dict[int, Matrix]], atol: float, rtol: float
) -> None:
    """Check backward with None instead of the gradient of each output in turn, of all but one, and of all."""
    wanted = checked.wanted
    targets = [leaves[i] for i in wanted]
    rng = np.random.default_rng(1)
    seeds = [_normal(rng, output) for output in outputs]
    every = range(len(outputs))
    choices = [[k for k in every if k != missing] for missing in every] if len(outputs) > 1 else []
    for kept in (*choices, *([k] for k in every if len(outputs) > 2)):
        missing = ", ".join(str(numbers[k]) for k in every if k not in kept)
        found = await grad([outputs[k] for k in kept], targets, [_like(seeds[k], outputs[k]) for k in kept], retain_graph=True, allow_unused=True)
        for i, gradient in zip(wanted, found, strict=True):
            expected = np.sum([_real(seeds[k]) @ numeric[numbers[k]][i] for k in kept], axis=0)
            scale = np.sum([np.abs(_real(seeds[k])) @ np.ones_like(numeric[numbers[k]][i]) for k in kept], axis=0)
            analytic = _dense(gradient, checked.values[i])
            difference = np.abs(analytic - expected) - (atol * (1 + scale) + rtol * np.abs(expected))
            if not np.all(difference <= 0):
                worst = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
                raise GradcheckError(
                    f"{checked.what}: wrong gradient of input {i} where output {missing} gets none: at flat index {worst} it is "
                    f"{analytic[worst]:.8g}, numerically {expected[worst]:.8g}. A None among the output gradients of backward stands for zeros."
                )
    stopped = [_Undefined.apply(output) for output in outputs]
    ones = [_like(np.ones(output.shape, output.dtype), output) for output in outputs]
    found = await grad(stopped, targets, ones, retain_graph=True, allow_unused=True)
    for i, gradient in zip(wanted, found, strict=True):
        if gradient is not None and np.any(host_array(gradient)):
            raise GradcheckError(
                f"{checked.what}: input {i} gets a gradient other than zero where no output has one. A None among the output gradients of backward "
                "stands for zeros: return None or zeros for it."
            )


class _Undefined(Function):
    """The identity; its backward returns None."""

    inline = True

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """`x`."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Any) -> None:
        """None."""
        return None


def _dense(gradient: Any, like: Matrix) -> Matrix:
    return np.zeros(_real(like).size) if gradient is None else _real(host_array(gradient))


def _difference(a: Matrix, b: Matrix) -> float:
    """The largest difference, of arrays of one size; infinite if they have not."""
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
