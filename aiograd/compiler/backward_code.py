"""The backward of a program as Python text, made while the first pass runs it.

The first pass that has gradients for certain outputs and wants certain edges goes through the rules one by one, with the real arrays, and notes
what it does: which rule gave None, which gradient had to be summed down to its target's shape or cast, which was a slice. Later passes run the
text. Sums are associated as the engine does (Note [Deterministic sums] in `aiograd.engine.input_buffer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.forward_code import is_needed, names_of, rule_inputs, saved_names, sources, static_text, uses
from aiograd.compiler.program import Program, Statement, Value, ValueKind
from aiograd.compiler.source import Names, load
from aiograd.engine.validate import fit
from aiograd.ops.elementwise import identity
from aiograd.ops.slice_gradient import SliceGradient, UnsummedGradient
from aiograd.trees import map_tree


class BackwardWriter:
    """Runs one pass through a program and writes its text.

    Args:
        program: of the forward.
        node: of the call, for errors.
        saved: arrays that the forward kept, by `saved_names`.
        grads: one per output; None for one that got none.
        needs: per edge, True if its gradient is wanted.
        sums: per edge, True if the gradients of several uses are added up here.
    """

    def __init__(
        self, program: Program, node: Any, saved: tuple[Any, ...], grads: Sequence[Any], needs: Sequence[bool], sums: Sequence[bool]
    ) -> None:
        self._program = program
        self._node = node
        names = saved_names(program)
        #: arrays by name, as the text has them in its variables
        self._arrays: dict[str, Any] = dict(zip(names, saved, strict=True))
        self._names = Names()
        self._lines = ["def backward(saved, grads):"]
        if names:
            self._lines.append(f"{', '.join(names)}, = saved")
        self._lines.append(f"{', '.join(f'g_{value.name}' for value in program.outputs)}, = grads")
        #: by name of a value, the variable of its gradient; those that are sums of our own
        self._sums: dict[str, str] = {}
        self._owned: set[str | None] = set()
        for value, grad in zip(program.outputs, grads, strict=True):
            if grad is not None:
                self._sums[value.name] = f"g_{value.name}"
                self._arrays[f"g_{value.name}"] = grad
        places, counts = sources(program)
        numbers = {place: k for k, place in enumerate(places)}
        #: by statement and argument, the edge of a use
        self._edges = {(number, i): numbers[place] for number, i, place in uses(program)}
        self._wanted = self._lead_to(needs)
        #: per edge: True if it has several uses that are added up here; the variables of those that are not; the name of its target
        self._is_summed = [bool(is_sum) and count > 1 for is_sum, count in zip(sums, counts, strict=True)]
        self._parts: list[list[str]] = [[] for _ in places]
        self._targets = [(*program.inputs, *program.captured)[place].name for place in places]
        self._count = 0

    def run(self) -> list[Any]:
        """The gradients of the edges."""
        statements = self._program.statements
        for number in reversed(range(len(statements))):
            if statements[number].node is not None:
                self._statement(number, statements[number])
        results = [self._result(k) for k in range(len(self._targets))]
        self._lines.append(f"return [{', '.join(results)}]")
        return [None if name == "None" else self._arrays[name] for name in results]

    def _result(self, edge: int) -> str:
        """The variable of the gradient of an edge."""
        parts = self._parts[edge]
        if self._is_summed[edge]:
            return self._sums.get(self._targets[edge], "None")
        if len(parts) < 2:
            return parts[0] if parts else "None"
        unsummed = self._names.of("unsummed", UnsummedGradient)
        return self._note(f"{unsummed}([{', '.join(parts)}])", UnsummedGradient([self._arrays[part] for part in parts]))

    def compiled(self) -> tuple[Callable[..., list[Any]], str]:
        """A function of what is saved and of the gradients that does the same again; and its text."""
        text = "\n    ".join(self._lines) + "\n"
        return load(text, "backward", self._names.namespace), text

    # ---------------------------------------------------------------- which part

    def _lead_to(self, needs: Sequence[bool]) -> set[tuple[int, int]]:
        """The arguments (by statement and position) that lead to an edge whose gradient is wanted."""
        made: set[str] = set()
        found: set[tuple[int, int]] = set()
        for number, statement in enumerate(self._program.statements):
            if statement.node is None:
                continue
            for i, value in enumerate(statement.arrays):
                if value is None or not is_needed(statement, i):
                    continue
                if value.name in made if value.kind is ValueKind.COMPUTED else needs[self._edges[number, i]]:
                    found.add((number, i))
                    made.update(output.name for output in statement.outputs)
        return found

    # ---------------------------------------------------------------- one statement

    def _statement(self, number: int, statement: Statement) -> None:
        wanted = [i for i in range(len(statement.arrays)) if (number, i) in self._wanted]
        found = [self._sums.pop(value.name, None) for value in statement.outputs]
        self._owned.difference_update(found)  # from here on others may hold it: a rule may hand it on as it is
        if not wanted or all(name is None for name in found):
            return
        cls: Any = statement.node
        op = statement.op
        conjugates = bool(getattr(cls, "conjugates", False))
        if op.outputs == 1:
            g: Any = self._conjugated(str(found[0]), conjugates)
            given = self._arrays[g]
        else:
            present = self._arrays[next(name for name in found if name is not None)]
            names = [
                self._zeros(present, value) if name is None else self._conjugated(name, conjugates)
                for name, value in zip(found, statement.outputs, strict=True)
            ]
            g, given = f"({', '.join(names)},)", tuple([self._arrays[name] for name in names])
        arrays = (op.variadic,) if op.variadic else op.arrays
        targets = {arrays[0]} if op.variadic else {op.arrays[i] for i in wanted}
        self._lines.append(f"# {statement.op.name}, {statement.place}: {statement.line}")
        results: dict[str, tuple[str, Any]] = {}
        for arguments, rule, rule_names in cls.row.fast:
            if not targets & set(arguments):
                continue
            needs = tuple(argument in targets for argument in arguments)
            texts, values = self._rule_arguments(number, statement, rule_names, needs)
            if rule is identity:
                results[arguments[0]] = g, given
                continue
            result = rule(given, *values)
            called = self._names.of("_".join((op.name, *arguments)), rule)
            call = f"{called}({', '.join([g, *texts])})"
            if len(arguments) == 1 and not op.variadic:
                results[arguments[0]] = self._note(call, result), result
            elif op.variadic:
                target = self._new()
                self._lines.append(f"{target} = {call}")
                for i, part in enumerate(result):
                    results[str(i)] = f"{target}[{i}]", part
            else:
                names = [self._new() for _ in arguments]
                self._lines.append(f"{', '.join(names)}, = {call}")
                for argument, name, part in zip(arguments, names, result, strict=True):
                    self._arrays[name] = part
                    results[argument] = name, part
        for i in range(len(statement.arrays)):
            if i in wanted:
                entry = results.get(str(i) if op.variadic else op.arrays[i])
                if entry is not None and entry[1] is not None:
                    self._give(number, i, statement, *entry, conjugates)

    def _rule_arguments(self, number: int, statement: Statement, names: tuple[str, ...], needs: tuple[bool, ...]) -> tuple[list[str], list[Any]]:
        texts: list[str] = []
        values: list[Any] = []
        op, saved = statement.op, rule_inputs(statement)
        for name in names:
            if name == "needs":
                value: Any = needs
            elif name in saved:
                if name in statement.statics:
                    texts.append(static_text(statement.statics[name], self._names))
                    values.append(map_tree(lambda value: self._arrays[value.name], statement.statics[name], Value))
                    continue
                found = names_of(statement, number, name)
                if name == op.variadic or (name == "out" and op.outputs != 1):
                    texts.append(f"({', '.join(found)},)")
                    values.append(tuple([self._arrays[each] for each in found]))
                    continue
                if found:
                    texts.append(found[0])
                    values.append(self._arrays[found[0]])
                    continue
                value = None
            else:
                value = self._fact(statement, name)
            values.append(value)
            texts.append(repr(value) if value is None or value.__class__ in (bool, int) else self._names.of("k", value))
        return texts, values

    def _fact(self, statement: Statement, name: str) -> Any:
        """A shape, a dtype, or a static argument."""
        op = statement.op
        if name in statement.statics:
            return statement.statics[name]
        if name in op.defaults and name in op.statics:
            return op.defaults[name]
        base, _, suffix = name.rpartition("_")
        if base == op.variadic:
            return tuple([getattr(value, suffix) for value in statement.arrays])
        value = statement.arrays[op.arrays.index(base)]
        return None if value is None else getattr(value, suffix)

    # ---------------------------------------------------------------- gradients on their way

    def _give(self, number: int, i: int, statement: Statement, name: str, grad: Any, conjugates: bool) -> None:
        """Fit a gradient to its target, and send or add it."""
        target: Any = statement.arrays[i]
        if conjugates:
            grad = np.conj(grad)
            name = self._note(f"{self._names.of('conj', np.conj)}({name})", grad)
        if grad.shape != target.shape or grad.dtype is not target.dtype:
            grad = fit(grad, target.shape, target.dtype, self._node, i)
            shape, dtype = self._names.of("shape", target.shape), self._names.of("dtype", target.dtype)
            name = self._note(f"{self._names.of('fit', fit)}({name}, {shape}, {dtype}, {self._names.of('node', _NODE)}, {i})", grad)
        edge = self._edges.get((number, i)) if target.kind is not ValueKind.COMPUTED else None
        if edge is not None and not self._is_summed[edge]:
            self._parts[edge].append(self._note(name, grad))
            return
        have = self._sums.get(target.name)
        is_slice = grad.__class__ is SliceGradient
        if have is None:
            if is_slice:
                grad = grad.dense()
                name = self._note(f"{name}.dense()", grad)
                self._owned.add(name)
            self._sums[target.name] = self._note(name, grad)
        elif is_slice:
            if have in self._owned:
                grad.add_to(self._arrays[have])
                self._lines.append(f"{name}.add_to({have})")
            else:
                self._own(target, self._note(f"{have} + {name}.dense()", self._arrays[have] + grad.dense()))
        elif have in self._owned and self._arrays[have].__class__ is np.ndarray:
            np.add(self._arrays[have], grad, out=self._arrays[have])
            self._lines.append(f"{self._names.of('add', np.add)}({have}, {name}, {have})")
        else:
            self._own(target, self._note(f"{have} + {name}", self._arrays[have] + grad))

    def _own(self, target: Value, name: str) -> None:
        self._sums[target.name] = name
        self._owned.add(name)

    def _conjugated(self, name: str, conjugates: bool) -> str:
        return self._note(f"{self._names.of('conj', np.conj)}({name})", np.conj(self._arrays[name])) if conjugates else name

    def _zeros(self, present: Any, value: Value) -> str:
        zeros = np.zeros_like(present, shape=value.shape, dtype=value.dtype)
        shape, dtype = self._names.of("shape", value.shape), self._names.of("dtype", value.dtype)
        return self._note(f"{self._names.of('zeros', np.zeros)}({shape}, {dtype})", zeros)

    def _note(self, expression: str, value: Any) -> str:
        """The variable that holds an expression from here on."""
        if expression in self._arrays:
            return expression
        name = self._new()
        self._lines.append(f"{name} = {expression}")
        self._arrays[name] = value
        return name

    def _new(self) -> str:
        self._count += 1
        return f"d{self._count}"


class _Named:
    """Stands for the node in errors."""

    name = "a compiled function"


_NODE = _Named()
