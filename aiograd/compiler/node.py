"""ProgramNode: the backward of one call of a compiled function, as one node of the graph.

Note [Sums with uses elsewhere]
    The eager pass adds the gradients of all uses of a tensor in the order of recording, uses outside of the compiled function included. Where the
    program's uses come first in that order their sum is made inside of the program; where a later use outside of it comes first, the node returns an
    `UnsummedGradient`, and the engine adds its parts one by one. Either way the result equals the eager pass to the bit.

Note [What a pass frees]
    A pass frees the saved arrays of the statements that it has run, as of any row; so outputs, or edges, may be differentiated one after the other
    where they share no statement with saved arrays. For passes that record a graph themselves the node also keeps the Tensors that the
    program read, see Note [Nodes behind a node].

Note [Nodes behind a node]
    Some passes need the nodes that the eager call would have recorded: one that records a graph, one that wants the gradient of an output which other
    outputs are computed from, or shows it to a hook, one that has to name the operation of an error (anomaly mode). So the rows run once more, on
    Tensors, and from then on the program's node hands its gradients on to theirs. Their sequence numbers lie between its own and the one before,
    where the eager nodes would be, so that every sum has the order of the eager pass.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from aiograd.compiler.arena import Arena
from aiograd.compiler.backward_code import BackwardWriter
from aiograd.compiler.estimates import STATEMENT_NS
from aiograd.compiler.forward_code import saved_names
from aiograd.compiler.profiled import ProfiledBackward
from aiograd.compiler.program import layout_of
from aiograd.compiler.rows_again import rows_again
from aiograd.errors import GraphError, GraphFreedError, ModifiedError
from aiograd.graph.hooks import HookDict
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node, _next_sequence
from aiograd.graph.programs import PROGRAM_NODES, opened_at
from aiograd.graph.released import ReleasedVariables
from aiograd.ops.slice_gradient import dense
from aiograd.running.modes import current_mode
from aiograd.tensors.core import move_to
from aiograd.tensors.modified import belongs_to_leaf, modified_error

_NOTHING: frozenset[int] = frozenset()


class ProgramNode(Node):
    """The backward of one call. See the module's Notes.

    Args:
        code: the program with its code, shared by all calls; a `ProgramCode`.
        tensors: the Tensors that the program read: inputs, then captured ones.
        arrays: the arrays that the forward saved.
        arena: the memory that the forward computed in.
        next_nodes, next_nrs: the edges, to the Tensors at `ProgramCode.sources`.
        versions: the versions of the Tensors.
    """

    __slots__ = ("arena", "code", "_arrays", "tensors", "versions", "counters", "_ran", "_gone", "_released")

    is_builtin = is_program = True
    expanded_class: type[Any]
    holds_data = True
    is_divisible = False
    is_traceable = True

    def __init__(
        self,
        code: Any,
        tensors: list[Any],
        arrays: tuple[Any, ...],
        arena: Arena | None,
        next_nodes: tuple[Node | None, ...],
        next_nrs: tuple[int, ...],
        versions: tuple[int, ...],
    ) -> None:
        self._seq = _next_sequence()
        self._extra = None
        self.code = code
        self.next_nodes = next_nodes
        self.next_nrs = next_nrs
        #: arrays that the backward needs, by `saved_names`; a `ReleasedVariables` once they are gone
        self._arrays: Any = arrays
        self.arena = arena
        #: of the last run, for each output True if it had a gradient, for each edge True if it was wanted; None for a run of the whole
        self._ran: Any = None
        #: statements whose arrays are freed, and the `ReleasedVariables` with the reason
        self._gone: frozenset[int] = _NOTHING
        self._released: Any = None
        self.tensors = tensors
        self.versions = versions
        #: version counters of outputs with saved values
        self.counters: tuple[list[int], ...] = ()

    num_inputs = property(lambda self: len(self.code.metadata))
    has_repeats = property(lambda self: self.code.has_repeats)
    has_paths = property(lambda self: self.code.has_paths)

    @property
    def name(self) -> str:
        """``loss_ofBackward`` for a compiled function ``loss_of``."""
        return f"{self.code.name}Backward"

    @property
    def device(self) -> str:
        """Name of the device of the program."""
        return "cpu"

    # ---------------------------------------------------------------- running

    def vjp(self, g: Any) -> list[Any]:
        """Gradients of all edges, from one gradient per output (None for one without)."""
        code, saved = self.code, self._arrays
        arena = self.arena  # noqa: F841 - kept until the end, see Note [Owners of an arena] in `aiograd.compiler.arena`
        grad = g[0]
        if grad.__class__ is np.ndarray and len(g) == 1 and saved.__class__ is tuple and not self._gone and current_mode().profiler is None:
            whole = code.whole.get(grad.strides)
            if whole is not None:  # the same as `_run` does, without a key for everything that may differ
                self.check_versions(*code.whole_places)
                self._ran = None
                try:
                    return whole(saved, g)  # type: ignore[no-any-return]
                except Exception as error:
                    explain(error, code.name)
                    raise
        return self._run(g, code.all_needed, code.all_needed)

    def apply(self, grads: Sequence[Any]) -> list[Any]:
        """As `vjp`."""
        return self.vjp(grads)

    def vjp_part(self, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """As `vjp`, only for the edges with `needs`."""
        return self._run(g, tuple(needs), self.code.all_needed)

    def run_repeats(self, grads: Sequence[Any], needs: tuple[bool, ...], begins: tuple[bool, ...]) -> list[Any]:
        """As `vjp_part`; see Note [Sums with uses elsewhere].

        Args:
            begins: per edge, True if its gradient is the first in the sum at its target.
        """
        return self._run(grads, needs, begins)

    def _run(self, grads: Sequence[Any], needs: tuple[bool, ...], sums: tuple[bool, ...]) -> list[Any]:
        saved, arena = self._handed(grads, needs), self.arena
        ran = self._ran = tuple([grad is not None for grad in grads]), needs
        if isinstance(saved, ReleasedVariables):
            if not self.code.statements_of(*ran):
                return [None] * len(needs)
            raise saved.error(self.name)
        grads = [None if grad is None else dense(grad) for grad in grads]
        key = (tuple([None if grad is None else layout_of(grad) for grad in grads]), needs, sums)
        if self._gone and not self._gone.isdisjoint(self.code.statements_of(*ran)):
            raise self._released.error(self.name)
        self.check_versions(*self.code.places_of(*ran))
        backward = self.code.backwards.get(key)
        profiler = current_mode().profiler
        if arena is not None and (backward is None or profiler is not None or key in self.code.sharing):
            arena.is_shared = True
        try:
            if profiler is not None:
                profiled = ProfiledBackward(self.code.program, self, saved, grads, needs, sums)
                profiled.profiler = profiler
                return profiled.run()
            if backward is not None:
                return backward(saved, grads)  # type: ignore[no-any-return]
            writer = BackwardWriter(self.code.program, self, saved, grads, needs, sums)
            result = writer.run()
        except Exception as error:
            explain(error, self.code.name)
            raise
        self.code.add_backward(key, *writer.compiled())
        return result

    def _handed(self, grads: Sequence[Any], needs: tuple[bool, ...]) -> Any:
        return self._arrays

    def compute(self, grads: Sequence[Any], needs: tuple[bool, ...], values: Any, create_graph: bool) -> list[Any]:
        """As `vjp_part`; a pass that records a graph has expanded the node, or it cannot run."""
        if create_graph:
            self.check_versions(range(len(self.tensors)))
            raise self.cannot_run()
        return self._run(grads, tuple(needs), self.code.all_needed)

    def expand(self) -> None:
        """Put the nodes that the eager call would have recorded behind this one. See Note [Nodes behind a node].

        A node without its saved values, or with modified Tensors, stays as it is: it may have no part in the pass.
        """
        if isinstance(self._arrays, ReleasedVariables) or self._gone:
            return
        with contextlib.suppress(ModifiedError):
            self._expand()

    def _expand(self) -> None:
        """As `expand`, also for a node that has run in part.

        Raises:
            ModifiedError, GraphFreedError: the rows cannot run once more.
        """
        program = self.code.program
        if len(self.tensors) != len(program.inputs) + len(program.captured):
            raise self._released.error(self.name)
        self.check_versions(range(len(self.tensors)))
        saved = dict(zip(saved_names(program), self._arrays, strict=True))
        if any([saved.get(value.name, saved) is None for statement in program.statements if not statement.is_row for value in statement.outputs]):
            raise self._released.error(self.name)
        known, nodes = rows_again(program, self.tensors, saved)
        for number, (statement, node) in enumerate(nodes, 1):
            node._seq = self._seq - 1 + number / (len(nodes) + 1)  # type: ignore[assignment]
            if statement in self._gone:
                node.release_variables(self._released)
        outputs = [known[value.name] for value in program.outputs]
        edges = [(tensor._node, tensor._nr) if value.records else (None, 0) for value, tensor in zip(program.outputs, outputs, strict=True)]
        self.next_nodes = tuple([node for node, _ in edges])
        self.next_nrs = tuple([nr for _, nr in edges])
        self._arrays, self.arena, self.tensors, self.counters = (), None, [], ()
        self.__class__ = self.expanded_class
        self._edges_changed()
        if self._extra is not None:
            for number, hooks in self._extra.tensor_hooks.items():
                behind: Any = edges[number][0]
                behind.extra.tensor_hooks[edges[number][1]] = hooks
            self._extra.tensor_hooks = {}
            retainers: list[Any] = [*self._extra.retain_hooks.values()]
            for tensor in [retainer.tensor() for retainer in retainers]:
                if tensor is not None:
                    move_to(tensor, *edges[tensor._nr])

    def open_at(self, input_nr: int) -> None:
        """Do as `expand` does for an output that other outputs are computed from.

        Raises:
            ModifiedError, GraphFreedError: a Tensor of the call has been modified, or its random numbers are gone.
        """
        if not isinstance(self._arrays, ReleasedVariables) and input_nr in self.code.inner_outputs:
            try:
                self._expand()
            except (ModifiedError, GraphFreedError) as error:
                error.add_note(f"other results of {self.code.name} are computed from it: register its hook, or ask for its gradient, before that")
                raise

    def edges_from(self, inputs: Set[int]) -> Sequence[bool]:
        """Per edge, True if the rows lead from one of the inputs to it."""
        return self.code.edges_from(frozenset(inputs))  # type: ignore[no-any-return]

    def tensor_hooks(self, input_nr: int) -> HookDict:
        """Hooks on an output, at the node where all its gradients arrive."""
        node, nr = opened_at(self, input_nr)
        return super().tensor_hooks(nr) if node is self else node.tensor_hooks(nr)

    def shares_work(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """True, since two runs for different edges repeat some of the work."""
        return True

    # ---------------------------------------------------------------- saved values

    @property
    def _saved(self) -> Any:
        """The saved arrays; set to a `ReleasedVariables` by a pass that is done with them."""
        return self._arrays

    @_saved.setter
    def _saved(self, released: ReleasedVariables) -> None:
        self.release_variables(released)

    def cannot_run(self) -> Exception:
        """The error for a node without its saved values."""
        released = self._released or self._arrays
        if isinstance(released, ReleasedVariables):
            return released.error(self.name)
        return GraphError(f"{self.name}: its saved values are not at hand")

    def check_versions(self, places: Any, numbers: Any = None) -> None:
        """Raise if a Tensor that the backward needs has been modified in place since the call.

        Args:
            places, numbers: as the result of `ProgramCode.places_of`; None: all outputs with saved values.

        Raises:
            ModifiedError
        """
        tensors, versions = self.tensors, self.versions
        for place in places:
            tensor, expected = tensors[place], versions[place]
            found = 0 if tensor._vc is None else tensor._vc[0]
            if found != expected:
                raise modified_error(f"a tensor that {self.code.name} has read", tensor.shape, found, expected, belongs_to_leaf(tensor))
        for counter in self.counters if numbers is None else [self.counters[number] for number in numbers]:
            if counter[0]:
                raise modified_error(f"an output of {self.code.name}, which it saved", (), counter[0], 0, False)

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        """Drop the saved values of the statements that the last run went through; all, after a failure."""
        released = released or ReleasedVariables()
        if isinstance(self._arrays, ReleasedVariables):
            return
        if not released.reason:
            self._gone = self.code.gone_after(self._ran, self._gone)
            kept = self.code.names_left(self._gone)
            if kept is not None:
                self._arrays, self._released = self.code.only(self._arrays, kept), released
                if not kept:
                    self.arena, self.tensors = None, []
                return
        self._arrays = released
        self.arena = None
        self.tensors = []

    # ---------------------------------------------------------------- metadata and cost

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        """Shape, dtype and device of each output."""
        return self.code.metadata  # type: ignore[no-any-return]

    def metadata_of(self, input_nr: int) -> InputMetadata:
        """Shape, dtype and device of one output."""
        return self.code.metadata[input_nr]  # type: ignore[no-any-return]

    def cost_key(self) -> Any:
        """The key of the estimate; None if a walk, which does not keep the order of gradients, cannot run the node."""
        return None if self.has_repeats else (ProgramNode, self.code.estimate)

    def estimate(self) -> float:
        """Estimated nanoseconds of one run."""
        return self.code.estimate  # type: ignore[no-any-return]


class DeviceProgramNode(ProgramNode):
    """The backward of one call of a program on a device; see Note [Programs on a device] in `aiograd.compiler.program`.

    Args:
        stream: the queue (stream) of its device on which the call was made, where the device has several.
        *arguments: of a `ProgramNode`.
    """

    __slots__ = ("stream",)

    spans_devices = True

    def __init__(self, stream: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stream = stream

    @property
    def device(self) -> str:
        """Name of the device of the program."""
        return self.code.program.device  # type: ignore[no-any-return]

    def cost_key(self) -> None:
        """None, since the cost is not known to be small."""


class ExpandedNode(ProgramNode):
    """A program's node that hands its gradients on to the nodes behind it, by the numbers of the outputs."""

    __slots__ = ()

    is_program = holds_data = has_repeats = False
    has_paths = True

    def vjp(self, g: Any) -> list[Any]:
        """The gradients themselves."""
        return list(g)

    def vjp_part(self, g: Any, needs: tuple[bool, ...]) -> list[Any]:
        """The gradients of some of the outputs."""
        return [grad if need else None for grad, need in zip(g, needs, strict=True)]

    def compute(self, grads: Sequence[Any], needs: tuple[bool, ...], values: Any, create_graph: bool) -> list[Any]:
        """As `vjp_part`."""
        return self.vjp_part(grads, needs)

    def place_of(self, input_nr: int) -> tuple[Node | None, int]:
        """The node behind this one at which all gradients of an output arrive."""
        return self.next_nodes[input_nr], self.next_nrs[input_nr]

    def tensor_hooks(self, input_nr: int) -> HookDict:
        """Hooks on an output, which run where all its gradients arrive."""
        node: Any = self.next_nodes[input_nr]
        return node.tensor_hooks(self.next_nrs[input_nr])  # type: ignore[no-any-return]

    def release_variables(self, released: ReleasedVariables | None = None) -> None:
        """Do nothing: the nodes behind this one have the values."""

    def edges_from(self, inputs: Set[int]) -> list[bool]:
        """The edges with the numbers of the inputs."""
        return [number in inputs for number in range(len(self.next_nodes))]

    def shares_work(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """False, since there is no work to repeat."""
        return False

    def cost_key(self) -> Any:
        """The key of the estimate."""
        return ExpandedNode

    def estimate(self) -> float:
        """Estimated nanoseconds of one run."""
        return STATEMENT_NS


class _ExpandedOnDevice(ExpandedNode, DeviceProgramNode):
    """An expanded node of a program on a device."""

    __slots__ = ()

    def cost_key(self) -> None:
        """None, since the cost is not known to be small."""


ProgramNode.expanded_class = ExpandedNode
DeviceProgramNode.expanded_class = _ExpandedOnDevice
PROGRAM_NODES.append(ProgramNode)


def explain(error: BaseException, name: str) -> None:
    """Add a note with the statement of a program, and the user's line that it comes from, at which an error was raised."""
    trace, found = error.__traceback__, None
    while trace is not None:
        code, locals_of = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if code.co_filename.startswith("<aiograd program"):
            number = trace.tb_lineno
            found = linecache.getline(code.co_filename, number).strip()
            while "#" not in found and number > 1:
                number -= 1
                comment = linecache.getline(code.co_filename, number).strip()
                if comment.startswith("#"):
                    found = f"{found}  {comment}"
        elif code is BackwardWriter._statement.__code__ and (statement := locals_of.get("statement")) is not None:
            found = f"backward of {statement.op.name}  # {statement.place}: {statement.line}"
        trace = trace.tb_next
    if found is not None:
        error.add_note(f"in the compiled function {name}, statement `{found}`")
