"""The node between an answer and the residual that it makes zero.

Note [One node]
    At an answer x with r(x, a) = 0 the derivative of x by a is ``-J^-1 dr/da``, with ``J = dr/dx``. The residual is recorded once, at x as a value of
    its own, and `ImplicitSolve` gets the residual as its argument: in backward it turns g into ``-u`` with ``J^T u = g``, and the pass carries that
    on through the graph of the residual, to all that the residual has read: arguments, captured parameters, values on other workers. The products
    ``J^T v`` are passes over the same graph that keep it, up to x and no further. In forward mode the residual at x has a tangent dr, and the
    answer's is dx with ``J dx = -dr``; the products ``J v`` are forward mode again.

Note [Where x ends]
    In the residual's graph x is an `ImplicitAnswer`, which leads nowhere: a leaf would get a gradient of its own that the whole pass commits.

Source: Christianson, Reverse accumulation and attractive fixed points (1994); Blondel et al., Efficient and modular implicit differentiation (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.manipulation import stack
from aiograd.errors import ConvergenceError, OnceDifferentiableError
from aiograd.forward.dual import DualArray, Pending
from aiograd.functional.batching.array import BatchedArray
from aiograd.functional.derivatives import jvp
from aiograd.functional.function import Function, once_differentiable
from aiograd.graph.node import Node
from aiograd.implicit.solvers import IMPLICIT_COUNTS, LinearSystem, Vector
from aiograd.profiler import scope
from aiograd.running.caller import user_line
from aiograd.running.offloading import ready
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.passes import grad


class ImplicitAnswer(Node):
    """The end of the residual's graph at the answer; see Note [Where x ends]."""

    __slots__ = ()

    def apply(self, grads: Sequence[Any]) -> tuple[()]:
        """Nothing."""
        return ()


class Equation:
    """An answer, the residual recorded at it, and how the linear systems of their derivatives are solved.

    Args:
        name: of the solver, for messages.
        answer: the Tensor that the solver returned, outside of any graph.
        function, args: the residual as a function, and its arguments beside x, outside of any graph.
        method: a name in `METHODS`, or a function.
        tol, maxiter: as of `LinearSystem`.
    """

    def __init__(
        self, name: str, answer: Any, function: Callable[..., Any], args: tuple[Any, ...], method: Any, tol: float, maxiter: int | None
    ) -> None:
        self.name = name
        self.answer = answer
        self.function = function
        self.args = args
        self.method = method
        self.tol = tol
        self.maxiter = maxiter
        node = ImplicitAnswer()
        #: the answer in the residual's graph
        self.point = make(answer._data, shared_with=answer)
        self.point._node, self.point._nr = node, node.add_input_metadata(answer.shape, answer.dtype, answer.device)
        self.residual: Any = None

    async def check(self, limit: float) -> None:
        """Raise unless the residual at the answer is small. Cancelling it stops the waiting."""
        await ready(self.residual)
        found = float(np.max(np.abs(host_array(self.residual)), initial=0.0))
        if not found <= limit:
            IMPLICIT_COUNTS.failures += 1
            raise ConvergenceError(
                f"{self.name} returned no root: the largest element of the residual at its answer is {found:.3g}, expected at most {limit:.3g}. "
                "Let the solver go on for longer, or set residual_tol, if so much is meant to be left",
                norm=found, limit=limit,
            )  # fmt: skip

    def tied(self) -> Any:
        """The answer in the graph, or followed by forward mode; alone where the residual depends on nothing that has a derivative.

        Raises:
            OnceDifferentiableError: two derivatives are asked for.
        """
        dual = followed(self.residual)
        if dual is not None:
            inner = [_tensor(each) for each in (dual.primal, dual.tangent) if not isinstance(each, Pending)]
            if any(each.requires_grad for each in (self.residual, *inner)) or any(followed(each) is not None for each in inner):
                raise self.twice()
        elif not self.residual.requires_grad or not self.depends():
            return self.answer
        answer = ImplicitSolve.apply(self.residual, self)
        if answer._node is not None:
            answer._node.forward_line = user_line() or answer._node.forward_line
        return answer

    def depends(self) -> bool:
        """True if the residual depends on anything that may need a gradient, besides the answer."""
        inner = self.point._node
        left, seen = [self.residual._node], {None, inner}
        while left:
            node = left.pop()
            if node not in seen:
                if node.is_leaf or node.is_outlet or node._seq < inner._seq:
                    return True
                seen.add(node)
                left += node.next_nodes
        return False

    def twice(self) -> OnceDifferentiableError:
        """The error for a derivative of a derivative."""
        return OnceDifferentiableError(f"{self.name}, an implicit function, is differentiated twice; it has a first derivative only")

    async def pull(self, gradient: Any) -> Any:
        """u with ``J^T u = gradient``. Cancelling it cancels the product that runs."""

        async def multiply(v: Any) -> Any:
            return (await grad(self.residual, [self.point], v, retain_graph=True, allow_unused=True))[0]

        return await self.solve(multiply, gradient, self.residual, self.point)

    async def push(self, tangent: Any) -> Any:
        """dx with ``J dx = -tangent``, for a tangent of the residual. Cancelling it cancels the product that runs."""

        async def multiply(v: Any) -> Any:
            return (await jvp(lambda x: self.function(x, *self.args), self.answer, v))[1]

        return -(await self.solve(multiply, tangent, self.answer, self.residual))

    async def solve(self, multiply: Callable[[Any], Any], right: Any, solution: Any, like: Any) -> Any:
        """The solution of one linear system, or of one for each example of a batch.

        Args:
            multiply: the product; takes Tensors like `solution`, returns Tensors like `like`, or None for zeros.
            right: the right side, like `like`.
            solution, like: Tensors of the dtype and device of solution and right side.

        Raises:
            ConvergenceError: there is none, or the method did not find it. OnceDifferentiableError: the right side has a tangent.
        """
        if has_tangent(right):
            raise self.twice()
        batch = right._data
        if isinstance(batch, BatchedArray):
            rows = [await self.solve(multiply, row, solution, like) for row in (batch.value if batch.batched else [batch.value])]
            return make(BatchedArray(batch.level, stack(rows) if batch.batched else rows[0], batch.batched))

        async def product(v: Vector) -> Vector:
            made = await multiply(make(v.reshape(solution.shape).astype(solution.dtype)).to(solution.device))
            return np.zeros(v.shape) if made is None else host_array(await made).astype(np.float64).ravel()

        eps = float(max(np.finfo(solution.dtype).eps, np.finfo(like.dtype).eps))
        system = LinearSystem(f"the derivative of {self.name}", product, eps, self.tol, self.maxiter)
        try:
            with scope(f"implicit solve {self.name}"):
                found = await system.solve(self.method, host_array(await right).astype(np.float64))
        except ConvergenceError:
            IMPLICIT_COUNTS.failures += 1
            raise
        return make(found.astype(solution.dtype)).to(solution.device)


class ImplicitSolve(Function):
    """The node; see Note [One node]."""

    @staticmethod
    def forward(ctx: Any, residual: Any, equation: Equation) -> Any:
        """The answer."""
        ctx.equation = equation
        return equation.answer

    @staticmethod
    @once_differentiable
    async def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        """The gradient of the residual. Cancelling it stops the linear solve."""
        return -(await ctx.equation.pull(gradient)), None

    @staticmethod
    async def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        """The tangent of the answer. Cancelling it stops the linear solve."""
        return await ctx.equation.push(tangent)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, TensorCore) else make(value)


def followed(tensor: Any) -> DualArray | None:
    """The array of the innermost call of forward mode that follows a tensor; None where none does."""
    while isinstance(array := _tensor(tensor)._data, DualArray):
        if array.tangent is not None:
            return array
        tensor = array.primal
    return None


def stripped(tensor: Any) -> Any:
    """The values of a Tensor, outside of any graph and of any call of forward mode."""
    value = tensor
    while isinstance(array := _tensor(value)._data, DualArray):
        value = array.primal
    return make(array, shared_with=tensor)
