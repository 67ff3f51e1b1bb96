"""Compiles a row of the op tables into the code of its backward node.

Note [Why code is generated]
    For every recorded operation a node saves the values that the rules name as parameters, and later passes exactly these to them. Interpreting
    the parameter names for each node costs more than the arithmetic on small arrays. So for each row, and each combination of arguments that
    need a gradient, two functions are compiled once, from the names in the table only: ``make``, the one place where nodes of rows are made,
    and ``vjp``. For multiplication of two tensors that both need a gradient they read::

        def make(_output, x1, x2):
            _node = _new()
            _node._seq = _next_sequence()
            _node._extra = None
            _node.next_nodes = (x1._node, x2._node)
            _node.next_nrs = (x1._nr, x2._nr) if x1._nr or x2._nr else _zeros
            _data = _output._data
            _node.shape = _data.shape
            _node.dtype = _data.dtype
            _node._saved = _saved = (x1, x2,)
            _node._version = 0 if (x1._vc is None or not x1._vc[0]) and ... else _versions_of(_saved[:2])
            return _node

        def vjp(self, g):
            saved = self._saved
            if saved.__class__ is not tuple: raise self.cannot_run()
            x1, x2 = saved
            if ((self._version or (x1._vc is not None and x1._vc[0]) or ...)
                and self._version != (x1._vc[0] if x1._vc is not None else 0, ...)): self.check_versions()
            return (g * x2._data, g * x1._data,)

    This is the only module that calls ``exec``, and the text it compiles consists of identifiers from the tables.
    Measured by ``tests/benchmarks/small_graphs.py``.

The layout of the saved tuple: values of tensors first (Tensor objects), then the value of the output (its array, then its version counter),
then shapes, dtypes and static arguments, then residuals of a fused row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aiograd.graph.node import _next_sequence
from aiograd.ops.elementwise import identity, times_x1, times_x2
from aiograd.ops.op import Fused, Op, Rule
from aiograd.tensors.modified import versions_of

RulePlan = list[tuple[tuple[str, ...], Rule, tuple[str, ...]]]


class CompiledRow(NamedTuple):
    """A row compiled for one combination of arguments that need a gradient."""

    op: Op
    #: per array argument (or once, for a variadic row): True if it needs a gradient
    needs: tuple[bool, ...]
    #: names of the saved Tensors, in order
    values: tuple[str, ...]
    #: True if the output's value is saved
    saves_output: bool
    #: shapes, dtypes and static arguments saved, in order
    facts: tuple[str, ...]
    residuals: tuple[str, ...]
    #: residuals that the fused forward returns, saved or not
    offered: tuple[str, ...]
    vjp: Callable[[Any, Any], tuple[Any, ...]]
    #: the rules for Tensors, where a pass records a graph
    plain: RulePlan
    #: the rules for host arrays (which may name residuals)
    fast: RulePlan

    @property
    def holds_data(self) -> bool:
        """True if array data is saved, not only shapes and the like. An index counts as array data, except the index of a view."""
        return bool(self.values or self.saves_output or self.residuals) or ("index" in self.facts and not self.op.view)

    @property
    def layout(self) -> tuple[str, ...]:
        """Names of the saved values, in order."""
        return (*self.values, *(("out", "out_versions") if self.saves_output else ()), *self.facts, *self.residuals)


def compile_row(op: Op, needs: tuple[bool, ...], fused: Fused | None) -> CompiledRow:
    """Compile `op` for gradients of the arguments with True in `needs`, with these fused kernels or its plain rules."""
    arrays = (op.variadic,) if op.variadic else op.arrays
    wanted = {name for name, need in zip(arrays, needs, strict=True) if need}
    rules = _plan(op, op.rules, op.joint, wanted)
    fast = rules if fused is None else _plan(op, fused.rules, fused.joint, wanted)
    plain = [entry for entry in rules if not set(entry[0]) <= op.recorded.keys()] + _plan(op, op.recorded, {}, wanted)
    offered = residuals = () if fused is None else fused.residuals
    names = {name for plan in (plain, fast) for _, _, rule_names in plan for name in rule_names}
    values = tuple(name for name in arrays if name in names)
    saves_output = "out" in names
    facts = tuple(sorted(names - set(values) - set(residuals) - {"out", "needs"}))
    residuals = tuple(name for name in residuals if name in names)
    for name in (*arrays, *facts, *residuals):
        if not name.isidentifier():
            raise TypeError(f"row {op.name!r}: {name!r} is not an identifier")
    namespace: dict[str, Any] = {}
    source = _vjp_source(op, arrays, needs, values, saves_output, facts, residuals, fast, namespace)
    _run(source, f"<row {op.name} {needs}>", namespace)
    return CompiledRow(op, needs, values, saves_output, facts, residuals, offered, namespace["vjp"], plain, fast)


def compile_make(row: CompiledRow, cls: type[Any]) -> Callable[..., Any]:
    """A function that makes the node of one call of a row.

    Its arguments are the output Tensor (for a row with several outputs: their tuple), then the array arguments as Tensors, then static
    arguments and residuals by name. It returns the node; the output does not refer to it yet.

    Args:
        row: the compiled row.
        cls: class of its nodes.
    """
    op = row.op
    arrays = (op.variadic,) if op.variadic else op.arrays
    zeros = (0,) * len(arrays)
    namespace: dict[str, Any] = {
        "_new": cls, "_next_sequence": _next_sequence, "_versions_of": versions_of, "_zeros": zeros,
    }  # fmt: skip
    _run(_make_source(row, arrays), f"<row {op.name} {row.needs}, node>", namespace)
    make: Callable[..., Any] = namespace["make"]
    return make


def compile_part(row: CompiledRow, needs: tuple[bool, ...]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """``vjp`` of a compiled row, for its arguments with `needs` only; the others get None."""
    if row.op.variadic:  # one rule makes them all
        return lambda node, g: tuple([grad if need else None for grad, need in zip(row.vjp(node, g), needs, strict=True)])
    wanted = {name for name, need in zip(row.op.arrays, needs, strict=True) if need}
    plan = [entry for entry in row.fast if wanted & set(entry[0])]
    namespace: dict[str, Any] = {}
    source = _vjp_source(row.op, row.op.arrays, needs, row.values, row.saves_output, row.facts, row.residuals, plan, namespace)
    _run(source, f"<row {row.op.name} {row.needs}, only {needs}>", namespace)
    part: Callable[[Any, Any], tuple[Any, ...]] = namespace["vjp"]
    return part


def compile_recorded(row: CompiledRow, needs: tuple[bool, ...]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """``vjp`` by the rules for Tensors, which a pass with ``create_graph`` runs; for only those arguments with `needs`, the others get None."""
    op = row.op
    arrays = (op.variadic,) if op.variadic else op.arrays
    some = (True,) if op.variadic else needs
    wanted = {name for name, need in zip(arrays, some, strict=True) if need}
    plan = [entry for entry in row.plain if wanted & set(entry[0])]
    namespace: dict[str, Any] = {}
    source = _vjp_source(op, arrays, some, row.values, row.saves_output, row.facts, row.residuals, plan, namespace, on_tensors=True)
    _run(source, f"<row {op.name} {row.needs}, recorded, {needs}>", namespace)
    vjp: Callable[[Any, Any], tuple[Any, ...]] = namespace["vjp"]
    if op.variadic:
        return lambda node, g: tuple([grad if need else None for grad, need in zip(vjp(node, g), needs, strict=True)])
    return vjp


def _run(source: str, name: str, namespace: dict[str, Any]) -> None:
    namespace["__name__"] = __name__
    exec(compile(source, name, "exec"), namespace)  # noqa: S102 - see Note [Why code is generated]


def compile_binder(op: Op, plain: frozenset[type], static: Callable[[Any], Any]) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """A function with the row's own signature that returns its array arguments as a list and its static ones by name.

    Args:
        plain: classes of static arguments that pass as they are; others go through `static`.
    """
    for name in (*op.arrays, *op.statics, *([op.variadic] if op.variadic else [])):
        if not name.isidentifier():
            raise TypeError(f"row {op.name!r}: {name!r} is not an identifier")
    namespace: dict[str, Any] = {"plain": plain, "static": static, **{f"default_{name}": value for name, value in op.defaults.items()}}
    parameters = [f"{name}=default_{name}" if name in op.defaults else name for name in op.arrays]
    parameters += [f"*{op.variadic}"] if op.variadic else ["/"]
    required = [name for name in op.statics if name not in op.defaults]
    optional = [f"{name}=default_{name}" for name in op.statics if name in op.defaults]
    if not op.variadic and required and any(name in op.defaults for name in op.arrays):
        parameters.append("*")
    parameters += required + optional
    arrays = f"list({op.variadic})" if op.variadic else f"[{', '.join(op.arrays)}]"
    statics = ", ".join(f"{name!r}: {name} if {name}.__class__ in plain else static({name})" for name in op.statics)
    source = f"def {op.name}({', '.join(parameters)}):\n    return {arrays}, {{{statics}}}\n"
    _run(source, f"<row {op.name}>", namespace)
    binder: Callable[..., tuple[list[Any], dict[str, Any]]] = namespace[op.name]
    return binder


def _plan(op: Op, rules: Mapping[str, Rule], joint: Mapping[tuple[str, ...], Rule], wanted: set[str]) -> RulePlan:
    return [entry for entry in op.rule_plan(rules, joint) if wanted & set(entry[0])]


def _fact_source(op: Op, name: str, arrays: tuple[str, ...]) -> str:
    """Source that computes a saved fact inside ``make``."""
    for suffix, attribute in (("_shape", "shape"), ("_dtype", "dtype")):
        base = name.removesuffix(suffix)
        if base != name and base in arrays:
            if op.variadic:
                return f"tuple([t._data.{attribute} for t in {base}])"
            return f"(None if {base} is None else {base}._data.{attribute})" if base in op.defaults else f"{base}._data.{attribute}"
    return name


def _make_source(row: CompiledRow, arrays: tuple[str, ...]) -> str:
    op, values = row.op, row.values
    parameters = ["_output", *arrays, *op.statics, *(f"{name}=None" for name in row.offered)]
    lines = [f"def make({', '.join(parameters)}):", "_node = _new()", "_node._seq = _next_sequence()", "_node._extra = None"]
    if op.variadic:
        lines.append(f"_node.next_nodes = tuple([t._node for t in {op.variadic}])")
        lines.append(f"_node.next_nrs = tuple([t._nr for t in {op.variadic}])")
    else:
        optional = [name for name in arrays if name in op.defaults]
        nodes = [f"None if {name} is None else {name}._node" if name in optional else f"{name}._node" for name in arrays]
        numbers = [f"0 if {name} is None else {name}._nr" if name in optional else f"{name}._nr" for name in arrays]
        shared = "" if optional or not arrays else f" if {' or '.join(numbers)} else _zeros"  # nearly always, so one tuple serves all
        lines.append(f"_node.next_nodes = ({', '.join(nodes)},)" if nodes else "_node.next_nodes = ()")
        lines.append(f"_node.next_nrs = ({', '.join(numbers)},){shared}" if numbers else "_node.next_nrs = ()")
    if op.outputs == 1:
        lines += ["_data = _output._data", "_node.shape = _data.shape", "_node.dtype = _data.dtype"]
        if row.saves_output:
            lines.append("_output._vc = _counters = [0]")
    else:
        lines += ["_data = _output[0]._data", "_node.shape = _data.shape", "_node.dtype = _data.dtype"]
        if row.saves_output:
            lines += ["_data = tuple([t._data for t in _output])", "_counters = tuple([[0] for t in _output])"]
            lines.append("for _tensor, _counter in zip(_output, _counters): _tensor._vc = _counter")
    entries = [*values, *(["_data", "_counters"] if row.saves_output else [])]
    entries += [*(_fact_source(op, name, arrays) for name in row.facts), *row.residuals]
    lines.append(f"_node._saved = _saved = ({', '.join(entries)},)" if entries else "_node._saved = ()")
    if not values:
        lines.append("_node._version = 0")
    elif op.variadic:
        lines.append("_node._version = _versions_of(_saved[:1])")
    else:
        absent = {name: f"{name} is None or " if name in op.defaults else "" for name in values}
        untouched = [f"({absent[name]}{name}._vc is None or not {name}._vc[0])" for name in values]
        lines.append(f"_node._version = 0 if {' and '.join(untouched)} else _versions_of(_saved[:{len(values)}])")
    lines.append("return _node")
    return "\n    ".join(lines) + "\n"


def _vjp_source(
    op: Op,
    arrays: tuple[str, ...],
    needs: tuple[bool, ...],
    values: tuple[str, ...],
    saves_output: bool,
    facts: tuple[str, ...],
    residuals: tuple[str, ...],
    plan: RulePlan,
    namespace: dict[str, Any],
    *,
    on_tensors: bool = False,
) -> str:
    lines = ["def vjp(self, g):"]
    names = [*values, *(["out", "out_versions"] if saves_output else []), *facts, *residuals]
    if names:
        lines += ["saved = self._saved", "if saved.__class__ is not tuple: raise self.cannot_run()", f"{', '.join(names)}, = saved"]
        tests = ["self._version"]
        found: list[str] = []
        for name in values:
            if op.variadic:
                tests.append(f"any([t._vc is not None and t._vc[0] for t in {name}])")
            else:
                present = f"{name} is not None and " if name in op.defaults else ""
                tests.append(f"({present}{name}._vc is not None and {name}._vc[0])")
                found.append(f"{name}._vc[0] if {present}{name}._vc is not None else 0")
        if found:  # parameters have versions from their initialization on
            tests = [f"(({' or '.join(tests)}) and self._version != ({', '.join(found)},))"]
        if saves_output:
            tests.append("out_versions[0]" if op.outputs == 1 else "any([v[0] for v in out_versions])")
        if values or saves_output:
            lines.append(f"if {' or '.join(tests)}: self.check_versions()")
    if saves_output and on_tensors:
        lines.append("out = self._as_output(out, 0)" if op.outputs == 1 else "out = tuple([self._as_output(o, i) for i, o in enumerate(out)])")
    if op.outputs != 1:
        lines.append("g = self.materialize(g)")
    results: dict[str, str] = {}
    for i, (arguments, rule, rule_names) in enumerate(plan):
        namespace[f"rule{i}"] = rule
        held = () if on_tensors else values
        call = [_argument_source(op, name, held, arguments, arrays, needs) for name in rule_names]
        if rule is identity:
            expression = "g"
        else:
            expression = f"g * {call[0]}" if rule is times_x1 or rule is times_x2 else f"rule{i}({', '.join(['g', *call])})"
        if len(arguments) == 1:
            results[arguments[0]] = expression
        else:
            lines.append(f"{', '.join(f'd_{a}' for a in arguments)}, = {expression}")
            results.update({a: f"d_{a}" for a in arguments})
    if op.variadic:
        lines.append(f"return {results.get(op.variadic, '()')}")
    else:
        entries = [results.get(name, "None") if need else "None" for name, need in zip(arrays, needs, strict=True)]
        lines.append(f"return ({', '.join(entries)},)")
    return "\n    ".join(lines) + "\n"


def _argument_source(op: Op, name: str, values: tuple[str, ...], arguments: tuple[str, ...], arrays: tuple[str, ...], needs: tuple[bool, ...]) -> str:
    if name == "needs":
        return repr(tuple(needs[arrays.index(argument)] for argument in arguments))
    if name in values:
        if op.variadic:
            return f"tuple([t._data for t in {name}])"
        return f"(None if {name} is None else {name}._data)" if name in op.defaults else f"{name}._data"
    return name

