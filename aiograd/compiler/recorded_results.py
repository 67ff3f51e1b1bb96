"""ResultRecorder: the program of a recorded call, made from the function's result.

Note [Results]
    A result is a Tensor that a row has made, an argument or captured Tensor itself, or a view of one of these. A program returns the values of its
    rows; the other results are the run's own Tensors, and views become views of them again, so that a change in place of either is noticed as in the
    eager call.
"""

from __future__ import annotations

from aiograd.compiler.program import Program, Statement, ValueKind
from aiograd.compiler.reached import drop_nodes
from aiograd.compiler.results import chain_of, views_among
from aiograd.compiler.writes import WriteRecorder
from aiograd.errors import TraceError
from aiograd.ops.op import ROWS
from aiograd.running.modes import ModeScope, current_mode
from aiograd.tensors.core import TensorCore, base_of, refresh, view_of


class ResultRecorder(WriteRecorder):
    """A recorder that makes a program. See the module's Note."""

    def program(self, signature: str, outputs: list[TensorCore]) -> Program | None:
        """The program of the call that returned `outputs`; None where it is `broken`.

        Raises:
            TraceError: again, where the function has caught it.
        """
        if self._refused is not None:
            raise TraceError(self._refused)
        mode = current_mode()
        if (mode, mode.grad, mode.dtype) != self._mode:
            self.breaks("it sets a mode for whoever calls it, such as the default dtype")
        with ModeScope(trace=self):
            for output in outputs:
                refresh(output)
                self._renew(output._data)
        made: list[TensorCore] = []
        for output in outputs:
            if id(output) in self._created and not self._is_computed(output):
                self.make_again(output)
            elif id(output._node) in self._new_leaves or (id(output) in self.reads.tensors and self._find(output) is None):
                self._value_of(output)
        given = [*self._of_call, *self._tensors]
        for output in outputs:
            if not self._is_given(output, given):
                for tensor in (*reversed(chain_of(output, [*given, *made])), output):
                    if not any(tensor is each for each in made) and self._is_result(tensor):
                        made.append(tensor)
        found = [self._values[id(tensor)] for tensor in made]
        for tensor in self._alive:
            if isinstance(tensor, TensorCore) and tensor._node is not None and tensor._node._seq > self._began and tensor._node._extra is not None:
                if not tensor._node.is_leaf:
                    self.breaks("it registers a hook on a tensor that it computes")
        views, shares = views_among([*made, *given], len(made))
        if shares:
            self.breaks("it returns tensors that share memory")
        returns = None if self.broken is not None else tuple([self._place(output, [*made, *given]) for output in outputs])
        if returns == tuple([(place, False) for place in range(len(made))]):
            returns = None
        drop_nodes(self._statements, found)
        program = Program(
            signature, tuple(self._inputs), tuple(self._captured), tuple(self._tensors), tuple(self._statements), tuple(found), views, returns,
            self._shared(), self._owned(), differentiated=self.differentiated,
        )
        if program.device != "cpu" and not all(map(_is_for_device, self._statements)):
            self.breaks(f"it computes on {program.device} and on the host")
        return program if self.broken is None else None

    def _is_given(self, tensor: TensorCore, given: list[TensorCore]) -> bool:
        """True for an argument or captured Tensor, and for one of these that is detached."""
        value = self._find(tensor)
        if value is None or value.kind is ValueKind.COMPUTED or view_of(tensor) is not None:
            return False
        return any(tensor is each or (tensor._node is None and tensor._vc is not None and tensor._vc is each._vc) for each in given)

    def _is_computed(self, tensor: TensorCore) -> bool:
        value = self._find(tensor)
        return value is not None and value.kind is ValueKind.COMPUTED

    def _is_result(self, tensor: TensorCore) -> bool:
        """True for a Tensor that a row has made and that a program can return; the recording is broken otherwise."""
        value = self._find(tensor)
        if value is not None and value.records and tensor._node is None:
            value = self._detached(value, tensor)
        if value is None or value.kind is not ValueKind.COMPUTED or (tensor._node is not None) != value.records:
            self.breaks("it returns a tensor that no row of it made")
        elif tensor._x is not None and tensor._x.retains is not None:
            self.breaks("it returns a tensor that retains its gradient")
        elif self._values.setdefault(id(tensor), value) is not value or value.name in self._returned:
            self.breaks("it returns one tensor twice")
        else:
            self._returned.add(value.name)
            return True
        return False

    @staticmethod
    def _place(tensor: TensorCore, tensors: list[TensorCore]) -> tuple[int, bool]:
        """The place of a result among the Tensors of a run, and True if it is detached."""
        for place, each in enumerate(tensors):
            if each is tensor:
                return place, False
        return next(place for place, each in enumerate(tensors) if each._vc is tensor._vc), True

    def _owned(self) -> dict[str, tuple[int, int]]:
        """By name of a value, the number of the array that owns its memory, and its bytes."""
        numbers: dict[int, int] = {}
        return {name: (numbers.setdefault(id(owner), len(numbers)), getattr(owner, "nbytes", 0)) for name, owner in self._owners.items()}

    def _shared(self) -> dict[str, frozenset[str]]:
        """By name of a value, the names of all that share its version counter, as the views of one tensor do."""
        groups: dict[int, set[str]] = {}
        for tensor in self._alive:
            value = self._values.get(id(tensor)) if isinstance(tensor, TensorCore) else None
            if value is not None:
                groups.setdefault(id(base_of(tensor)), set()).add(value.name)
        return {name: frozenset(names) for names in groups.values() if len(names) > 1 for name in names}


def _is_for_device(statement: Statement) -> bool:
    """True if a statement belongs to a program of a device: it computes from arrays there and numbers, or moves an array there."""
    if not statement.is_row or (statement.op is ROWS["to_device"] and statement.is_on_device):
        return True
    return not any([value.device == "cpu" and value.shape for value in (*statement.arrays, *statement.outputs) if value is not None])
