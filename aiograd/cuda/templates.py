"""Element-wise operations: for each, the text of what one element of its result is.

A template is called with a function that gives an intermediate result a name, the precision (``f4``, ``f8``, or the letter and size of an
integer, ``b1`` for booleans) in which numpy computes, and the texts of its arguments, which are names and may be repeated. Texts may call the
functions of `aiograd.cuda.kernels.scalar` as ``name_<precision>`` and name the constants that `aiograd.cuda.generate` adds.
"""

from __future__ import annotations

from collections.abc import Callable

Template = Callable[..., str]

#: name of an operation -> its template
TEMPLATES: dict[str, Template] = {}


def _text(text: str) -> Template:
    return lambda let, T, *args: text.format(*args, T=T)


def _float_or_int(floating: str, integral: str, boolean: str | None = None) -> Template:
    def template(let: Callable[[str], str], T: str, *args: str) -> str:
        chosen = floating if T[0] == "f" else boolean if T == "b1" and boolean is not None else integral
        return chosen.format(*args, T=T)

    return template


def _remainder(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    if T[0] != "f":
        return f"({a} % {b} if {b} != 0 else {T}(0))"  # a bare 0 would make numba mix uint64 and int64, which is float64
    rest = let(f"fmod_{T}({a}, {b})")
    across = let(f"(({b} < zero_{T}) != ({rest} < zero_{T}))")
    return f"(copysign_{T}(zero_{T}, {b}) if {rest} == zero_{T} else ({rest} + {b} if {across} else {rest}))"


def _fmod(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    if T[0] == "f":
        return f"fmod_{T}({a}, {b})"
    rest = let(f"{T}({_remainder(let, T, a, b)})")
    return rest if T[0] == "u" else f"({rest} - {b} if {rest} != 0 and ({a} < 0) != ({b} < 0) else {rest})"


def _floor_divide(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    if T[0] != "f":
        return f"({a} // {b} if {b} != 0 else {T}(0))"
    rest = let(f"fmod_{T}({a}, {b})")
    quotient = let(f"({a} - {rest}) / {b}")
    lowered = let(f"({quotient} - one_{T} if ({rest} != zero_{T} and (({b} < zero_{T}) != ({rest} < zero_{T}))) else {quotient})")
    whole = let(f"floor_{T}({lowered})")
    rounded = let(f"({whole} + one_{T} if {lowered} - {whole} > half_{T} else {whole})")
    return f"({a} / {b} if {b} == zero_{T} else (copysign_{T}(zero_{T}, {a} / {b}) if {lowered} == zero_{T} else {rounded}))"


def _logaddexp(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    larger = let(f"({a} if {a} >= {b} or {a} != {a} else {b})")
    gap = let(f"-fabs_{T}({a} - {b})")
    return f"({larger} + ln2_{T} if {a} == {b} else {larger} + log1p_{T}(exp_{T}({gap})))"


def _logaddexp2(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    larger = let(f"({a} if {a} >= {b} or {a} != {a} else {b})")
    gap = let(f"-fabs_{T}({a} - {b})")
    return f"({larger} + one_{T} if {a} == {b} else {larger} + mul_{T}(log1p_{T}(exp2_{T}({gap})), log2e_{T}))"


def _power(let: Callable[[str], str], T: str, a: str, b: str) -> str:
    """By squaring for integers: 0 for a negative exponent, where the base is neither 1 nor -1."""
    if T[0] == "f":
        return f"pow_{T}({a}, {b})"
    result, square = let(f"{T}(1)"), a
    for bit in range(8 * int(T[1:])):
        result = let(f"({T}({result} * {square}) if ({b} >> {T}({bit})) & {T}(1) else {result})")
        square = let(f"{T}({square} * {square})")
    if T[0] == "u":
        return result
    odd = let(f"({b} & {T}(1)) != 0")
    return f"({result} if {b} >= 0 else ({T}(1) if {a} == 1 else (({a} if {odd} else {T}(1)) if {a} == -1 else {T}(0))))"


def _absolute(let: Callable[[str], str], T: str, a: str) -> str:
    return f"fabs_{T}({a})" if T[0] == "f" else f"({a} if {a} >= 0 else -{a})" if T[0] == "i" else a


def _shifted(symbol: str, beyond: str) -> Template:
    def template(let: Callable[[str], str], T: str, a: str, b: str) -> str:
        return f"({T}({a} {symbol} {b}) if {b} >= 0 and {b} < {8 * int(T[1:])} else {beyond.format(a, T=T)})"

    return template


_FLOAT = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p", "sqrt": "sqrt",
    "cbrt": "cbrt", "sin": "sin", "cos": "cos", "tan": "tan", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "fabs": "fabs", "arctan2": "atan2",
    "hypot": "hypot", "copysign": "copysign", "nextafter": "nextafter", "erf": "erf", "erfc": "erfc",
}  # fmt: skip

for _name, _function in _FLOAT.items():
    TEMPLATES[_name] = _text(_function + "_{T}(" + ("{0}, {1}" if _name in ("arctan2", "hypot", "copysign", "nextafter") else "{0}") + ")")

TEMPLATES |= {
    "add": _float_or_int("{0} + {1}", "{0} + {1}", "({0} or {1})"),
    "subtract": _text("{0} - {1}"),
    "multiply": _float_or_int("mul_{T}({0}, {1})", "{0} * {1}", "({0} and {1})"),
    "divide": _text("{0} / {1}"),
    "negative": _text("-{0}"),
    "positive": _text("{0}"),
    "cast": _text("{0}"),
    "conjugate": _text("{0}"),
    "absolute": _absolute,
    "square": _float_or_int("mul_{T}({0}, {0})", "{0} * {0}"),
    "reciprocal": _text("one_{T} / {0}"),
    "power": _power,
    "float_power": _text("pow_{T}({0}, {1})"),
    "fmod": _fmod,
    "remainder": _remainder,
    "floor_divide": _floor_divide,
    "logaddexp": _logaddexp,
    "logaddexp2": _logaddexp2,
    "ldexp": _text("ldexp_{T}({0}, i4(min(max({1}, -9999), 9999)))"),
    "sigmoid": _text("one_{T} / (one_{T} + exp_{T}(-{0}))"),
    "nan_to_num": _text("({1} if {0} != {0} else (({2} if {0} > zero_{T} else {3}) if isinf_{T}({0}) else {0}))"),
    "deg2rad": _text("mul_{T}({0}, deg2rad_{T})"),
    "radians": _text("mul_{T}({0}, deg2rad_{T})"),
    "rad2deg": _text("mul_{T}({0}, rad2deg_{T})"),
    "degrees": _text("mul_{T}({0}, rad2deg_{T})"),
    "floor": _float_or_int("floor_{T}({0})", "{0}"),
    "ceil": _float_or_int("ceil_{T}({0})", "{0}"),
    "trunc": _float_or_int("trunc_{T}({0})", "{0}"),
    "rint": _float_or_int("rint_{T}({0})", "{0}"),
    "sign": _float_or_int(
        "(one_{T} if {0} > zero_{T} else (-one_{T} if {0} < zero_{T} else ({0} if {0} != {0} else zero_{T})))",
        "(1 if {0} > 0 else (-1 if {0} < 0 else 0))",
    ),
    "signbit": _text("(copysign_{T}(one_{T}, {0}) < zero_{T})"),
    "heaviside": _text("({0} if {0} != {0} else (zero_{T} if {0} < zero_{T} else (one_{T} if {0} > zero_{T} else {1})))"),
    "maximum": _float_or_int("({0} if ({0} >= {1} or {0} != {0}) else {1})", "({0} if {0} >= {1} else {1})", "({0} or {1})"),
    "minimum": _float_or_int("({0} if ({0} <= {1} or {0} != {0}) else {1})", "({0} if {0} <= {1} else {1})", "({0} and {1})"),
    "fmax": _float_or_int("({0} if ({0} >= {1} or {1} != {1}) else {1})", "({0} if {0} >= {1} else {1})", "({0} or {1})"),
    "fmin": _float_or_int("({0} if ({0} <= {1} or {1} != {1}) else {1})", "({0} if {0} <= {1} else {1})", "({0} and {1})"),
    "isnan": _text("({0} != {0})"),
    "isinf": _float_or_int("isinf_{T}({0})", "({0} != {0})"),
    "isfinite": _float_or_int("isfinite_{T}({0})", "({0} == {0})"),
    "equal": _text("({0} == {1})"),
    "not_equal": _text("({0} != {1})"),
    "less": _text("({0} < {1})"),
    "less_equal": _text("({0} <= {1})"),
    "greater": _text("({0} > {1})"),
    "greater_equal": _text("({0} >= {1})"),
    "logical_and": _text("(({0} != 0) and ({1} != 0))"),
    "logical_or": _text("(({0} != 0) or ({1} != 0))"),
    "logical_xor": _text("(({0} != 0) != ({1} != 0))"),
    "logical_not": _text("({0} == 0)"),
    "bitwise_and": _float_or_int("", "{0} & {1}", "({0} and {1})"),
    "bitwise_or": _float_or_int("", "{0} | {1}", "({0} or {1})"),
    "bitwise_xor": _float_or_int("", "{0} ^ {1}", "({0} != {1})"),
    "left_shift": _shifted("<<", "{T}(0)"),
    "right_shift": _shifted(">>", "{T}(-1 if {0} < 0 else 0)"),
    "invert": _float_or_int("", "~{0}", "(not {0})"),
    "where": _text("({1} if {0} else {2})"),
}

_REAL = (
    "divide reciprocal float_power logaddexp logaddexp2 ldexp sigmoid nan_to_num deg2rad radians rad2deg degrees heaviside signbit"
).split()
_NUMBERS = "power fmod subtract negative positive square sign remainder floor_divide floor ceil trunc rint".split()

#: name -> kinds of numbers that its template takes; names that are not listed take floats, integers and booleans
KINDS = {
    **dict.fromkeys((*_FLOAT, *_REAL), "f"),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "invert"), "iub"),
    **dict.fromkeys(("left_shift", "right_shift"), "iu"),
    **dict.fromkeys(_NUMBERS, "fiu"),
}
