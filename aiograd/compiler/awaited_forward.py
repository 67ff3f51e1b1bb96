"""AwaitedForward: rows of a compiled ``async def`` that take long, in parts between which the loop has its turns.

Note [Forwards that wait]
    Rows between two calls that take longer than one segment (Note [Segments] in `aiograd.compiler.steps`) are awaited. Light parts run on the loop,
    in turns of the engine's budget (`aiograd.engine.loop_budget`): before a part that would exceed what is left of it, by the time that the part took
    last, the loop runs its rounds. Heavy parts are computed on the engine's executor, chosen by the same estimate as its rules. So
    cancellation, timeouts and deadlines act between parts: those before have happened, those after have not. Shorter rows, and functions that are
    no ``async def``, run in one piece.

    Parts with anything but rows stay on the loop: their effects are whole for other tasks. All random numbers of these rows are drawn before the
    first of them, in the order of the function, so no other task draws in between. Rows that read a leaf's ``.grad`` run in one piece.

Note [Writes while a forward waits]
    All rows between two calls see the values of one moment, as they do in the eager function, which does not wait there. After each wait the version
    counters of the Tensors that are still to be read are compared with those at the beginning. If another task has written to one, the rows run
    again, now in one piece, with the numbers that were drawn; where an effect of theirs (an update of running statistics) has happened, that
    cannot be, and a `ModifiedError` is raised. Writes by numpy are not seen, as in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiograd.compiler.program import layout_of
from aiograd.engine.run.current import current_engine, turns_of
from aiograd.engine.run.loop import running_loop
from aiograd.errors import ModifiedError
from aiograd.tensors.core import refresh


@dataclass(slots=True)
class ForwardPart:
    """A part of a forward that waits.

    Attributes:
        part: a `aiograd.compiler.steps.Part` with code.
        is_pure: True if it has nothing but rows.
        cost: estimated nanoseconds, compared with the engine's `inline_ns`.
        frees: places of the Tensors that nothing needs after it.
        seconds: that its last run on the loop took.
    """

    part: Any
    is_pure: bool
    cost: float
    frees: tuple[int, ...]
    seconds: float = 0.0


class AwaitedForward:
    """Rows between two calls. See the module's Notes.

    Args:
        name: of the function.
        parts: in order; the first is made of draws and leading effects where there are any.
        last_reads: by place of a Tensor from elsewhere, the number of the last part with a row that reads it.
        carry_out: runs one part, given it and the Tensors of the run.
    """

    def __init__(self, name: str, parts: list[ForwardPart], last_reads: dict[int, int], carry_out: Callable[[Any, list[Any]], None]) -> None:
        self.name = name
        self.parts = parts
        self._last_reads = last_reads
        self._carry_out = carry_out
        #: number of the part from which on the rows can run again
        self._first = 0 if parts[0].is_pure else 1

    async def run(self, tensors: list[Any]) -> None:
        """Run the parts.

        Args:
            tensors: of the run; receives the Tensors that the parts make.

        Raises:
            ModifiedError: see Note [Writes while a forward waits]. EngineClosedError: the engine has been closed meanwhile.

        Cancelling it leaves out the parts that have not begun, and drops the result of one that is computed on the executor.
        """
        if running_loop() is None:
            self._run_at_once(self.parts, tensors)
            return
        engine = current_engine()
        turns, limit = turns_of(engine), engine.placement.inline_ns
        seen = self._seen(tensors)
        has_turn = has_acted = False
        try:
            for number, each in enumerate(self.parts):
                waits = is_away = each.is_pure and each.cost > limit
                if is_away:
                    if has_turn:
                        has_turn = False
                        turns.release()
                    await self._compute(each.part, tensors, engine.offload)
                elif not has_turn:
                    waits = not turns.take()
                    if waits:
                        await turns.wait()
                    has_turn = True
                elif turns.left() < each.seconds:
                    waits, has_turn = True, False
                    await turns.pause()
                    has_turn = True
                if waits and (changed := [entry for entry in seen if entry[3] >= number and _has_changed(*entry[:3])]):
                    if has_acted or any(not _is_alike(tensor._data, data) for tensor, data, _, _ in changed):
                        raise self._modified(*changed[0][:3])
                    self._run_at_once(self.parts[self._first :], tensors)
                    return
                if not is_away:
                    left = turns.left()
                    self._carry_out(each.part, tensors)
                    each.seconds = left - turns.left()
                if not each.is_pure:
                    has_acted = has_acted or number >= self._first
                    seen = self._seen(tensors)
                for place in each.frees:
                    tensors[place] = None
        finally:
            if has_turn:
                turns.release()

    def _run_at_once(self, parts: Iterable[ForwardPart], tensors: list[Any]) -> None:
        for each in parts:
            self._carry_out(each.part, tensors)

    async def _compute(self, part: Any, tensors: list[Any], offload: Callable[..., Any]) -> None:
        for tensor in part.code.program.tensors:
            if tensor._x is not None:
                refresh(tensor)
        for i, tensor in zip(part.gives, await part.code.run_away([tensors[i] for i in part.takes], offload), strict=True):
            tensors[i] = tensor

    def _seen(self, tensors: list[Any]) -> list[tuple[Any, Any, int, int]]:
        """The Tensors from elsewhere that rows read, each with its array, its version, and the last part that reads it."""
        found = []
        for place, last in self._last_reads.items():
            tensor = tensors[place]
            if tensor._x is not None:
                refresh(tensor)
            found.append((tensor, tensor._data, 0 if tensor._vc is None else tensor._vc[0], last))
        return found

    def _modified(self, tensor: Any, data: Any, version: int) -> ModifiedError:
        now = 0 if tensor._vc is None else tensor._vc[0]
        return ModifiedError(
            f"while the forward of the compiled function {self.name} waited, another task has modified a tensor that it was still to read: shape "
            f"{list(tensor.shape)}, version {now}; expected shape {list(data.shape)}, version {version}. Its rows cannot run again: they have had "
            "effects, or the tensor has another layout. Do not modify what a running call reads."
        )


def _has_changed(tensor: Any, data: Any, version: int) -> bool:
    now: int = 0 if tensor._vc is None else tensor._vc[0]
    return tensor._data is not data or now != version


def _is_alike(array: Any, other: Any) -> bool:
    return bool((array.shape, array.dtype, layout_of(array)) == (other.shape, other.dtype, layout_of(other)))
