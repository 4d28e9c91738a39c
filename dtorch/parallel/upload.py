"""A stored tensor to its devices, without ever being whole in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dtorch.graph import Graph
from dtorch.issue import upload_boxes
from dtorch.location import capture
from dtorch.parallel.weights import StoredTensor
from dtorch.spec import intern_spec
from dtorch.tensors import Tensor
from dtorch_runtime.ir.layout import Layout, resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement


def upload(stored: StoredTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The tensor on ``mesh``, in the dtype of the file. ``placements`` have no partial axes.

    Each device is sent its own piece, read in blocks of rows; how many of them may be on the way at once is
    ``Settings.max_outstanding_bytes``.
    """
    layout = Layout(mesh, resolve_placements(placements, mesh, len(stored.shape)))
    spec = intern_spec(stored.shape, stored.dtype, layout)
    location = capture(sys._getframe(1))
    made: Tensor = upload_boxes(Tensor, Graph.default_graph(), spec, stored.blocks, stored.name, location)
    return made
