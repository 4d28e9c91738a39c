"""Gradients of weights that are computed later than the rest of their backward pass.

On the gradient of an activation other devices may wait, on that of a weight only the optimizer. A pipeline passes on
the first and fills idle time with the second (``dtorch.parallel.pipeline``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class DeferredWeights:
    """Gradients of the weights of linear layers that ran inside ``forward()``: not computed until ``run()``.

    The backward pass inside ``backward()`` leaves them out, and keeps what they are made of: the input of the layer and
    the gradient of its output. Gradients of other parameters are computed as ever.
    """

    def __init__(self) -> None:
        #: Requires a gradient, and never gets one.
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._is_open = False
        self._waiting: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Linear layers that run inside, on this thread, take part; so do none that are computed again later."""
        outer, _open.later = _open.later, self
        try:
            yield
        finally:
            _open.later = outer

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward pass inside is the one whose weights wait; what derives inside of a forward pass is not."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def add(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """What a layer gives; called on autograd's thread."""
        if self._is_open:
            self._waiting.append((weight, compute))

    def run(self) -> None:
        """Compute what is waiting and add it to the ``grad`` of each weight, whose hooks see it."""
        waiting, self._waiting = self._waiting, []
        for weight, compute in waiting:
            with torch.no_grad():
                gradient = compute()
            torch.autograd.backward((weight,), (gradient,))


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A weight whose gradient is computed later."""

    later: DeferredWeights
    weight: torch.Tensor

    @property
    def anchor(self) -> torch.Tensor:
        """See ``DeferredWeights``."""
        return self.later.anchor

    def give(self, compute: Callable[[], torch.Tensor]) -> None:
        """How to compute it."""
        self.later.add(self.weight, compute)


class _Open(threading.local):
    """What the forward passes on this thread are to give their weights' gradients to."""

    later: DeferredWeights | None = None


_open = _Open()


def deferring(weight: torch.Tensor) -> Waiting | None:
    """What a linear layer waits with; None when the gradient is wanted at once, or the weight follows from others."""
    later = _open.later
    if later is None or not (weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return None
    return Waiting(later, weight)
