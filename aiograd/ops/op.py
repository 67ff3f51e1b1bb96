"""One row per differentiable operation: a computation, and one VJP per differentiable argument.

A row is pure numpy: `forward` maps arrays to an array (or a tuple of arrays), a rule maps the gradient of the output to the
gradient of one argument. Rules are fed plain arrays in an ordinary pass, Tensors when the pass itself is differentiated, device
arrays on a device: numpy's protocols send each call where it belongs, so one rule serves all of them.

Note [Names in a rule]
    The first parameter of a rule is the gradient `g` of the output (a tuple of gradients for a row with several outputs).
    Every other parameter is looked up by name, and named values are saved, nothing else:

    ==================  =====================================================================================
    an array argument   its value (a tuple of values for a variadic argument)
    ``<array>_shape``   its shape; ``<array>_dtype`` its dtype (tuples of them for a variadic argument). Saves no data
    a static argument   its value (axis, keepdims, ...)
    ``out``             the value of the output (the tuple of values for a row with several outputs)
    ``needs``           joint rules only: which of the rule's arguments need a gradient, a tuple of bools
    a residual          rules of `Fused` only: what its forward returned beside the output
    ==================  =====================================================================================

    A rule returns a gradient of the broadcast shape; the engine undoes broadcasting and casts to the argument's dtype. A rule may
    return None for "no gradient".

Note [Tangents]
    The tangent of a row's output, J t, comes from the declaration ``jvp``:

    ==================  =====================================================================================
    ``"rule"``          J is symmetric or diagonal (element-wise rows): the rule with the tangent in place of `g`, summed over the arguments
    ``"forward"``       the row is linear in each argument: the forward with the tangent in place of the argument, summed over the arguments
    ``"linear"``        the row is linear in all arguments together: the forward of all tangents at once
    a function          of ``t``, the tangent of the argument (a tuple of them, None for none, for a row of several arguments), and of what it
                        names, as a rule does; a row with several outputs returns a tuple
    a mapping           from array arguments to ``"rule"``, ``"forward"`` or a function of the tangent of that argument, summed
    None                transposed: the rule is linear in `g`, and is itself run backward on recording arrays
    ==================  =====================================================================================

    A ufunc is element-wise, so its declaration is ``"rule"`` where none is given.

Rejected: deriving the rules' needs from a tape of numpy calls (slower, and saves too much); classes per op (PyTorch's
``Function`` style takes ten lines where a row takes one).

Source: the table style of HIPS/autograd ``numpy_vjps.py`` and of PyTorch's ``derivatives.yaml``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np

from aiograd.errors import NoRuleError

Rule = Callable[..., Any]
ComplexMode = Literal["holomorphic", "explicit", "real"]
Jvp = Literal["rule", "forward", "linear"] | Rule | Mapping[str, Literal["rule", "forward"] | Rule] | None

#: every row by name
ROWS: dict[str, Op] = {}
#: numpy ufunc -> the row that answers for it in ``Tensor.__array_ufunc__``
UFUNCS: dict[np.ufunc, Op] = {}
#: numpy function -> what answers for it in ``Tensor.__array_function__``; called with numpy's own arguments
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


class Fused(NamedTuple):
    """A compiled or hand-fused pair of kernels for a row, used when the pass is not itself differentiated.

    `forward` takes the row's arguments and returns ``(out, *residuals)``; `rules` are as the row's own and may also name
    residuals. The row's own (`define`) is for host arrays; a device may have one too (`aiograd.running.devices.Device.fused`). The row's plain rules
    stay the reference, and serve higher orders and devices that have none. `cost` stands for the row's where compiled kernels are in use.
    """

    forward: Callable[..., tuple[Any, ...]]
    residuals: tuple[str, ...]
    rules: Mapping[str, Rule] = MappingProxyType({})
    joint: Mapping[tuple[str, ...], Rule] = MappingProxyType({})
    cost: float | Callable[..., float] | None = None


class Op:
    """A row. Calling it dispatches on its arguments (see `define` for the fields).

    Dispatch: the argument with a type that defines ``__aiograd_op__(op, args, kwargs)`` with the highest ``__aiograd_priority__``
    answers (a Tensor records, a device array may launch its own kernel); with none, `forward` runs on the arrays.
    """

    __slots__ = (
        "__name__", "name", "node_name", "arrays", "variadic", "statics", "defaults", "forward", "rules", "joint", "outputs",
        "differentiable_outputs", "view", "complex", "cost", "fused", "recorded", "recorder", "lean", "binder", "jvp", "pushers",
        "norm",
    )

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        rules: Mapping[str, Rule],
        joint: Mapping[tuple[str, ...], Rule],
        *,
        outputs: int | None,
        differentiable_outputs: Sequence[int] | None,
        view: bool,
        complex: ComplexMode,
        cost: float | Callable[..., float],
        fused: Fused | None,
        recorded: Mapping[str, Rule] = MappingProxyType({}),
        jvp: Jvp = None,
    ) -> None:
        self.name = self.__name__ = name
        self.node_name = "".join(part.capitalize() for part in name.split("_")) + "Backward"
        self.arrays, self.variadic, self.statics, self.defaults = _signature(forward)
        self.forward = forward
        self.rules = dict(rules)
        self.joint = dict(joint)
        self.outputs = outputs
        self.differentiable_outputs = None if differentiable_outputs is None else tuple(differentiable_outputs)
        self.view = view
        self.complex = complex
        self.cost = cost
        self.fused = fused
        self.recorded = dict(recorded)
        #: set by the layer that records (it caches the function compiled from this row here)
        self.recorder: Any = None
        #: likewise, for the most common case, by which arguments need a gradient
        self.lean: dict[tuple[bool, ...], Any] = {}
        #: likewise: splits a call's arguments into arrays and static arguments
        self.binder: Callable[..., tuple[list[Any], dict[str, Any]]] | None = None
        #: per array argument that a gradient of outer products belongs to, its factors; see `define`
        self.norm: Mapping[str, Rule] = MappingProxyType({})
        if jvp is None and isinstance(forward, np.ufunc) and forward.signature is None and outputs == 1:
            jvp = "rule"
        #: how the tangent of the output is made; see Note [Tangents]
        self.jvp: Jvp = jvp
        #: set by the layer of forward mode (it caches what it makes of `jvp` here)
        self.pushers: dict[Any, Any] = {}
        self._check_rules(self.rules, self.joint)
        self._check_rules(self.recorded, {})
        self._check_jvp()
        if fused is not None:
            self.check_fused(fused)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        best: Any = None
        for arg in args:
            cls = type(arg)
            if cls is not np.ndarray and hasattr(cls, "__aiograd_op__") and (best is None or cls.__aiograd_priority__ > best.__aiograd_priority__):
                best = arg
        if best is not None:
            result = best.__aiograd_op__(self, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Op {self.name}>"

    def signature(self) -> str:
        """The row's parameters, for messages."""
        arrays = [f"*{self.variadic}"] if self.variadic else [*self.arrays, "/"]
        return f"({', '.join([*arrays, *(f'{name}={self.defaults[name]!r}' if name in self.defaults else name for name in self.statics)])})"

    @property
    def differentiable(self) -> bool:
        """True if any argument has a rule."""
        return bool(self.rules or self.joint)

    def rule_plan(self, rules: Mapping[str, Rule], joint: Mapping[tuple[str, ...], Rule]) -> list[tuple[tuple[str, ...], Rule, tuple[str, ...]]]:
        """``(arguments, rule, names after g)`` for each rule, in the order of definition."""
        plan = [((argument,), rule, rule_names(rule)) for argument, rule in rules.items()]
        return plan + [(arguments, rule, rule_names(rule)) for arguments, rule in joint.items()]

    def check_fused(self, fused: Fused) -> None:
        """Raise where a pair of kernels does not fit the row.

        Raises:
            TypeError: a rule names something that neither the row nor the kernels have.
        """
        self._check_rules(fused.rules, fused.joint, fused.residuals)

    def _check_jvp(self) -> None:
        jvp = self.jvp
        if callable(jvp):
            self._check_rules({}, {tuple(self.arrays) or (str(self.variadic),): jvp})
        elif isinstance(jvp, Mapping):
            self._check_rules({argument: way for argument, way in jvp.items() if callable(way)}, {})
        elif jvp not in (None, "rule", "forward", "linear"):
            raise TypeError(f"row {self.name!r}: jvp is {jvp!r}, expected 'rule', 'forward', 'linear', a function or a mapping of arguments")

    def _check_rules(self, rules: Mapping[str, Rule], joint: Mapping[tuple[str, ...], Rule], residuals: Sequence[str] = ()) -> None:
        known = {"out", *self.arrays, *self.statics, *residuals}
        known.update(f"{a}_shape" for a in self.arrays)
        known.update(f"{a}_dtype" for a in self.arrays)
        if self.variadic:
            known.update((self.variadic, f"{self.variadic}_shape", f"{self.variadic}_dtype"))
        targets = {*self.arrays, *([self.variadic] if self.variadic else [])}
        for arguments, _, wanted in self.rule_plan(rules, joint):
            allowed = known | {"needs"} if arguments in joint else known
            if not set(arguments) <= targets:
                raise TypeError(f"row {self.name!r}: a rule is keyed by {arguments}, its array arguments are {sorted(targets)}")
            if not set(wanted) <= allowed:
                raise TypeError(f"row {self.name!r}: the rule for {arguments} names {sorted(set(wanted) - allowed)}, known are {sorted(allowed)}")


def define(
    name: str,
    forward: Callable[..., Any],
    *,
    joint: Mapping[tuple[str, ...], Rule] | None = None,
    outputs: int | None = 1,
    differentiable_outputs: Sequence[int] | None = None,
    view: bool = False,
    complex: ComplexMode = "real",
    cost: float | Callable[..., float] = 1.0,
    fused: Fused | None = None,
    recorded: Mapping[str, Rule] | None = None,
    jvp: Jvp = None,
    numpy: Sequence[Callable[..., Any]] = (),
    norm: Mapping[str, Rule] | None = None,
    **rules: Rule,
) -> Op:
    """Add a row to the table and return its `Op`.

    Args:
        name: ``mul`` makes the node ``MulBackward``.
        forward: a ufunc (its arguments are ``x``, or ``x1, x2``), or a function: its positional-only parameters (or ``*arrays``) are
            the array arguments and its other parameters are static. It must not modify its arguments.
        rules: VJP per array argument, keyed by the argument's name; see Note [Names in a rule].
        joint: VJPs that give the gradients of several arguments at once, ``{("x", "weight"): rule}``; they return a tuple.
        outputs: how many arrays `forward` returns; None: a tuple, with a length that depends on the arguments.
        differentiable_outputs: indices of outputs that carry gradients (all by default).
        view: the result may share memory with the first array argument.
        complex: ``holomorphic``: the rules multiply `g` by derivatives of a holomorphic function, the conjugate convention is applied
            around them; ``explicit``: the rules follow the convention themselves; ``real``: complex input is refused when it needs
            a gradient.
        cost: estimated nanoseconds of backward per element of the largest array that takes part, or a function
            ``cost(output_shape, input_shapes) -> nanoseconds``.
        fused: compiled kernels that must agree with the plain rules.
        recorded: rules for Tensors, where a pass records a graph, in place of those for the same arguments: the same formulas by rows of their
            own, so that fewer nodes are recorded. They name the same values as the plain rules.
        jvp: how the tangent of the output is made of those of the arguments; see Note [Tangents].
        numpy: numpy functions this row answers for when they are called on Tensors.
        norm: for arguments whose gradient, where they are vectors or matrices, is a sum of outer products: rules that return the factors,
            a (..., m) and b (..., n), to be summed over the axes in front. The norm of the gradient follows without it
            (`aiograd.grad_norms_per_sample`). Integers a (...) stand for vectors of zeros with a one there.

    Raises:
        TypeError: a rule names something the row does not have; ValueError: the name is taken.
    """
    if name in ROWS:
        raise ValueError(f"row {name!r} is defined twice")
    op = Op(
        name, forward, rules, joint or {}, outputs=outputs, differentiable_outputs=differentiable_outputs, view=view, complex=complex,
        cost=cost, fused=fused, recorded=recorded or {}, jvp=jvp,
    )
    if norm:
        op._check_rules(norm, {})
        op.norm = dict(norm)
    ROWS[name] = op
    if isinstance(forward, np.ufunc):
        UFUNCS[forward] = op
    for function in numpy:
        if isinstance(function, np.ufunc):
            UFUNCS[function] = op
        else:
            FUNCTIONS[function] = op
    return op


def implements(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function answers for these numpy functions on Tensors (it composes rows; it is no row itself)."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            FUNCTIONS[function] = implementation
        return implementation

    return register


def answer(functions: Mapping[Any, Callable[..., Any]]) -> None:
    """Answer for numpy functions on Tensors, as `implements` does, each by an expression of its arguments."""
    FUNCTIONS.update(functions)


def no_derivative(what: str) -> Rule:
    """The rule of an argument without a closed form of the derivative: it raises, so that no gradient is zero in silence.

    Args:
        what: the derivative, such as "gammainc by a".
    """

    def rule(g: Any) -> Any:
        raise NoRuleError(f"the derivative of {what} has no closed form, and this argument requires grad. Pass it detached: x.detach().")

    return rule


def nothing(g: Any) -> None:
    """The rule of an argument on which the output depends by choices alone, such as a condition: there is no gradient."""


def rule_names(rule: Rule) -> tuple[str, ...]:
    """The names a rule asks for, after ``g``."""
    if isinstance(rule, np.ufunc):
        raise TypeError("a rule must have named parameters: wrap the ufunc in a lambda")
    if _is_plain(rule):
        code = rule.__code__
        return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return tuple(inspect.signature(rule).parameters)[1:]


def _is_plain(function: Callable[..., Any]) -> TypeGuard[FunctionType]:
    """True of a Python function with code that names its parameters: reading that takes a tenth of the time of `inspect.signature`."""
    uncommon = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return isinstance(function, FunctionType) and not function.__code__.co_flags & uncommon and "__wrapped__" not in vars(function)


def _signature(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str | None, tuple[str, ...], dict[str, Any]]:
    if isinstance(forward, np.ufunc):
        return (("x",) if forward.nin == 1 else tuple(f"x{i + 1}" for i in range(forward.nin))), None, (), {}
    if _is_plain(forward):
        code, values = forward.__code__, forward.__defaults__ or ()
        names, first, end = code.co_varnames, code.co_posonlyargcount, code.co_argcount
        defaults = {**dict(zip(names[end - len(values) : end], values, strict=True)), **(forward.__kwdefaults__ or {})}
        return names[:first], None, names[first : end + code.co_kwonlyargcount], defaults
    arrays: list[str] = []
    statics: list[str] = []
    variadic: str | None = None
    defaults = {}
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            arrays.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            variadic = parameter.name
        else:
            statics.append(parameter.name)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    return tuple(arrays), variadic, tuple(statics), defaults
