"""Templates say which of their outputs lie in the memory of which inputs, as far as it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.viewed import makes_new_memory
from tests.support.client import scripted_session

CALLS: dict[str, tuple[Callable[[Any], Any], list[int] | None]] = {
    "aten::relu": (torch.relu, [-1]),
    "aten::add.Tensor": (lambda x: x + x, [-1]),
    "aten::native_layer_norm": (lambda x: torch.nn.functional.layer_norm(x, (4,)), [-1, -1, -1]),
    "aten::max.dim": (lambda x: x.max(1), [-1, -1]),
    "aten::t": (lambda x: x.t(), [0]),
    "aten::select.int": (lambda x: x[0], [0]),
    "aten::split.Tensor": (lambda x: x.split(2), [0, 0]),
    "aten::add_.Tensor": (lambda x: x.add_(1), []),
    "dtorch::redistribute": (lambda x: x.redistribute(placements=[Shard(0)]), [-1]),
    "dtorch::attention": (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), None),
}


@pytest.mark.parametrize("op", CALLS)
def test_what_a_template_says(op: str) -> None:
    call, views = CALLS[op]
    with scripted_session() as controller:
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        x = dtorch.empty(4, 4, device_mesh=mesh, placements=[Replicate()])
        call(x)
        found = [record.views for record in controller.templates.values() if record.op.startswith(op)]
    assert found == [views], [record.op for record in controller.templates.values()]


@pytest.mark.parametrize(
    ("op", "is_new"),
    [
        ("aten::mm", True),
        ("aten::linear", True),
        ("aten::native_dropout", True),
        ("aten::view", False),
        ("aten::unbind.int", False),
        ("aten::_unsafe_view", False),
        ("aten::reshape", False),
        ("aten::einsum", False),
        ("aten::no_such_op", False),
        ("dtorch::resized", False),
    ],
)
def test_which_kernels_make_new_memory(op: str, is_new: bool) -> None:
    assert makes_new_memory(op) is is_new
