"""How a tensor prints: like torch's, and where it lives."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.dispatch import fetched


def format_tensor(tensor: Any) -> str:
    """Value, shape, mesh and placements. Fetches the value; an error of it is raised."""
    value = repr(fetched(tensor))
    suffixes = [
        f"shape={tuple(tensor.shape)}",
        f"device_mesh={tensor.device_mesh!r}",
        f"placements={list(tensor.placements)!r}",
    ]
    if tensor.grad_fn is not None:
        suffixes.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        suffixes.append("requires_grad=True")
    body = f"{value[:-1]}, {', '.join(suffixes)})"
    if isinstance(tensor, torch.nn.Parameter):
        return f"Parameter containing:\n{body}"
    return body
