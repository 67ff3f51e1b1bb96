"""The backward graph: nodes, edges, hooks, and queries about the running pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.graph.accumulate_grad import AccumulateGrad as AccumulateGrad
from aiograd.graph.current import current_graph_task_id as current_graph_task_id
from aiograd.graph.current import current_node as current_node
from aiograd.graph.current import execution_order as execution_order
from aiograd.graph.current import queue_callback as queue_callback
from aiograd.graph.current import will_run as will_run
from aiograd.graph.gradient_edge import GradientEdge as GradientEdge
from aiograd.graph.hooks import HandleGroup as HandleGroup
from aiograd.graph.hooks import RemovableHandle as RemovableHandle
from aiograd.graph.input_metadata import InputMetadata as InputMetadata
from aiograd.graph.multi_grad import any_requires_grad as any_requires_grad
from aiograd.graph.multi_grad import collect_next_edges as collect_next_edges
from aiograd.graph.multi_grad import create_gradient_edge as create_gradient_edge
from aiograd.graph.multi_grad import get_gradient_edge as get_gradient_edge
from aiograd.graph.multi_grad import register_multi_grad_hook as register_multi_grad_hook
from aiograd.graph.mutation import allow_mutation_on_saved_tensors as allow_mutation_on_saved_tensors
from aiograd.graph.node import Edge as Edge
from aiograd.graph.node import Node as Node
from aiograd.graph.saved import disable_saved_tensors_hooks as disable_saved_tensors_hooks
from aiograd.graph.saved import saved_tensors_hooks as saved_tensors_hooks
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)
