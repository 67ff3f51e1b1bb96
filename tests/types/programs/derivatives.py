"""Derivatives of functions, a function with a rule of its own, a compiled function, hooks, array functions and distributions."""

from __future__ import annotations

import math
from typing import Any, assert_type

import numpy as np

import aiograd as ag
from aiograd import distributions, graph
from aiograd.errors import AiogradError, ShapeError


def energy(x: ag.Tensor) -> ag.Tensor:
    return (x**2).sum()


class Doubled(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: ag.Tensor) -> ag.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: ag.Tensor) -> ag.Tensor:
        return grad * 2


@ag.compile
def blended(x: ag.Tensor, share: float) -> ag.Tensor:
    return x * share + ag.tanh(x) * (1 - share)


async def main() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    value, gradient = await ag.value_and_grad(energy, x)
    assert value.item() == 5.0 and gradient.tolist() == [2.0, 4.0]
    _, product = await ag.jvp(energy, x, ag.ones_like(x))
    _, pulled = await ag.vjp(energy, x)
    hessian = await ag.hessian(energy, x)
    assert product.item() == 6.0 and pulled.tolist() == [2.0, 4.0] and hessian.shape == (2, 2)
    (first,) = await ag.grad(energy(x), x)
    assert first.tolist() == [2.0, 4.0]
    many = ag.vmap(energy)(ag.ones((3, 2)))
    assert many.shape == (3,)

    assert blended(x, 0.5).shape == (2,)
    handle = x.register_hook(lambda grad: grad * 10)
    await ag.backward(energy(Doubled.apply(x)))
    handle.remove()
    assert x.grad.tolist() == [80.0, 160.0]
    node = energy(x).grad_fn
    assert isinstance(node, graph.Node)
    assert_type(node.num_inputs, int)
    assert_type(node.next_edge(0), graph.Edge)

    # array functions: of the standard, of numpy and of PyTorch
    assert_type(ag.exp(x), ag.Tensor)
    assert_type(ag.maximum(x, 0.0), ag.Tensor)
    assert_type(ag.where(x > 1, x, 0.0), ag.Tensor)
    assert_type(ag.concatenate([x, x]), ag.Tensor)
    assert_type(ag.clamp(x, 0, 1), ag.Tensor)
    assert_type(ag.special.gammaln(x), ag.Tensor)
    assert_type(ag.linalg.norm(x), ag.Tensor)
    assert_type(ag.where(x > 1), tuple[ag.Tensor, ...])
    assert_type(ag.fft.fft(x), ag.Tensor)
    assert_type(x.reshape(2, 1).squeeze(-1), ag.Tensor)
    assert_type(ag.zeros(2, 3).sum(dim=1, keepdim=True), ag.Tensor)
    assert_type(ag.softmax(ag.randn(2, 3), dim=-1), ag.Tensor)
    assert_type(ag.linalg.norm(ag.ones(2, 3), dim=0), ag.Tensor)
    assert_type(ag.linalg.inv(ag.eye(2)), ag.Tensor)
    assert_type(ag.fft.fftn(ag.ones(2, 3), dim=(0,)), ag.Tensor)
    assert_type(ag.special.logsumexp(ag.ones(2, 3), dim=0, keepdim=True), ag.Tensor)
    assert_type(ag.cat([x, x], dim=0), ag.Tensor)
    assert_type(ag.sum(x, axis=0, keepdims=True), ag.Tensor)
    assert_type(ag.var(x, ddof=1), ag.Tensor)
    assert_type(ag.transpose(hessian, dim0=0, dim1=1), ag.Tensor)
    assert_type(ag.chunk(x, 2, dim=0), tuple[ag.Tensor, ...])
    assert_type(ag.pi, float)
    assert ag.pi == math.pi and ag.float32 == np.dtype(np.float32)
    assert_type(ag.log(x), ag.Tensor)
    assert_type(ag.log("loss", 1.0), None)

    normal = distributions.Normal(0.0, ag.ones((2,)))
    assert_type(normal.loc, ag.Tensor)
    assert_type(normal.batch_shape, tuple[int, ...])
    assert normal.log_prob(normal.sample()).shape == (2,)
    try:
        ag.matmul(ag.ones((2, 3)), ag.ones((2, 3)))
    except ShapeError as error:
        assert isinstance(error, AiogradError) and isinstance(error, ValueError)
    else:
        raise AssertionError("shapes that do not fit were multiplied")


if __name__ == "__main__":
    ag.run(main())
