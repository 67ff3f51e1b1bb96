"""A backward pass in two halves: first the gradients of some inputs, later the gradients of the weights. Pure, as `GraphTask` is.

A pipeline sends the gradient of a stage's inputs on as early as it can and computes the gradients of its weights when it has nothing better to
do. `InputPlan` is the plan of the first half, a `ParameterGroup` holds the work left for the second, and `WeightPlan` is the plan of the second. Both
are run by the usual GraphTask, so hooks, user code, placement, cancellation and the commit work as in any pass.

Note [How the graph is divided]
    Call *upper* the nodes from which an input can be reached, inputs included. Every node that leads to an upper node is upper, so the gradients
    of upper nodes need nothing but upper nodes: the input half computes them all. The rest are the edges that lead from an upper node
    out of this region and on to a weight, and the nodes below them. The weight half starts from the upper nodes with such edges, with the gradients
    that have arrived there, runs each of them once more for just these edges, and goes on to the weights. So every edge of the graph belongs
    to one half, in any graph: weights used twice on one path, nodes with several outputs, heads that no input reaches.
    Each sum is made in one half, of the same terms in the same order as in an undivided pass, so the gradients are the same to the bit.

Note [Where no input needs a gradient]
    This is so in the first stage of a pipeline. Then a node is upper if it leads to a node with an argument that needs no gradient (the
    data, usually): gradients of activations are the first half, gradients of weights the second.

Note [Work that cannot be divided]
    Some rules make gradients for both halves at once: joint rules of rows, and functions of users that do not ask for the needed gradients. They run
    in the input half, and the gradients they return for the edges of the other half are kept instead of their saved values. If a function
    asks is only seen while it runs (`InputPlan.should_compute`): one that has not asked has returned all of its gradients.

Note [Values kept between the halves]
    An upper node that runs again keeps its gradient and its saved values; the values of all other upper nodes are released in the input half. Values
    that saved-tensor hooks had packed are unpacked once and handed on. In the weight half, a gradient is dropped as soon as its node has run. No kept
    value refers to a tensor that a stage returned, to a pass, or back to the group.

Note [Halves of small graphs are walked]
    The work around the rules costs a small stage several times as much as they do, and halves have more of it than an undivided pass. So where a walk
    could run the whole graph, it runs the halves: numbers are a topological order there, so one look at each node, from the first recorded on, finds
    its targets (`InputPlan._put_in_order`), and rows run by code compiled for the outputs wanted (`OpNode.vjp_part`), and there are no buffers and
    counts. Only where a gradient that undivided work has returned would have to be added between two others, the weight half counts. Measured by
    ``tests/benchmarks/pipelines.py``: both halves of a stage of a few small layers in about twice the time of the undivided pass.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2024), for the idea of two halves; PyTorch ``distributed/pipelining/_backward.py``, which cuts
elsewhere.
"""

from __future__ import annotations

from aiograd.engine.split_backward.input_plan import InputPlan as InputPlan
from aiograd.engine.split_backward.parameter_group import ParameterGroup as ParameterGroup
from aiograd.engine.split_backward.weight_plan import WeightPlan as WeightPlan
