"""LossModule: a module with the method that computes its loss, used by one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from aiograd.coordination.module_calls import ModuleCalls
from aiograd.engine.evaluate import suspends
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, RemoteError
from aiograd.running.offloading import ready
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore
from aiograd.tensors.norms import factor_for, norm_of, scaled, size_of, sum_of


@contextlib.contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Run code of the module in the block. The code may use other workers: an error of theirs does not mean that a member of the training is lost.

    Args:
        what: the code, in words.

    Raises:
        RemoteError: in place of any other DistributedError.
    """
    try:
        yield
    except RemoteError:
        raise
    except DistributedError as error:
        name = type(error).__name__
        text = f"{what}: {name}: {error}"
        raise RemoteError(text, function=what, type_name=name, correlation_id=error.correlation_id, path=error.path) from error


class LossModule:
    """A module that is trained on its worker.

    Args:
        module: the module.
        method: name of the method that computes the loss of some rows.
        clip_norm: the largest norm of all gradients together; None: any.

    Attributes:
        parameters: the parameters that require grad.

    Raises:
        ArgumentError: no parameters that require grad. ArgumentTypeError: the module has no such method.
    """

    def __init__(self, module: Any, method: str, clip_norm: float | None) -> None:
        if not callable(getattr(module, method, None)):
            raise ArgumentTypeError(f"{type(module).__name__} has no method {method!r}: it computes the loss of a shard, a 0-d Tensor")
        self.module = module
        self.method = method
        self.clip_norm = clip_norm
        self.parameters: list[Any] = [each for each in module.parameters() if each.requires_grad]
        if not self.parameters:
            raise ArgumentError(f"{type(module).__name__} has no parameters that require grad, so there is nothing to train")
        self._turn = asyncio.Lock()
        self._calls = ModuleCalls()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """A block in which nothing else uses the module; it begins when no call that was given up runs on any more, see `release`."""
        async with self._turn:
            await self._calls.settled()
            yield

    async def call(self, method: Any, shard: Sequence[Any]) -> Any:
        """Call a function of the module: on the loop if it makes a coroutine, else on the executor. `release` has to follow, however it ends.

        Args:
            method: the function.
            shard: its arguments.

        Returns:
            The result.
        """
        forward = getattr(self.module, "forward", None)
        if inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(forward):
            value = method(*shard)
        else:
            value = await self._calls.offload(functools.partial(method, *shard))
        value = await value if suspends(value) else value
        return await ready(value)

    def release(self, undo: Callable[[], None]) -> None:
        """Undo the changes that a call has made to the module; see `ModuleCalls.release`."""
        self._calls.release(undo)

    async def loss(self, shard: Sequence[Any]) -> Any:
        """The loss of some rows, with its graph. `release` has to follow, however it ends.

        Raises:
            ArgumentError, ArgumentTypeError: the method returned no loss. RemoteError: see `own_errors`. Other exceptions of the method.
        """
        name = f"{type(self.module).__name__}.{self.method}"
        with own_errors(name):
            loss = await self.call(getattr(self.module, self.method), shard)
        expected = "expected a 0-d Tensor, the mean loss over the rows of the shard"
        if not isinstance(loss, TensorCore):
            raise ArgumentTypeError(f"{name} returned a {type(loss).__name__}; {expected}")
        if loss.size != 1:
            raise ArgumentError(f"{name} returned a Tensor of shape {list(loss.shape)}; {expected}")
        if loss.dtype.kind == "c":
            raise ArgumentTypeError(f"{name} returned a Tensor of dtype {loss.dtype}; {expected}, which is real")
        return loss

    def clipped(self, grads: Sequence[Array | None]) -> Sequence[Array | None]:
        """Gradients by parameter, scaled so that their norm is at most `clip_norm`."""
        present = [index for index, each in enumerate(grads) if each is not None]
        if self.clip_norm is None or not present:
            return grads
        arrays = [grads[index] for index in present]
        factor = factor_for(norm_of(sum_of((size_of(array, 2.0) for array in arrays), 2.0), 2.0), self.clip_norm)
        if factor == 1.0:
            return grads
        found = dict(zip(present, scaled(arrays, factor), strict=True))
        return [found.get(index) for index in range(len(grads))]
