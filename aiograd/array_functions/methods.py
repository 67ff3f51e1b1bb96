"""The methods of Tensor that compute: each is a function of this package.

Note [The table]
    A public function of an array (its first parameter is ``x`` or ``x1``) is a method too, unless `FUNCTIONS_ONLY` lists it; the functions of
    `method_forms` are methods only. So a method has the parameters, types and docstring of its function, and another name for a parameter of the
    function is one for the method. `install` puts the methods on `TensorMethods`, the base class of Tensor. Type checkers read them in
    ``tensors/methods.pyi``, which ``python -m tests.method_stub`` writes.
    A method for a row of one array without further arguments calls the row directly, not the function (`_fast`).

Note [numpy's meaning]
    Where numpy and PyTorch mean different things by a name, numpy's meaning is meant (``x.max(1)`` returns values only, ``x.repeat(2)`` repeats
    elements, ``x.split(2)`` cuts in two, ``x.std()`` divides by the number of elements); methods that only PyTorch has take its arguments in its
    order. ``x.sort()`` returns a sorted tensor, as numpy's function does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from aiograd.array_functions import elementwise, linalg, method_forms
from aiograd.array_functions.conversion import row
from aiograd.array_functions.names import with_other_names
from aiograd.tensors.core import refresh
from aiograd.tensors.inplace import check_in_place, replace
from aiograd.tensors.methods import TensorMethods
from aiograd.tensors.tensor import Tensor
from aiograd.tensors.unrolled import unary

Function = Callable[..., Any]

#: functions of an array that are no methods
FUNCTIONS_ONLY = frozenset(
    """
    zeros_like ones_like full_like empty_like astype cbrt real imag array_equal bitwise_invert bitwise_left_shift bitwise_right_shift gelu silu elu
    leaky_relu softplus softsign log_sigmoid permute_dims matrix_transpose expand_dims unstack pad var_mean std_mean cumulative_sum cumulative_prod
    isin unique_all unique_counts unique_inverse unique_values tensordot vecdot rand_like randint_like randn_like cdist gradient interp percentile
    append atleast_1d atleast_2d atleast_3d partition rollaxis sliding_window_view ger power mod around invert left_shift right_shift is_tensor
    convolve correlate bucketize
    """.split()
)
#: functions that run the row of their name, which their methods call directly
ROWS = """
    exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan asin acos atan sinh cosh tanh sigmoid relu erf abs floor ceil trunc
    reciprocal conj acosh asinh atanh
    """.split()
ROWS_BY_ANOTHER_NAME = {"negative": "neg", "sign": "sgn"}
#: methods that write the result of the method without the underscore in place
IN_PLACE = """
    abs_ neg_ sign_ reciprocal_ square_ exp_ exp2_ expm1_ log_ log1p_ log2_ log10_ sqrt_ rsqrt_ sin_ cos_ tan_ asin_ acos_ atan_ sinh_ cosh_ tanh_
    sigmoid_ relu_ erf_ erfc_ erfinv_ floor_ ceil_ trunc_ round_ frac_ lgamma_ digamma_ logit_ pow_ remainder_ fmod_ floor_divide_ clip_
    clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_ addmm_ addmv_ addr_ baddbmm_ nan_to_num_ tril_ triu_ cumsum_ cumprod_ masked_fill_ index_add_
    index_copy_ index_fill_ scatter_ scatter_add_
    """.split()
#: functions of `method_forms` that fill a tensor, and the methods that do so in place
FILLS = {
    "diagonal_filled": "fill_diagonal_", "uniform": "uniform_", "normal": "normal_", "exponential": "exponential_", "bernoulli_filled": "bernoulli_",
    "random": "random_",
}  # fmt: skip
#: methods that cast
CASTS = {
    "half": "float16", "float": "float32", "double": "float64", "int": "int32", "long": "int64", "short": "int16", "bool": "bool", "byte": "uint8",
    "char": "int8",
}  # fmt: skip


def install(functions: Mapping[str, Function]) -> None:
    """Put the methods on Tensor, with the other names of their parameters.

    Args:
        functions: the public functions by name.
    """
    for name, method in _table(functions).items():
        setattr(TensorMethods, name, with_other_names(method))


def _table(functions: Mapping[str, Function]) -> dict[str, Function]:
    rows = {functions[name]: name for name in ROWS} | {functions[name]: other for name, other in ROWS_BY_ANOTHER_NAME.items()}
    fast = {function: _fast(name, function) for function, name in rows.items()}
    table = {name: fast.get(function, function) for name, function in functions.items() if name not in FUNCTIONS_ONLY and _takes_array(function)}
    table |= {name: form for name, form in vars(method_forms).items() if isinstance(form, FunctionType) and form.__module__ == method_forms.__name__}
    fills = {method: table.pop(form) for form, method in FILLS.items()}
    del table["_flat"]
    table |= {"type": table.pop("type_of"), "view": table["reshape"], "copy": table["clone"], "nelement": table["numel"], "ndimension": table["dim"]}
    table |= {"qr": linalg.qr, "svd": linalg.svd, "resolve_conj": elementwise.positive}
    table |= {name: _in_place(name, function) for name, function in ({name: table[name[:-1]] for name in IN_PLACE} | fills).items()}
    table["clamp_"] = table["clip_"]
    return table | {name: _cast(dtype) for name, dtype in CASTS.items()}


def _takes_array(function: Function) -> bool:
    return function.__code__.co_varnames[:1] in (("x",), ("x1",))


def _fast(name: str, function: Function) -> Function:
    """The row `name` of one array as a method, which needs no conversion of its argument to a Tensor."""
    method: Function = functools.wraps(function)(unary(row(name)))
    return method


def _cast(dtype: str) -> Function:
    def cast(x: Tensor, /) -> Tensor:
        return x.astype(dtype, copy=False)

    cast.__doc__ = f"""The values as {dtype}.

    Args:
        x: the tensor.

    Returns:
        A Tensor; the tensor itself where it has the dtype.
    """
    return cast


def _in_place(name: str, method: Function) -> Function:
    """The method that writes the result of another into the tensor, and puts the tensor where the result is in the graph."""

    @functools.wraps(method)
    def write(self: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        check_in_place(self, name)
        refresh(self)

        def compute(old: Any) -> Any:
            return method(old, *[old if x is self else x for x in args], **kwargs)

        return replace(self, name, compute)  # type: ignore[no-any-return]

    write.__doc__ = f"In place: {(method.__doc__ or '').strip()}"
    write.__name__ = name
    return write
