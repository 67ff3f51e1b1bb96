"""Twelve awaited lines, ending in a finite-difference check of the number they print."""

import numpy as np

import aiograd as ag


async def main() -> None:
    x = ag.tensor([0.5, -1.0, 2.0], dtype=np.float64, requires_grad=True)
    w = ag.tensor([1.5, 0.3, -0.7], dtype=np.float64, requires_grad=True)
    loss = np.tanh(x * w).sum() ** 2  # numpy's functions record
    await loss.backward()  # and the event loop stays free
    print("d loss / d x =", x.grad)

    (slope,) = await ag.grad(np.tanh(x * w).sum() ** 2, [x], create_graph=True)
    (curvature,) = await ag.grad(slope.sum(), [x])  # gradients of gradients
    print("second derivatives, summed by row =", curvature)

    step = np.array([1e-6, 0.0, 0.0])
    with ag.no_grad():  # belongs to this task alone
        difference = (np.tanh((x + step) * w).sum() ** 2 - np.tanh((x - step) * w).sum() ** 2) / 2e-6
    print(f"finite difference for x[0] = {difference.item():.9f}, backward said {x.grad[0].item():.9f}")
    assert abs(difference.item() - x.grad[0].item()) < 1e-7


ag.run(main())
