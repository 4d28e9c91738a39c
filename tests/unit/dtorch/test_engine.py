"""Backward passes of programs that have tensors of other libraries too."""

from __future__ import annotations

from dtorch.engine import _on_a_named_mesh


class DTensorLike:
    """What torch's DTensor has in common with a tensor of the cluster."""

    _spec = None
    device_mesh = None


def test_a_gradient_that_is_a_dtensor_is_on_no_mesh_of_ours() -> None:
    assert _on_a_named_mesh([DTensorLike(), [DTensorLike()], None]) is None
