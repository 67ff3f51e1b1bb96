"""A backward pass, step by step: printed, and as a page for a browser.

    python examples/step_through.py

The page, ``out/step.html``, goes forward and back through the pass: which node runs, the gradients that come and go, the sums that wait.
"""

from pathlib import Path

import numpy as np

import aiograd as ag

PAGE = Path(__file__).parent.parent / "out" / "step.html"


async def main() -> None:
    ag.seed(0)
    x = ag.tensor([[0.5, -1.0]])
    shared = ag.tensor([[0.3, -0.2], [0.1, 0.4]], requires_grad=True)
    scale = ag.tensor([2.0, -1.0], requires_grad=True)
    with ag.detect_anomaly():  # notes the line of each operation
        hidden = (x @ shared).tanh()
        again = (hidden @ shared).tanh()  # the same weights: their gradient is a sum of two
        loss = ((again * scale) ** 2).sum() + 0.1 * (scale * scale).sum()

    steps = await ag.viz.step(loss, params={"shared": shared, "scale": scale})
    print(steps)
    PAGE.parent.mkdir(exist_ok=True)
    steps.save(PAGE)
    assert shared.grad is None  # nothing was written, and the graph is still there
    await loss.backward()
    for step in steps:
        if step.accumulated is not None:
            assert np.array_equal({"shared": shared, "scale": scale}[step.title].grad.numpy(), step.accumulated.values)
    print(f"{len(steps)} steps, with the bits of a backward; to step through them open {PAGE}")


ag.run(main())
