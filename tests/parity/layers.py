"""Layers beside those of `tests.parity.training`: name, how to make each from a package and its float64, and its inputs.

Both packages have one signature, so one line makes both: ``make(nn, d)`` with ``d = {"dtype": ...}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Make = Callable[[Any, dict[str, Any]], Any]

#: numbers on both sides of every corner of the piecewise activations, and some of the corners
_WIDE = np.concatenate([np.linspace(-8.0, 8.0, 42), [-3.0, -1.0, -0.5, 0.5, 1.0, 3.0, 6.0, 0.0]]).reshape(5, 10)
_VOLUME = (2, 4, 5, 6, 7)
_LINE, _IMAGE = (2, 4, 9), (2, 4, 7, 6)
_SEQUENCE = (5, 2, 3)

PLAIN = (
    "ReLU6 SELU Tanhshrink Mish Hardswish Hardsigmoid CELU Hardtanh Hardshrink Softshrink GLU Softsign LogSigmoid Softmin PReLU Identity Flatten"
).split()

MORE_LAYERS: list[tuple[str, Make, Sequence[Any]]] = [
    *((f"{name}()", lambda nn, d, name=name: getattr(nn, name)(**({"PReLU": d, "Softmin": {"dim": -1}}.get(name, {}))), [_WIDE]) for name in PLAIN),
    ("CELU(0.7)", lambda nn, d: nn.CELU(0.7), [_WIDE]),
    ("Hardtanh(-2, 0.5)", lambda nn, d: nn.Hardtanh(-2.0, 0.5), [_WIDE]),
    ("Threshold(0.5, -2)", lambda nn, d: nn.Threshold(0.5, -2.0), [_WIDE]),
    ("Softshrink(1.5)", lambda nn, d: nn.Softshrink(1.5), [_WIDE]),
    ("PReLU(10)", lambda nn, d: nn.PReLU(10, **d), [_WIDE]),
    ("Conv3d(4, 6, 3)", lambda nn, d: nn.Conv3d(4, 6, (3, 2, 2), (2, 1, 1), (1, 0, 1), groups=2, **d), [_VOLUME]),
    ("Conv3d(same, circular)", lambda nn, d: nn.Conv3d(4, 6, 3, padding="same", padding_mode="circular", **d), [_VOLUME]),
    ("ConvTranspose3d(4, 6, 3)", lambda nn, d: nn.ConvTranspose3d(4, 6, 3, (1, 2, 3), (1, 0, 2), (0, 1, 2), dilation=(2, 1, 1), **d), [_VOLUME]),
    ("MaxPool3d(3)", lambda nn, d: nn.MaxPool3d(3, 2, 1, ceil_mode=True), [_VOLUME]),
    ("AvgPool3d(3)", lambda nn, d: nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False), [_VOLUME]),
    ("BatchNorm3d(4)", lambda nn, d: nn.BatchNorm3d(4, **d), [_VOLUME]),
    ("InstanceNorm3d(4)", lambda nn, d: nn.InstanceNorm3d(4, affine=True, **d), [_VOLUME]),
    ("Transformer(8, 2)", lambda nn, d: nn.Transformer(8, 2, 2, 3, 16, 0.0, norm_first=True, activation="gelu", **d), [(6, 2, 8), (5, 2, 8)]),
    ("TripletMarginLoss(swap)", lambda nn, d: nn.TripletMarginLoss(0.3, swap=True), [(5, 4), (5, 4), (5, 4)]),
    ("GLU(1)", lambda nn, d: nn.GLU(1), [_IMAGE]),
    ("Unflatten(1, (2, 2))", lambda nn, d: nn.Unflatten(1, (2, 2)), [_IMAGE]),
    ("Conv1d(4, 6, 3)", lambda nn, d: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2, **d), [_LINE]),
    ("Conv1d(same)", lambda nn, d: nn.Conv1d(4, 6, 4, padding="same", dilation=2, bias=False, **d), [_LINE]),
    ("Conv1d(circular)", lambda nn, d: nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular", **d), [(4, 9)]),
    ("Conv1d(reflect, same)", lambda nn, d: nn.Conv1d(4, 6, 4, padding="same", padding_mode="reflect", **d), [_LINE]),
    ("Conv2d(replicate)", lambda nn, d: nn.Conv2d(4, 2, 3, padding=(2, 1), padding_mode="replicate", **d), [_IMAGE]),
    ("Conv2d(reflect, same)", lambda nn, d: nn.Conv2d(4, 2, (3, 4), padding="same", padding_mode="reflect", **d), [_IMAGE]),
    ("ConvTranspose1d(4, 6, 3)", lambda nn, d: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2, **d), [_LINE]),
    ("ConvTranspose1d(dilation)", lambda nn, d: nn.ConvTranspose1d(4, 6, 3, dilation=2, bias=False, **d), [(4, 9)]),
    ("ConvTranspose2d(4, 6, 3)", lambda nn, d: nn.ConvTranspose2d(4, 6, 3, (2, 3), (1, 0), (1, 2), groups=2, **d), [_IMAGE]),
    ("ConvTranspose2d(dilation)", lambda nn, d: nn.ConvTranspose2d(4, 2, (2, 3), dilation=(1, 2), **d), [(4, 7, 6)]),
    ("MaxPool1d(2)", lambda nn, d: nn.MaxPool1d(2), [_LINE]),
    ("MaxPool1d(ceil)", lambda nn, d: nn.MaxPool1d(3, 2, 1, ceil_mode=True), [(4, 8)]),
    ("MaxPool2d(ceil)", lambda nn, d: nn.MaxPool2d((3, 2), (2, 3), (1, 0), ceil_mode=True), [_IMAGE]),
    ("MaxPool2d(ceil, dilation)", lambda nn, d: nn.MaxPool2d(2, 3, 1, (2, 1), ceil_mode=True), [_IMAGE]),
    ("AvgPool1d(3)", lambda nn, d: nn.AvgPool1d(3, 2, 1), [_LINE]),
    ("AvgPool1d(ceil)", lambda nn, d: nn.AvgPool1d(3, 2, 1, True, False), [(2, 3, 8)]),
    *(
        (f"AvgPool2d(ceil={ceil}, {count}, {divisor})", lambda nn, d, s=(ceil, count, divisor): nn.AvgPool2d((3, 2), (2, 3), (1, 0), *s), [_IMAGE])
        for ceil in (False, True) for count in (False, True) for divisor in (None, 5)
    ),
    *((f"AdaptiveAvgPool2d({s})", lambda nn, d, s=s: nn.AdaptiveAvgPool2d(s), [_IMAGE]) for s in (1, (7, 3), (3, None), (4, 5), (9, 7))),
    ("AdaptiveAvgPool1d(4)", lambda nn, d: nn.AdaptiveAvgPool1d(4), [_LINE]),
    *((f"Upsample({s})", lambda nn, d, s=s: nn.Upsample(**s), [_IMAGE]) for s in (
        {"size": (3, 11)}, {"scale_factor": 2}, {"scale_factor": (1.7, 0.6)}, {"scale_factor": 1.3, "mode": "nearest-exact"},
        {"size": (4, 9), "mode": "bilinear"}, {"scale_factor": 2.0, "mode": "bilinear", "align_corners": True},
        {"scale_factor": (1.7, 0.6), "mode": "bilinear"}, {"size": 1, "mode": "bilinear", "align_corners": True},
    )),
    ("Upsample(linear)", lambda nn, d: nn.Upsample(scale_factor=2.5, mode="linear"), [_LINE]),
    ("InstanceNorm1d(4)", lambda nn, d: nn.InstanceNorm1d(4, affine=True, **d), [_LINE]),
    ("InstanceNorm2d(4)", lambda nn, d: nn.InstanceNorm2d(4, **d), [_IMAGE]),
    ("InstanceNorm2d(4, tracked)", lambda nn, d: nn.InstanceNorm2d(4, affine=True, track_running_stats=True, **d), [_IMAGE]),
    ("InstanceNorm2d(4, tracked).eval()", lambda nn, d: nn.InstanceNorm2d(4, track_running_stats=True, **d).eval(), [(4, 3, 5)]),
    ("GRU(3, 4, 2, bidirectional)", lambda nn, d: nn.GRU(3, 4, 2, bidirectional=True, batch_first=True, **d), [_SEQUENCE]),
    ("GRU(3, 4, bias=False)", lambda nn, d: nn.GRU(3, 4, bias=False, **d), [_SEQUENCE, (1, 2, 4)]),
    ("RNN(3, 4, 2)", lambda nn, d: nn.RNN(3, 4, 2, bidirectional=True, **d), [_SEQUENCE]),
    ("RNN(relu)", lambda nn, d: nn.RNN(3, 4, nonlinearity="relu", **d), [(5, 3), (1, 4)]),
    ("LSTMCell(3, 4)", lambda nn, d: nn.LSTMCell(3, 4, **d), [(2, 3), ((2, 4), (2, 4))]),
    ("LSTMCell(bias=False)", lambda nn, d: nn.LSTMCell(3, 4, bias=False, **d), [(3,)]),
    ("GRUCell(3, 4)", lambda nn, d: nn.GRUCell(3, 4, **d), [(2, 3), (2, 4)]),
    ("GRUCell(bias=False)", lambda nn, d: nn.GRUCell(3, 4, bias=False, **d), [(3,), (4,)]),
    ("RNNCell(3, 4)", lambda nn, d: nn.RNNCell(3, 4, **d), [(2, 3), (2, 4)]),
    ("RNNCell(relu)", lambda nn, d: nn.RNNCell(3, 4, nonlinearity="relu", **d), [(2, 3)]),
    (
        "TransformerEncoder",
        lambda nn, d: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, **d), 2, nn.LayerNorm(8, **d),
            **({"enable_nested_tensor": False} if nn.__name__ == "torch.nn" else {}),
        ),
        [(2, 5, 8)],
    ),
    (
        "TransformerDecoder",
        lambda nn, d: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, **d), 2, nn.LayerNorm(8, **d)),
        [(5, 2, 8), (4, 2, 8)],
    ),
    (
        "TransformerDecoderLayer(norm_first)",
        lambda nn, d: nn.TransformerDecoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True, bias=False, **d),
        [(2, 5, 8), (2, 4, 8)],
    ),
    ("BCELoss()", lambda nn, d: nn.BCELoss(), [(4, 3), (4, 3)]),
    ("KLDivLoss(batchmean)", lambda nn, d: nn.KLDivLoss(reduction="batchmean"), [(4, 3), (4, 3)]),
    ("KLDivLoss(log_target)", lambda nn, d: nn.KLDivLoss(log_target=True, reduction="sum"), [(4, 3), (4, 3)]),
]  # fmt: skip
