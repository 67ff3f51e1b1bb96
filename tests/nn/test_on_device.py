"""Modules on a device give the values and gradients they give on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.running.offloading import ready
from tests.support import draw
from tests.toy_device import ToyDevice


class Attend(nn.Module):
    """Self-attention with both masks and weights returned."""

    def __init__(self) -> None:
        self.inner = nn.MultiHeadAttention(4, 2, dtype=np.float64)

    def forward(self, x: Any) -> Any:
        left_out = ag.tensor(np.eye(5, dtype=bool)).to(x.device)
        added = ag.tensor(draw(3, 5, at=9)).to(x.device)
        out, weights = self.inner(x, x, x, added, attn_mask=left_out, need_weights=True, is_causal=True)
        return out.square().sum() + weights.square().sum()


class States(nn.Module):
    def __init__(self) -> None:
        self.inner = nn.LSTM(4, 3, 2, bidirectional=True, dtype=np.float64)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


class Gated(nn.Module):
    """A GRU and a simple network after it."""

    def __init__(self) -> None:
        self.inner = nn.GRU(4, 3, 2, bidirectional=True, dtype=np.float64)
        self.last = nn.RNN(6, 2, nonlinearity="tanh", dtype=np.float64)

    def forward(self, x: Any) -> Any:
        return self.last(self.inner(x)[0])[0]


class Decode(nn.Module):
    def __init__(self) -> None:
        self.inner = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0, dtype=np.float64), 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x[:3], tgt_is_causal=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6, dtype=np.float64), nn.GELU(), nn.Linear(6, 2, dtype=np.float64), nn.LogSoftmax()), (5, 4)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, dtype=np.float64), nn.BatchNorm2d(4, dtype=np.float64), nn.ReLU(),
            nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(),
        ),
        (3, 2, 8, 8),
    ),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(4, dtype=np.float64), nn.RMSNorm(4, dtype=np.float64)), (5, 4)),
    "attention": (Attend, (5, 3, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, dtype=np.float64), (5, 3, 4)),
    "lstm": (States, (5, 3, 4)),
    "gru": (Gated, (5, 3, 4)),
    "decoder": (Decode, (5, 3, 4)),
    "lines": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect", dtype=np.float64), nn.InstanceNorm1d(4, affine=True, dtype=np.float64),
            nn.PReLU(4, dtype=np.float64), nn.MaxPool1d(2, ceil_mode=True), nn.ConvTranspose1d(4, 2, 3, stride=2, dtype=np.float64),
            nn.Hardswish(), nn.AvgPool1d(2, 2, 0, True),
        ),
        (5, 3, 9),
    ),
    "sizes": (
        lambda: nn.Sequential(nn.PReLU(dtype=np.float64), nn.Upsample((5, 7), mode="bilinear"), nn.AdaptiveAvgPool2d((3, 2)), nn.Mish()),
        (2, 2, 4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_training_on_a_device(name: str) -> None:
    make, shape = CASES[name]
    here = make()
    with ToyDevice("toy:0"):
        there = copy.deepcopy(here).to("toy:0")
        for model, device in ((here, "cpu"), (there, "toy:0")):
            # the gradient of a bias before a norm is a rounding error: with Adam's default eps, 1e-8, the step would be one, magnified
            optimizer = optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
            for step in range(2):
                optimizer.zero_grad()
                await model(ag.tensor(draw(*shape, at=step), device=device)).square().sum().backward()
                optim.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        await ready([there.state_dict(), [p.grad for p in there.parameters()]])
        assert all(value.device == "toy:0" for value in there.state_dict().values())
        there.cpu()
        for (path, ours), theirs in zip(there.named_parameters(), here.parameters(), strict=True):
            np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=path)
        for path, value in here.state_dict().items():
            np.testing.assert_allclose(there.state_dict()[path].numpy(), value.numpy(), rtol=1e-8, atol=1e-10, err_msg=path)
