"""Args and Returns of the functions of `aiograd.nn.functional` and `aiograd.nn.init`: texts that many functions share stand here once.

The first line of a docstring is the function's own; `document` puts its Args and Returns behind that, before its Raises and examples.
Classes of modules take theirs from the function, see `aiograd.nn.function_module`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

_REDUCED = "A scalar, or elements of the shape of `input` where `reduction` is \"none\"."
#: functions that draw values by the numbers of inputs and outputs of a unit
_SCALED = ("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_")

_OVER_AXES, _OVER_CHANNELS = ("layer_norm", "rms_norm"), ("group_norm", "batch_norm", "instance_norm")

#: text by parameter, or by ``function.parameter``
PARAMETERS = {
    "input": "any shape",
    "dim": "the axis; the last by default",
    "axis": "another name of `dim`",
    "dtype": "the dtype that the input is cast to first; None: its own",
    "approximate": '"none", or "tanh" for the usual approximation',
    "alpha": "the limit for large negative elements is ``-alpha``",
    "celu.alpha": "the limit for large negative elements is ``-alpha``; not 0",
    "negative_slope": "the factor of negative elements",
    "beta": "sharpness of the bend",
    "softplus.threshold": "where ``beta * x`` is above it the result is `x` itself, as in PyTorch; None: nowhere, for accuracy does not need it",
    "eps": "numbers are limited to [eps, 1 - eps] first; None: they are not",
    "logit.input": "numbers in [0, 1]",
    "glu.input": "any shape with an even length along the axis",
    "min_val": "the lower limit",
    "max_val": "the upper limit, above the lower one",
    "hardshrink.lambd": "the limit",
    "lambd": "the distance, at least 0",
    "threshold": "the threshold",
    "value": "the value of elements that are not above the threshold",
    "p": "the probability, in [0, 1]",
    "training": "True to drop",
    "generator": "the generator to draw from; None: the default generator of the running task",
    "dropout.input": "any shape, real floating",
    "dropout1d.input": "(N, C, L) or (C, L)",
    "dropout2d.input": "(N, C, H, W); three axes are (N, C, L), as in PyTorch",
    "dropout3d.input": "(N, C, D, H, W) or (C, D, H, W)",
    "bias": "(out,) or None",
    "groups": "channels fall into so many groups that do not mix",
    "ceil_mode": "True if a last window may reach over the edge; what lies beyond the padding never counts",
    "return_indices": "True to return where the maxima are as well",
    "count_include_pad": "True if padding counts as values",
    "divisor_override": "the divisor of the sums, instead",
    **{f"{name}.input": "of a shape that ends with `normalized_shape`" for name in _OVER_AXES},
    **{f"{name}.weight": "of the shape `normalized_shape`, or None" for name in _OVER_AXES},
    "normalized_shape": "extents of the axes to normalise over together",
    "layer_norm.bias": "of the shape `normalized_shape`, or None",
    "rms_norm.eps": "added to the mean square; None: the machine epsilon of the dtype",
    **{f"{name}.input": "(N, C, ...)" for name in _OVER_CHANNELS},
    **{f"{name}.{parameter}": "(C,) or None" for name in _OVER_CHANNELS for parameter in ("weight", "bias")},
    **{f"{name}.eps": "added to the variance" for name in ("layer_norm", *_OVER_CHANNELS)},
    "num_groups": "number of groups, which divides C",
    **dict.fromkeys(("running_mean", "running_var"), "(C,) or None; updated in place while measuring (with the unbiased variance)"),
    **dict.fromkeys(("batch_norm.training", "use_input_stats"), "True to measure, rather than use the running statistics"),
    "momentum": "the part of the running statistics that a batch replaces",
    "reduction": '"mean", "sum" or "none"',
    "target": "of the shape of `input`",
    "delta": "the difference at which the square ends",
    "smooth_l1_loss.beta": "the difference at which the square ends",
    "nll_loss.input": "log-probabilities, (N, classes, ...) or (classes,)",
    "nll_loss.target": "integers, (N, ...) or a scalar",
    "nll_loss.weight": "(classes,): how much each class counts, or None",
    "ignore_index": "a class that does not count",
    "l1_loss.input": "predictions",
    "mse_loss.input": "predictions",
    "huber_loss.input": "predictions",
    "smooth_l1_loss.input": "predictions",
    "weight": "how much each element counts, broadcast to the input; None: all the same",
    "pos_weight": "how much the positive part counts, broadcast to the input; None: as much as the other",
    "binary_cross_entropy.input": "probabilities in [0, 1]. Logarithms are cut off at -100, so that 0 and 1 have finite losses",
    "binary_cross_entropy.target": "probabilities of the same shape",
    "binary_cross_entropy_with_logits.input": "logits",
    "binary_cross_entropy_with_logits.target": "probabilities of the same shape",
    "tensor": "real floating, any shape",
    **dict.fromkeys(("constant_.tensor", "zeros_.tensor", "ones_.tensor"), "any shape"),
    "eye_.tensor": "a matrix",
    **{f"{name}.tensor": "at least two axes, (out, in, ...)" for name in _SCALED},
    "a": "the least value",
    "b": "the largest value",
    "uniform_.b": "the end, not included but by rounding",
    "mean": "the mean",
    "std": "the standard deviation, at least 0",
    "trunc_normal_.mean": "the mean before cutting off",
    "trunc_normal_.std": "the standard deviation before cutting off, above 0",
    "val": "the number",
    "gain": "the factor, see `calculate_gain`",
    **dict.fromkeys(("kaiming_uniform_.a", "kaiming_normal_.a"), 'the slope of "leaky_relu"'),
    "mode": '"fan_in" keeps variances forward, "fan_out" backward',
    "nonlinearity": "as of `calculate_gain`",
}

RETURNS = {
    "activations": "A Tensor of the shape of `input`.",
    "piecewise": "A Tensor of the shape of `input`.",
    "glu": "A Tensor of half the length along the axis.",
    "attentions": "A Tensor of the shape of `input`; `input` itself if nothing is dropped.",
    "losses": _REDUCED,
    "nll_loss": "A scalar, or one loss per sample where `reduction` is \"none\".",
    **dict.fromkeys((*_OVER_AXES, *_OVER_CHANNELS), "A Tensor of the shape of `input`."),
    "init": "`tensor`.",
}


def _windows(axes: str, taps: str, setting: str) -> None:
    """Texts of convolutions and pooling over lines, images or volumes."""
    n, after = taps.count(",") + 1, axes.replace(",", "',") + "'"
    of_kind: dict[str, dict[str, str]] = {
        "conv": {"input": f"(N, in, {axes}) or (in, {axes})", "weight": f"(out, in / groups, {taps})",
                 "stride": f"distance of windows, {setting}", "dilation": f"distance of the elements of a window, {setting}",
                 "padding": f'zeros on both sides, {setting}; "valid" is none, "same" keeps the extents (stride 1)'},
        "conv_transpose": {"input": f"(N, in, {axes}) or (in, {axes})", "weight": f"(in, out / groups, {taps})",
                           "stride": f"stride of that convolution, {setting}", "dilation": f"dilation of that convolution, {setting}",
                           "padding": "padding of that convolution: so much is cut off on both sides",
                           "output_padding": "the number by which the output is longer than the shortest possible; below stride or dilation"},
        "max_pool": {"padding": "border on both sides, below every value", "dilation": f"distance of the elements of a window, {setting}"},
        "avg_pool": {"padding": "zeros on both sides"},
    }  # fmt: skip
    for kind, texts in of_kind.items():
        if "pool" in kind:
            texts |= {"input": f"(N, C, {axes}) or (C, {axes})", "kernel_size": setting}
            texts |= {"stride": f"distance of windows, {setting}; None: `kernel_size`"}
        channels = "C" if "pool" in kind else "out"
        PARAMETERS.update({f"{kind}{n}d.{name}": text for name, text in texts.items()})
        RETURNS[f"{kind}{n}d"] = f"(N, {channels}, {after}) or ({channels}, {after})."


_windows("L", "k", "an int")
_windows("H, W", "kh, kw", "an int or (height, width)")
_windows("D, H, W", "kd, kh, kw", "an int or (depth, height, width)")
for _name in ("max_pool1d", "max_pool2d"):
    RETURNS[_name] = f"{RETURNS[_name][:-1]}; with `return_indices` a pair of it and int64 places, row by row, in the plane of each."


def document(module: ModuleType) -> None:
    """Put Args and Returns into the docstrings of a module's public functions that have none."""
    family = module.__name__.rpartition(".")[2]
    for name, function in vars(module).items():
        if isinstance(function, FunctionType) and function.__module__ == module.__name__ and not name.startswith("_"):
            text = inspect.cleandoc(function.__doc__ or "")
            known = {each: PARAMETERS.get(f"{name}.{each}", PARAMETERS.get(each)) for each in inspect.signature(function).parameters}
            returned = RETURNS.get(name, RETURNS.get(family))
            if text and "Args:" not in text and returned is not None and None not in known.values():
                first, _, rest = text.partition("\n\n")
                entries = [f"    {each}: {meaning}." for each, meaning in known.items()]
                function.__doc__ = "\n\n".join([first, "\n".join(["Args:", *entries]), f"Returns:\n    {returned}", *([rest] if rest else [])])


def entries_of(text: str, names: Collection[str]) -> Iterator[str]:
    """The entries under Args that are about the named parameters, each with its lines."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", inspect.cleandoc(text), re.MULTILINE)
    for entry in re.findall(r"^    \w.*(?:\n     +.*)*", section[1] if section else "", re.MULTILINE):
        about, _, meaning = entry.partition(":")
        if wanted := [name for name in re.findall(r"\w+", about) if name in names]:
            yield f"    {', '.join(wanted)}:{meaning}"


def put_behind_first_line(cls: type, text: str, more: str = "") -> None:
    """Put text between the first line of a class's docstring and the rest, and more at the end of that line."""
    if own := inspect.cleandoc(cls.__doc__ or ""):  # there are no docstrings under ``python -OO``
        first, _, rest = own.partition("\n\n")
        cls.__doc__ = "\n\n".join(part for part in (f"{first.rstrip('.')}: {more}" if more else first, text, rest) if part)


def summary_of(function: Any) -> str:
    """The first paragraph of a docstring."""
    return inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
