"""Where the rows of ``aiograd.ops.nn`` may be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.ops.domain import Arguments, Domain, arrays, cases, distinct, uniform

Draw = Callable[[np.random.Generator], Arguments]

REDUCTIONS = ("mean", "sum", "none")
#: stride, padding, dilation, groups
WINDOWS: tuple[tuple[Any, Any, Any, int], ...] = ((1, 0, 1, 1), ((2, 1), (1, 2), 1, 1), (1, 1, 2, 2), (2, 1, 1, 4), (1, 3, 1, 1))
_SIZE = (5, 6)
_KERNEL = (3, 2)


def _windows(number: int) -> tuple[int, int]:
    """How many windows of `WINDOWS` fit an input of `_SIZE`."""
    stride, padding, dilation, _ = WINDOWS[number]
    s, p, d = ((v, v) if isinstance(v, int) else v for v in (stride, padding, dilation))
    height, width = ((_SIZE[i] + 2 * p[i] - d[i] * (_KERNEL[i] - 1) - 1) // s[i] + 1 for i in (0, 1))
    return height, width


def _statics(number: int, groups: bool = True) -> dict[str, Any]:
    stride, padding, dilation, count = WINDOWS[number]
    statics = {"stride": stride, "padding": padding, "dilation": dilation}
    return {**statics, "groups": count} if groups else statics


def _convolutions(build: Callable[[int, int, int], tuple[Iterable[tuple[int, ...]], dict[str, Any]]]) -> list[Draw]:
    """`build` maps (number of the window, input channels per group, output channels) to shapes and statics."""
    draws = []
    for number, (_, _, _, groups) in enumerate(WINDOWS):
        shapes, statics = build(number, 4 // groups, 4)
        draws.append(arrays(*shapes, **statics, **_statics(number)))
    return draws


_X = (2, 4, *_SIZE)

_CONVOLUTION: dict[str, Domain] = {
    "conv2d": cases(
        *_convolutions(lambda n, c, o: ((_X, (o, c, *_KERNEL), (o,)), {})),
        *_convolutions(lambda n, c, o: ((_X, (o, c, *_KERNEL)), {})),
        arrays((0, 2, 3, 3), (3, 2, 2, 2)),
        arrays((1, 1, 4, 4), (1, 1, 4, 4), (1,)),
    ),
    "conv2d_input_grad": cases(*_convolutions(lambda n, c, o: (((2, o, *_windows(n)), (o, c, *_KERNEL)), {"input_size": _SIZE}))),
    "conv2d_weight_grad": cases(*_convolutions(lambda n, c, o: ((_X, (2, o, *_windows(n))), {"kernel_size": _KERNEL}))),
    "im2col": cases(*(arrays(_X, kernel_size=_KERNEL, **_statics(n, False)) for n in range(len(WINDOWS)))),
    "col2im": cases(
        *(
            arrays((2, 4 * 6, int(np.prod(_windows(n)))), output_size=_SIZE, kernel_size=_KERNEL, **_statics(n, False))
            for n in range(len(WINDOWS))
        )
    ),
}

_POOLS: tuple[dict[str, Any], ...] = (
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": 1},
    {"kernel_size": 2, "stride": (1, 3), "padding": (0, 1)},
)
_POOLED = ((2, 3), (3, 3), (3, 5), (4, 3))
_DILATED = {"kernel_size": 2, "stride": 1, "dilation": (2, 3)}


def _pool(statics: dict[str, Any], *shapes: tuple[int, ...]) -> Draw:
    """Freely drawn arrays, and a last one without ties."""
    return lambda rng: ((*(uniform(rng, shape) for shape in shapes), distinct(rng, (2, 2, *_SIZE))), dict(statics))


_POOLING: dict[str, Domain] = {
    "max_pool2d": cases(*(_pool(statics) for statics in (*_POOLS, _DILATED))),
    "max_pool2d_input_grad": cases(
        *(_pool(statics, (2, 2, *pooled)) for statics, pooled in zip((*_POOLS, _DILATED), (*_POOLED, (3, 3)), strict=True))
    ),
    "max_pool2d_gather": cases(*(_pool(statics, (2, 2, *_SIZE)) for statics in (*_POOLS, _DILATED))),
    "avg_pool2d": cases(*(arrays((2, 2, *_SIZE), **statics, count_include_pad=count) for statics in _POOLS for count in (True, False))),
    "avg_pool2d_input_grad": cases(
        *(
            arrays((2, 2, *pooled), **statics, input_size=_SIZE, count_include_pad=count)
            for statics, pooled in zip(_POOLS, _POOLED, strict=True)
            for count in (True, False)
        )
    ),
}

_NORMALIZATION: dict[str, Domain] = {
    "layer_norm": cases(
        arrays((3, 5), (5,), (5,)),
        arrays((2, 3, 4), (3, 4), (3, 4), ndims=2, eps=0.1),
        arrays((4,)),
        arrays((2, 2, 3), (3,)),
        lambda rng: ((uniform(rng, (2, 3)), None, uniform(rng, (3,))), {}),
        arrays((0, 3), (3,), (3,)),
    ),
    "rms_norm": cases(
        arrays((3, 5), (5,)), arrays((2, 3, 4), (3, 4), ndims=2, eps=0.1), arrays((4,), eps=0.01), arrays((2, 2, 3)), arrays((0, 3), (3,))
    ),
    "group_norm": cases(
        arrays((2, 4, 3), (4,), (4,), num_groups=2), arrays((2, 4, 2, 2), (4,), num_groups=4), arrays((3, 2), num_groups=1),
        lambda rng: ((uniform(rng, (2, 4, 3)), None, uniform(rng, (4,))), {"num_groups": 1, "eps": 0.1}),
    ),
    "batch_norm": cases(
        arrays((5, 3), (3,), (3,)), arrays((2, 3, 4), (3,), eps=0.1), arrays((2, 2, 3, 2)),
        lambda rng: ((uniform(rng, (4, 2)), None, uniform(rng, (2,))), {}),
        finish=lambda out: out[0],
    ),
}

_ALONG = (
    arrays((3, 4)), arrays((2, 3, 4), axis=1), arrays((2, 3, 4), axis=0), arrays((5,), axis=0), arrays((0, 3)), arrays((2, 1, 3), axis=-3)
)


def _targets(shape: tuple[int, ...], ignored: bool = False, **statics: Any) -> Draw:
    """Logits of `shape`, and integer targets in its second axis (or only one)."""

    def draw(rng: np.random.Generator) -> Arguments:
        axis = 1 if len(shape) > 1 else 0
        target = rng.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])
        if ignored:
            target.reshape(-1)[0] = statics.get("ignore_index", -100)
        options = dict(statics)
        if options.get("weight"):
            options["weight"] = rng.uniform(0.2, 2.0, shape[axis])
        return (uniform(rng, shape),), {"target": target, **options}

    return draw


_TARGETS = tuple(
    _targets(shape, ignored, reduction=reduction, weight=weight)
    for reduction in REDUCTIONS
    for shape, ignored, weight in (((4, 3), False, None), ((3, 4, 2), True, True), ((5,), False, True))
)


def _losses(*shapes: tuple[int, ...], away: tuple[float, ...] = (), **statics: Any) -> Draw:
    """Predictions and targets whose differences keep clear of `away`."""

    def draw(rng: np.random.Generator) -> Arguments:
        target = uniform(rng, shapes[0])
        return (target + uniform(rng, shapes[0], away=away, gap=0.05), target), dict(statics)

    return draw


def _binary(reduction: str, *extra: tuple[int, ...]) -> Draw:
    def draw(rng: np.random.Generator) -> Arguments:
        weights = (rng.uniform(0.5, 2.0, shape) for shape in extra)
        return (uniform(rng, (2, 3), away=(0.0,), gap=0.05), rng.uniform(0.1, 0.9, (2, 3)), *weights), {"reduction": reduction}

    return draw


_LOSS: dict[str, Domain] = {
    "softmax": cases(*_ALONG),
    "safe_softmax": cases(*_ALONG),
    "log_softmax": cases(*_ALONG),
    "nll_loss": cases(*_TARGETS, _targets((2, 3), True, ignore_index=1, reduction="sum")),
    "cross_entropy": cases(
        *_TARGETS,
        *(_targets((4, 3), True, reduction=reduction, weight=weight, label_smoothing=0.2) for reduction in REDUCTIONS for weight in (None, True)),
        _targets((2, 3), True, ignore_index=1, reduction="sum"),
    ),
    "mse_loss": cases(*(_losses(shape, reduction=r) for r in REDUCTIONS for shape in ((2, 3), (), (0, 2)) if shape != (0, 2) or r != "mean")),
    "huber_loss": cases(*(_losses((2, 5), away=(-d, d), reduction=r, delta=d) for r in REDUCTIONS for d in (1.0, 0.5))),
    "smooth_l1_loss": cases(*(_losses((2, 5), away=(-b, b, 0.0), reduction=r, beta=b) for r in REDUCTIONS for b in (1.0, 0.5, 0.0))),
    # the weights take no gradient, so they are given for three reductions but not drawn as arguments that are checked
    "binary_cross_entropy": cases(
        lambda rng: ((rng.uniform(0.1, 0.9, (2, 3)), rng.uniform(0.1, 0.9, (2, 3))), {}), lambda rng: ((rng.uniform(0.1, 0.9, (0,)),) * 2, {})
    ),
    "binary_cross_entropy_with_logits": cases(*(_binary(reduction) for reduction in REDUCTIONS)),
}


def _attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: str | None = None, **statics: Any) -> Draw:
    def draw(rng: np.random.Generator) -> Arguments:
        q_, k_, v_ = (uniform(rng, shape) for shape in (q, k, v))
        if mask is None:
            return (q_, k_, v_), dict(statics)
        shape = (q[-2], k[-2])
        allowed = rng.random(shape) < 0.7
        allowed[:, 0] = True
        if mask == "empty row":
            allowed[0] = False
        return (q_, k_, v_, uniform(rng, shape) if mask == "added" else allowed), dict(statics)

    return draw


def _indexed(rows: int, shape: tuple[int, ...], adjoint: bool, **statics: Any) -> Draw:
    """A look-up in a matrix of two columns, or its adjoint. A padded row is never looked up, since its gradient is cut."""

    def draw(rng: np.random.Generator) -> Arguments:
        indices = rng.integers(1, rows, shape)
        if adjoint:
            return (uniform(rng, (*shape, 2)),), {"indices": rng.integers(0, rows, shape), "num_embeddings": rows, **statics}
        return (uniform(rng, (rows, 2)),), {"indices": indices, **statics}

    return draw


def _positive(*shapes: tuple[int, ...], **statics: Any) -> Draw:
    """Arrays above zero: a rectifier between them has no kink."""
    return arrays(*shapes, low=0.1, high=1.0, **statics)


_GRU = ((3, 2, 4), (2, 3), (9, 4), (9, 3))
_RNN = ((3, 2, 4), (2, 3), (3, 4), (3, 3))
_LSTM = ((3, 2, 4), (2, 3), (2, 3), (12, 4), (12, 3))

_REST: dict[str, Domain] = {
    "linear": cases(
        arrays((4, 3), (2, 3), (2,)),
        arrays((2, 4, 3), (2, 3)),
        arrays((3,), (2, 3), (2,)),
        arrays((0, 3), (2, 3), (2,)),
        arrays((1, 2, 1, 3), (1, 3), (1,)),
    ),
    "scaled_dot_product_attention": cases(
        _attention((2, 3, 4), (2, 5, 4), (2, 5, 2)),
        _attention((3, 2), (3, 2), (3, 2), is_causal=True),
        _attention((2, 1, 3, 2), (2, 4, 2), (2, 2, 4, 3), scale=0.7),
        _attention((2, 3, 4), (2, 5, 4), (2, 5, 2), "added"),
        _attention((2, 3, 4), (2, 5, 4), (2, 5, 2), "allowed", is_causal=True),
        _attention((1, 3, 2), (1, 4, 2), (1, 4, 2), "empty row"),
    ),
    "embedding": cases(_indexed(5, (2, 3), False), _indexed(4, (3,), False, padding_idx=0), _indexed(3, (), False), _indexed(3, (0,), False)),
    "embedding_grad": cases(_indexed(5, (2, 3), True), _indexed(4, (3,), True, padding_idx=0), _indexed(3, (), True), _indexed(3, (0,), True)),
    "lstm_cell": cases(arrays((3, 8), (3, 2)), arrays((4,), (1,)), arrays((2, 2, 12), (2, 2, 3))),
    "lstm": cases(arrays(*_LSTM, (12,), (12,)), arrays(*_LSTM), arrays((1, 1, 2), (1, 2), (1, 2), (8, 2), (8, 2), (8,))),
    "gru_cell": cases(arrays((3, 6), (3, 6), (3, 2)), arrays((3,), (3,), (1,)), arrays((2, 2, 9), (2, 2, 9), (2, 2, 3))),
    "gru": cases(arrays(*_GRU, (9,), (9,)), arrays(*_GRU), arrays((1, 1, 2), (1, 2), (6, 2), (6, 2), (6,))),
    "rnn": cases(arrays(*_RNN, (3,), (3,)), arrays(*_RNN), _positive(*_RNN, (3,), nonlinearity="relu")),
}

DOMAINS: dict[str, Domain] = {**_CONVOLUTION, **_POOLING, **_NORMALIZATION, **_LOSS, **_REST}
