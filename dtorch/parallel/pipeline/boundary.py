"""Where one stage ends and the next begins: activations go over, gradients come back."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dtorch.parallel.hooks import map_tensors
from dtorch.parallel.pipeline.batches import to_mesh
from dtorch.tensors import Tensor
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate


class Boundary:
    """The output of a stage for one micro-batch, moved to the mesh of the next; autograd stops here.

    What the stage made is let go of: its graph is kept, its output is not, unless an op of the graph needs it.

    Attributes:
        inputs: for the next stage: the output with its tensors on ``mesh``.
    """

    def __init__(self, output: Any, mesh: DeviceMesh) -> None:
        self._edges: list[GradientEdge] = []
        self._layouts: list[Layout] = []
        self._arrived: list[Tensor] = []
        moved = map_tensors(lambda tensor: self._carry(tensor, mesh), output)
        self.inputs: tuple[Any, ...] = tuple(moved) if isinstance(moved, tuple | list) else (moved,)

    def _carry(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if not isinstance(tensor, Tensor):
            raise UnsupportedError(
                f"a stage of a pipeline gave a plain tensor, {tensor.device} of shape {list(tensor.shape)}, to the "
                f"next one; make it where the stage is: device=x.device, or dtorch.from_torch(t, mesh)"
            )
        arrived = to_mesh(cast(Tensor, tensor.detach()), mesh)
        if torch.is_grad_enabled() and tensor.requires_grad:
            arrived.requires_grad_()
            placements = tuple(Replicate() if isinstance(p, Partial) else p for p in tensor.placements)
            self._edges.append(get_gradient_edge(tensor))
            self._layouts.append(Layout(tensor.device_mesh, placements))
            self._arrived.append(arrived)
        return arrived

    def backward(self) -> None:
        """Bring the gradients of what arrived to the stage that made it, and go on backward there."""
        edges, gradients = [], []
        for edge, layout, arrived in zip(self._edges, self._layouts, self._arrived, strict=True):
            if arrived.grad is None:  # the next stage did not use it
                continue
            gradient = cast(Tensor, arrived.grad)
            edges.append(edge)
            gradients.append(
                gradient.redistribute(device_mesh=layout.mesh, placements=list(layout.placements))
            )
            arrived.grad = None
        if edges:
            torch.autograd.backward(edges, gradients)
