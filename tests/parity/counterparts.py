"""Which torch callable computes what a row computes: taken with the row's arguments, arrays as tensors and array-valued settings too.

Note [Adjoints]
    Rows that are the adjoint of another (`col2im`, `getitem_adjoint`, the gradients of convolutions and pools) have no function of their own
    in torch: their counterpart differentiates the other one, at zero where that is linear.

Where a domain prepares arguments or finishes results (see `tests.ops.domain`), the counterpart does so as well, in torch's terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Counterpart = Callable[..., Any]
Tensor = torch.Tensor


def adjoint(function: Callable[[Tensor], Tensor], y: Tensor, shape: Any, at: Tensor | None = None) -> Tensor:
    """The adjoint of a function linear around `at` (zeros of `shape`), applied to `y`."""
    x = torch.zeros(tuple(shape), dtype=y.dtype, requires_grad=True) if at is None else at
    return torch.autograd.grad(function(x), x, y, create_graph=True, allow_unused=True, materialize_grads=True)[0]


# -------------------------------------------------------------------- reductions and shapes


def all_axes(x: Tensor, axis: Any) -> tuple[int, ...]:
    """Axes as a tuple, all of them for None."""
    return tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)


def reduction(function: Callable[..., Tensor]) -> Counterpart:
    """A torch reduction over a tuple of axes."""
    return lambda x, axis=None, keepdims=False: function(x, all_axes(x, axis), keepdims)


def moment(function: Callable[..., Tensor]) -> Counterpart:
    """var or std."""
    return lambda x, axis=None, correction=0.0, keepdims=False: function(x, all_axes(x, axis), correction=correction, keepdim=keepdims)


def prod(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Over several axes, one after the other."""
    for a in sorted((a % max(x.ndim, 1) for a in all_axes(x, axis)), reverse=True):
        x = torch.prod(x, a, keepdim=keepdims)
    return x


def scan(function: Callable[[Tensor, int], Tensor]) -> Counterpart:
    """cumsum or cumprod, from either end."""

    def scanned(x: Tensor, axis: int = -1, reverse: bool = False) -> Tensor:
        return torch.flip(function(torch.flip(x, (axis,)), axis), (axis,)) if reverse else function(x, axis)

    return scanned


def vector_norm(x: Tensor, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Tensor:
    """torch.linalg.vector_norm."""
    return torch.linalg.vector_norm(x, ord, None if axis is None else all_axes(x, axis), keepdims)


def squeeze(x: Tensor, axis: Any = None) -> Tensor:
    """torch.squeeze."""
    return torch.squeeze(x) if axis is None else torch.squeeze(x, all_axes(x, axis))


def unsqueeze(x: Tensor, axis: Any = 0) -> Tensor:
    """torch.unsqueeze, one axis after the other."""
    axes = (axis,) if isinstance(axis, int) else axis
    for a in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = torch.unsqueeze(x, a)
    return x


def constant_pad(x: Tensor, pad_width: Any, value: float = 0.0) -> Tensor:
    """torch.nn.functional.pad, which counts axes from the last."""
    pairs = np.broadcast_to(np.asarray(pad_width).reshape(-1, 2) if x.ndim else np.empty((0, 2)), (x.ndim, 2))
    return F.pad(x, [int(width) for pair in pairs[::-1] for width in pair], value=value)


def roll(x: Tensor, shift: Any, axis: Any = None) -> Tensor:
    """torch.roll."""
    return torch.roll(x, shift, axis) if axis is not None else torch.roll(x, shift)


# -------------------------------------------------------------------- indexing


def positions(shape: Any, index: Any) -> Tensor:
    """Which elements an index of numpy's selects, as flat positions: torch has no negative steps."""
    index = tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)
    return torch.from_numpy(np.array(np.arange(int(np.prod(shape))).reshape(shape)[index]))


def _plain(index: Any) -> Any:
    return index.numpy() if isinstance(index, Tensor) else index


def select(x: Tensor, index: Any) -> Tensor:
    """Indexing as numpy does it."""
    return x.reshape(-1)[positions(tuple(x.shape), index)]


def setitem(x: Tensor, value: Tensor, index: Any) -> Tensor:
    """A copy of `x` with a part replaced."""
    chosen = positions(tuple(x.shape), index)
    extra = value.ndim - chosen.ndim
    value = (value.reshape(value.shape[extra:]) if extra > 0 else value).expand(chosen.shape).reshape(-1)
    last = {int(place): i for i, place in enumerate(chosen.reshape(-1))}  # torch leaves open which of several values stays
    places, kept = torch.tensor(list(last), dtype=torch.int64), torch.tensor(list(last.values()), dtype=torch.int64)
    return x.reshape(-1).index_put((places,), value[kept]).reshape(x.shape)


def take(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Slices along an axis."""
    return x[(slice(None),) * (axis % x.ndim) + (indices,)]


# -------------------------------------------------------------------- linear algebra


def symmetric(x: Tensor) -> Tensor:
    """As the domain of eigh prepares its argument."""
    return (x + x.mH) * 0.5


def eigh(x: Tensor) -> Any:
    """Eigenvectors without their signs."""
    values, vectors = torch.linalg.eigh(symmetric(x))
    return values, torch.real(vectors * vectors.conj())


def svd(x: Tensor, full_matrices: bool = False) -> Any:
    """Singular vectors without their signs; the full ones that belong to no singular value are anybody's and cut off."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    both = u @ vh
    imaginary = torch.imag(both) if both.is_complex() else torch.zeros_like(both)
    return torch.real(u * u.conj()), s, torch.real(vh * vh.conj()), torch.real(both), imaginary


def cofactors(x: Tensor) -> Tensor:
    """Of an invertible matrix."""
    return torch.linalg.det(x)[..., None, None] * torch.linalg.inv(x).mT


def cofactors_grad(y: Tensor, x: Tensor) -> Tensor:
    """Of an invertible matrix: the gradient of ``sum(y * cofactors(x))``."""
    inverse = torch.linalg.inv(x).mT
    whole = (y * inverse).sum((-2, -1))[..., None, None] * inverse - inverse @ y.mT @ inverse
    return torch.linalg.det(x)[..., None, None] * whole


# -------------------------------------------------------------------- elementwise


def sinc(x: Tensor, order: int = 0) -> Tensor:
    """torch.sinc, or a derivative of it by repeated differentiation."""
    if order == 0:
        return torch.sinc(x)
    leaf = x if x.requires_grad else x.detach().requires_grad_()
    value = torch.sinc(leaf)
    for _ in range(order):
        (value,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    return value


def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """torch.clamp, which insists on a bound."""
    return x.clone() if min is None and max is None else torch.clamp(x, min, max)


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """Not torch.ldexp, whose gradient is 0 for negative whole exponents (2.13)."""
    return x * torch.exp2(exponent.to(x.dtype))


def imag(x: Tensor) -> Tensor:
    """torch.imag, which insists on a complex argument."""
    return torch.imag(x) if x.is_complex() else x * 0


# -------------------------------------------------------------------- networks


def pooled(function: Counterpart) -> Counterpart:
    """A pooling function with torch's order of settings."""

    def average(x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, **rest: Any) -> Tensor:
        return function(x, kernel_size, stride, padding, **rest)  # type: ignore[no-any-return]

    return average


def max_pool2d_gather(values: Tensor, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """The values at the places of the maxima of `x`."""
    _, chosen = F.max_pool2d(x, kernel_size, stride, padding, dilation, return_indices=True)
    return values.flatten(2).gather(2, chosen.flatten(2)).reshape(chosen.shape)


def max_pool2d_input_grad(y: Tensor, x: Tensor, **statics: Any) -> Tensor:
    """The gradient of the pool."""
    leaf = x if x.requires_grad else x.detach().requires_grad_()
    return adjoint(lambda z: F.max_pool2d(z, **statics), y, x.shape, leaf)


def conv2d_input_grad(y: Tensor, weight: Tensor, input_size: Any, groups: int = 1, **statics: Any) -> Tensor:
    """The gradient of the convolution by its input."""
    return adjoint(lambda x: F.conv2d(x, weight, groups=groups, **statics), y, (y.shape[0], weight.shape[1] * groups, *input_size))


def conv2d_weight_grad(x: Tensor, y: Tensor, kernel_size: Any, groups: int = 1, **statics: Any) -> Tensor:
    """The gradient of the convolution by its weight."""
    return adjoint(lambda w: F.conv2d(x, w, groups=groups, **statics), y, (y.shape[1], x.shape[1] // groups, *kernel_size))


def col2im(columns: Tensor, output_size: Any, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """torch.nn.functional.fold."""
    return F.fold(columns, output_size, kernel_size, dilation, padding, stride)


def im2col(x: Tensor, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """torch.nn.functional.unfold."""
    return F.unfold(x, kernel_size, dilation, padding, stride)


def layer_norm(x: Tensor, weight: Any = None, bias: Any = None, ndims: int = 1, eps: float = 1e-5) -> Tensor:
    """Over the last `ndims` axes."""
    return F.layer_norm(x, x.shape[-ndims:], ones(weight, bias), bias, eps)


def ones(weight: Any, bias: Any) -> Any:
    """Ones where there is a bias but no weight: torch's normalizations have no second gradient then."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def batch_norm(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """In training, without running statistics."""
    return F.batch_norm(x, None, None, ones(weight, bias), bias, training=True, eps=eps)


def group_norm(x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 1, eps: float = 1e-5) -> Tensor:
    """torch.nn.functional.group_norm."""
    return F.group_norm(x, num_groups, ones(weight, bias), bias, eps)


def embedding(weight: Tensor, indices: Tensor, padding_idx: int | None = None) -> Tensor:
    """torch.nn.functional.embedding, whose second gradient fails for no indices at all."""
    return F.embedding(indices, weight, padding_idx) if indices.numel() else weight[indices]


def cross(x1: Tensor, x2: Tensor, axis: int = -1) -> Tensor:
    """torch.linalg.cross, which wants the same number of axes."""
    ndim = max(x1.ndim, x2.ndim)
    x1, x2 = (x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (x1, x2))
    return torch.linalg.cross(x1, x2, dim=axis)


def rms_norm(x: Tensor, weight: Any = None, ndims: int = 1, eps: float | None = None) -> Tensor:
    """Over the last `ndims` axes."""
    return F.rms_norm(x, x.shape[-ndims:], weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """torch's attention without its fused kernels (they have no second gradient); it takes a mask or `is_causal`, not both."""
    if is_causal and mask is not None:
        mask, is_causal = mask & torch.ones_like(mask).tril(), False
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)


def lstm_cell(gates: Tensor, c: Tensor) -> Any:
    """The elementwise part of a step."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(gi: Tensor, gh: Tensor, h: Tensor) -> Tensor:
    """The elementwise part of a step."""
    (ri, zi, ni), (rh, zh, nh) = gi.chunk(3, -1), gh.chunk(3, -1)
    z = torch.sigmoid(zi + zh)
    return (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * h


def gru(x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """torch.gru of one layer; it takes both biases or none."""
    weights = (w_ih, w_hh) if b_ih is None and b_hh is None else (w_ih, w_hh, *(w_ih.new_zeros(len(w_ih)) if b is None else b for b in (b_ih, b_hh)))
    out, last = torch.gru(x, h0[None], weights, len(weights) == 4, 1, 0.0, True, False, False)
    return out, last[0]


def rnn(x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None, nonlinearity: str = "tanh") -> Any:
    """torch.rnn_tanh or rnn_relu of one layer."""
    weights = (w_ih, w_hh) if b_ih is None and b_hh is None else (w_ih, w_hh, *(w_ih.new_zeros(len(w_ih)) if b is None else b for b in (b_ih, b_hh)))
    function = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    out, last = function(x, h0[None], weights, len(weights) == 4, 1, 0.0, True, False, False)
    return out, last[0]


def lstm(x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """The function that torch.nn.LSTM calls."""
    weights = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, torch.zeros_like(b_ih) if b_hh is None else b_hh]
    out, h, c = torch._VF.lstm(x, (h0[None], c0[None]), weights, b_ih is not None, 1, 0.0, False, False, False)
    return out, h[0], c[0]


def extremum(function: Callable[..., Tensor]) -> Counterpart:
    """amax or amin, of complex numbers (which torch does not order) by their real parts."""

    def chosen(x: Tensor, axes: Any, keepdims: bool) -> Tensor:
        if not x.is_complex():
            return function(x, axes, keepdims)
        return torch.sum(x * (x.real == function(x.real, axes, True)), axes, keepdims) if axes else x * 1

    return reduction(chosen)


def parts(*outs: Tensor) -> tuple[Tensor, ...]:
    """Real and imaginary parts, as the domains of transforms finish their results."""
    return tuple(part for x in outs for part in ((x.real, x.imag) if x.is_complex() else (x, torch.zeros_like(x))))


def fourier(function: Callable[..., Tensor], turn: complex = 1.0) -> Counterpart:
    """A transform, of arguments prepared as the domains do."""
    return lambda x, axis=-1, norm="backward": parts(function(x * turn, dim=axis, norm=norm))


def bessel_y(order: int, x: Tensor) -> Tensor:
    """torch has no gradients of these: by their derivatives."""

    class Y(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (torch.special.bessel_y1 if order else torch.special.bessel_y0)(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * (bessel_y(0, x) - bessel_y(1, x) / x) if order else -g * bessel_y(1, x)

    return Y.apply(x)  # type: ignore[no-any-return]


def bessel_j(order: int, x: Tensor) -> Tensor:
    """As `bessel_y`."""

    class J(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (torch.special.bessel_j1 if order else torch.special.bessel_j0)(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * (bessel_j(0, x) - bessel_j(1, x) / x) if order else -g * bessel_j(1, x)

    return J.apply(x)  # type: ignore[no-any-return]


def power_sums(values: Tensor) -> tuple[Tensor, ...]:
    """As the domain of eigvals finishes its result."""
    return tuple((values**k).sum(-1) for k in (1, 2, 3))


def eig(x: Tensor) -> Any:
    """Eigenvectors without their phases."""
    values, vectors = torch.linalg.eig(x)
    size = torch.real(vectors * vectors.conj())
    return parts(*power_sums(values), (values.unsqueeze(-2) * size).sum(-1))


#: row -> what it is called in torch, and the callable
COUNTERPARTS: dict[str, tuple[str, Counterpart]] = {}


def _same(*names: str) -> None:
    for name in names:
        COUNTERPARTS[name] = (f"torch.{name}", getattr(torch, name))


def _in(module: Any, where: str, *names: str) -> None:
    for name in names:
        COUNTERPARTS[name] = (f"{where}.{name}", getattr(module, name))


_same(
    "abs", "acos", "acosh", "add", "angle", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "complex", "conj", "copysign", "cos", "cosh",
    "deg2rad", "div", "erf", "erfc", "exp", "exp2", "expm1", "float_power", "floor", "fmax", "fmin", "fmod", "hypot", "log", "log10", "log1p",
    "log2", "logaddexp", "logaddexp2", "matmul", "maximum", "minimum", "mul", "nan_to_num", "neg", "positive", "pow", "rad2deg", "real", "reciprocal",
    "relu", "remainder", "round", "rsqrt", "sgn", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "trunc", "where", "xlogy",
)
_in(F, "F", "avg_pool2d", "binary_cross_entropy_with_logits", "conv2d", "cross_entropy", "elu", "gelu", "leaky_relu", "linear", "nll_loss", "silu",
    "softplus", "softsign", "mse_loss", "max_pool2d")
_in(torch.linalg, "torch.linalg", "det", "inv", "pinv", "svdvals")

COUNTERPARTS.update(
    {
        "avg_pool2d_input_grad": (
            "adjoint of F.avg_pool2d",
            lambda y, input_size, **k: adjoint(lambda x: F.avg_pool2d(x, **k), y, (*y.shape[:2], *input_size)),
        ),
        "batch_norm": ("F.batch_norm", batch_norm),
        "cat": ("torch.cat", lambda *arrays, axis=0: torch.cat(arrays, axis)),
        "cbrt": ("sign * |x|**(1/3)", lambda x: torch.sign(x) * torch.pow(torch.abs(x), 1 / 3)),
        "cholesky": ("torch.linalg.cholesky", lambda x: torch.linalg.cholesky(x @ x.mH)),
        "clamp": ("torch.clamp", clamp),
        "clamp_max": ("torch.clamp", lambda x, limit: torch.clamp(x, max=limit.expand_as(x))),
        "clamp_min": ("torch.clamp", lambda x, limit: torch.clamp(x, min=limit.expand_as(x))),
        "clone": ("torch.clone", torch.clone),
        "cofactors": ("det * inv.mT", cofactors),
        "cofactors_grad": ("gradient of det * inv.mT", cofactors_grad),
        "col2im": ("F.fold", col2im),
        "constant_pad": ("F.pad", constant_pad),
        "conv2d_input_grad": ("adjoint of F.conv2d", conv2d_input_grad),
        "conv2d_weight_grad": ("adjoint of F.conv2d", conv2d_weight_grad),
        "cross": ("torch.linalg.cross", cross),
        "cumprod": ("torch.cumprod", scan(torch.cumprod)),
        "cumsum": ("torch.cumsum", scan(torch.cumsum)),
        "diagonal": ("torch.diagonal", lambda x, offset=0, axis1=-2, axis2=-1: torch.diagonal(x, offset, axis1, axis2)),
        "diagonal_adjoint": (
            "adjoint of torch.diagonal",
            lambda y, shape, offset=0, axis1=-2, axis2=-1: adjoint(lambda x: torch.diagonal(x, offset, axis1, axis2), y, shape),
        ),
        "divmod": ("torch.div, torch.remainder", lambda x1, x2: (torch.div(x1, x2, rounding_mode="floor"), torch.remainder(x1, x2))),
        "eigh": ("torch.linalg.eigh", eigh),
        "eigvalsh": ("torch.linalg.eigvalsh", lambda x: torch.linalg.eigvalsh(symmetric(x))),
        "einsum": ("torch.einsum", lambda x1, x2, subscripts: torch.einsum(subscripts, x1, x2)),
        "embedding": ("F.embedding", embedding),
        "embedding_grad": (
            "adjoint of F.embedding",
            lambda y, indices, num_embeddings, padding_idx=None: adjoint(
                lambda w: embedding(w, indices, padding_idx), y, (num_embeddings, y.shape[-1])
            ),
        ),
        "binary_cross_entropy": ("F.binary_cross_entropy", lambda x, target: F.binary_cross_entropy(x, target, reduction="none")),
        "cummax": ("torch.cummax", lambda x, axis=-1: tuple(torch.cummax(x, axis))),
        "cummin": ("torch.cummin", lambda x, axis=-1: tuple(torch.cummin(x, axis))),
        "expand": ("torch.broadcast_to", lambda x, shape: torch.broadcast_to(x, shape)),
        "fabs": ("torch.abs", torch.abs),
        "flip": ("torch.flip", lambda x, axis=None: torch.flip(x, all_axes(x, axis))),
        "gather": ("torch.take_along_dim", lambda x, indices, axis=-1: torch.take_along_dim(x, indices, axis)),
        "gather_adjoint": (
            "adjoint of take_along_dim",
            lambda g, indices, shape, axis=-1: adjoint(lambda x: torch.take_along_dim(x, indices, axis), g, shape),
        ),
        "getitem": ("indexing", select),
        "getitem_adjoint": ("adjoint of indexing", lambda g, index, shape: adjoint(lambda x: select(x, index), g, shape)),
        "group_norm": ("F.group_norm", group_norm),
        "gru": ("torch.gru", gru),
        "gru_cell": ("step of torch.gru", gru_cell),
        "huber_loss": ("F.huber_loss", lambda x, target, delta=1.0, reduction="mean": F.huber_loss(x, target, reduction=reduction, delta=delta)),
        "im2col": ("F.unfold", im2col),
        "imag": ("torch.imag", imag),
        "index": ("indexing", select),
        "index_adjoint": ("adjoint of indexing", lambda g, index, shape: adjoint(lambda x: select(x, index), g, shape)),
        "layer_norm": ("F.layer_norm", layer_norm),
        "ldexp": ("x * 2**n", ldexp),
        "log_sigmoid": ("F.logsigmoid", F.logsigmoid),
        "log_softmax": ("F.log_softmax", lambda x, axis=-1: F.log_softmax(x, axis)),
        "logcumsumexp": ("torch.logcumsumexp", lambda x, axis=-1: torch.logcumsumexp(x, axis)),
        "logsumexp": ("torch.logsumexp", reduction(torch.logsumexp)),
        "lstm": ("torch.lstm", lstm),
        "lstm_cell": ("step of torch.lstm", lstm_cell),
        "mask": ("torch.where", lambda x, condition: torch.where(condition, x, 0.0)),
        "max": ("torch.amax", extremum(torch.amax)),
        "max_pool2d_gather": ("max_pool2d, gather", max_pool2d_gather),
        "max_pool2d_input_grad": ("adjoint of F.max_pool2d", max_pool2d_input_grad),
        "mean": ("torch.mean", reduction(torch.mean)),
        "min": ("torch.amin", extremum(torch.amin)),
        "permute": ("torch.permute", lambda x, axes=None: torch.permute(x, axes or tuple(range(x.ndim))[::-1])),
        "prod": ("torch.prod", prod),
        "qr": ("torch.linalg.qr", lambda x: tuple(torch.linalg.qr(x))),
        "repeat_interleave": ("torch.repeat_interleave", lambda x, repeats, axis=None: torch.repeat_interleave(x, repeats, dim=axis)),
        "reshape": ("torch.reshape", lambda x, shape: torch.reshape(x, shape)),
        "rms_norm": ("F.rms_norm", rms_norm),
        "rnn": ("torch.rnn_tanh, rnn_relu", rnn),
        "roll": ("torch.roll", roll),
        "safe_softmax": ("F.softmax", lambda x, axis=-1: F.softmax(x, axis)),
        "scaled_dot_product_attention": ("F.scaled_dot_product_attention", attention),
        "scatter": ("torch.scatter", lambda x, indices, value, axis=-1: torch.scatter(x, axis, indices, value.expand(indices.shape))),
        "scatter_extreme": (
            "torch.scatter_reduce",
            lambda x, src, indices, axis=-1, largest=True: torch.scatter_reduce(x, axis, indices, src, "amax" if largest else "amin"),
        ),
        "setitem": ("index_put", setitem),
        "sinc": ("torch.sinc", sinc),
        "slogdet": ("torch.linalg.slogdet", lambda x: tuple(torch.linalg.slogdet(x))),
        "smooth_l1_loss": (
            "F.smooth_l1_loss",
            lambda x, target, beta=1.0, reduction="mean": F.smooth_l1_loss(x, target, reduction=reduction, beta=beta),
        ),
        "softmax": ("F.softmax", lambda x, axis=-1: F.softmax(x, axis)),
        "solve": ("torch.linalg.solve", lambda x1, x2: torch.linalg.solve(x1, x2)),
        "sort": ("torch.sort", lambda x, axis=-1, descending=False, stable=True: torch.sort(x, dim=axis, descending=descending, stable=stable)[0]),
        "split": ("torch.tensor_split", lambda x, cuts, axis=0: torch.tensor_split(x, list(map(int, cuts)), axis)),
        "squeeze": ("torch.squeeze", squeeze),
        "stack": ("torch.stack", lambda *arrays, axis=0: torch.stack(arrays, axis)),
        "std": ("torch.std", moment(torch.std)),
        "sum": ("torch.sum", reduction(torch.sum)),
        "svd": ("torch.linalg.svd", svd),
        "take": ("index_select", take),
        "take_adjoint": ("adjoint of index_select", lambda g, indices, shape, axis=0: adjoint(lambda x: take(x, indices, axis), g, shape)),
        "tanh_bend": ("-2 * x1 * x2 * x3", lambda x1, x2, x3: -2 * x1 * x2 * x3),
        "tanh_slope": ("x1 * (1 - x2**2)", lambda x1, x2: x1 * (1 - x2 * x2)),
        "tile": ("torch.tile", lambda x, repetitions: torch.tile(x, (repetitions,) if isinstance(repetitions, int) else tuple(repetitions))),
        "to_copy": ("Tensor.to", lambda x, dtype, copy=True: x.to(getattr(torch, str(np.dtype(dtype))))),
        "topk": ("torch.topk", lambda x, k, axis=-1, largest=True: tuple(torch.topk(x, k, axis, largest))),
        "transpose": ("torch.transpose", lambda x, axis0=-2, axis1=-1: torch.transpose(x, axis0, axis1)),
        "tril": ("torch.tril", lambda x, k=0: torch.tril(x, k)),
        "triu": ("torch.triu", lambda x, k=0: torch.triu(x, k)),
        "unbind": ("torch.unbind", lambda x, axis=0: torch.unbind(x, axis)),
        "unsqueeze": ("torch.unsqueeze", unsqueeze),
        "var": ("torch.var", moment(torch.var)),
        "vecdot": ("torch.linalg.vecdot", lambda x1, x2, axis=-1: torch.linalg.vecdot(x1, x2, dim=axis)),
        "vector_norm": ("torch.linalg.vector_norm", vector_norm),
    }
)
COUNTERPARTS.update(
    {
        "gammaln": ("torch.lgamma", torch.lgamma),
        "digamma": ("torch.digamma", torch.digamma),
        "erfinv": ("torch.erfinv", torch.erfinv),
        "logit": ("torch.logit", torch.logit),
        "log_ndtr": ("torch.special.log_ndtr", torch.special.log_ndtr),
        "bessel_i0": ("torch.i0", torch.i0),
        "bessel_i1": ("torch.special.i1", torch.special.i1),
        "bessel_i0e": ("torch.special.i0e", torch.special.i0e),
        "bessel_i1e": ("torch.special.i1e", torch.special.i1e),
        "bessel_j0": ("torch.special.bessel_j0", lambda x: bessel_j(0, x)),
        "bessel_j1": ("torch.special.bessel_j1", lambda x: bessel_j(1, x)),
        "bessel_y0": ("torch.special.bessel_y0", lambda x: bessel_y(0, x)),
        "bessel_y1": ("torch.special.bessel_y1", lambda x: bessel_y(1, x)),
        "erfcx": ("torch.special.erfcx", torch.special.erfcx),
        "ndtri": ("torch.special.ndtri", torch.special.ndtri),
        "gammainc": ("torch.special.gammainc", torch.special.gammainc),
        "gammaincc": ("torch.special.gammaincc", torch.special.gammaincc),
        "fft": ("torch.fft.fft", fourier(torch.fft.fft, 1.0 - 0.5j)),
        "ifft": ("torch.fft.ifft", fourier(torch.fft.ifft, 1.0 - 0.5j)),
        "rfft": ("torch.fft.rfft", fourier(torch.fft.rfft)),
        "irfft": ("torch.fft.irfft", lambda x, n, axis=-1, norm="backward": torch.fft.irfft(x, n, dim=axis, norm=norm)),
        "windows": ("Tensor.unfold", lambda x, size, axis=-1, step=1: x.unfold(axis, size, step)),
        "windows_adjoint": (
            "adjoint of unfold",
            lambda g, shape, size, axis=-1, step=1: adjoint(lambda x: x.unfold(axis, size, step), g, shape),
        ),
        "expm": ("torch.matrix_exp", torch.matrix_exp),
        "eig": ("torch.linalg.eig", eig),
        "eigvals": ("torch.linalg.eigvals", lambda x: parts(*power_sums(torch.linalg.eigvals(x)))),
    }
)
