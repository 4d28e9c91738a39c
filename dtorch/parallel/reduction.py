"""Where gradients of parameters are kept, and when the terms that devices have of them are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.placement import Partial, Placement, Placements, Replicate


@dataclass(slots=True)
class _GradientHome:
    """A hook of a parameter: brings its gradients to where they are kept.

    Attributes:
        parameter: inside ``_waiting``, the parameter; its gradients are kept as terms meanwhile.
        terms: the placements of the first gradient there, with which the others are added to it.
        takes_whole: whether terms of a gathered parameter stay as large as that.
        is_of_zero: whether ZeRO has decided where they are kept.
    """

    placements: Sequence[Placement]
    parameter: Any = None
    terms: Placements | None = None
    takes_whole: bool = False
    is_of_zero: bool = False

    def __call__(self, gradient: Any) -> Any:
        parameter = self.parameter
        if parameter is None:
            return gradient.redistribute(placements=self.placements)
        if self.terms is None:
            self.terms = gradient.placements
            if parameter.grad is not None:  # of a backward pass before: a term as well
                parameter.grad = parameter.grad.redistribute(placements=self.terms)
        return gradient.redistribute(placements=self.terms)

    def wait(self, parameter: Any, takes_whole: bool) -> None:
        """Keep terms from now on."""
        self.parameter, self.takes_whole, self.terms = parameter, takes_whole, None

    def reduce(self) -> None:
        """Keep terms no more, and add up those that there are."""
        parameter, self.parameter = self.parameter, None
        if self.terms is not None and parameter.grad is not None:
            parameter.grad = parameter.grad.redistribute(placements=self.placements)


def add_gradient_hook(parameter: nn.Parameter) -> None:
    """Bring each gradient of ``parameter`` to the placements of the parameter before it is accumulated.

    Data parallelism leaves a partial sum on each part of the batch; an optimizer wants the sum. A parameter that does
    not require a gradient when it is made parallel gets no hook. Where ZeRO keeps gradients they stay: it reduces them.
    """
    if not has_zero(parameter):
        set_gradient_placements(parameter, cast(Tensor, parameter).placements)


def set_gradient_placements(
    parameter: Any, placements: Sequence[Placement], *, is_of_zero: bool = False
) -> None:
    """Bring each gradient of ``parameter`` to these placements, and no more to those that were set before."""
    if not parameter.requires_grad:
        return
    resolved = _with_gradients_whole(placements)
    home = _home_of(parameter)
    if home is None:
        parameter.register_hook(_GradientHome(resolved, is_of_zero=is_of_zero))
    else:
        home.placements, home.is_of_zero = resolved, is_of_zero


def has_zero(parameter: Any) -> bool:
    """Whether ZeRO has decided where the gradients of a parameter are kept."""
    home = _home_of(parameter)
    return home is not None and home.is_of_zero


def takes_whole_terms(parameter: Any) -> bool:
    """Whether a parameter that is kept in pieces is to be given gradients that are whole, and not reduced yet."""
    home = _home_of(parameter)
    return home is not None and home.parameter is not None and home.takes_whole


def _with_gradients_whole(placements: Sequence[Placement]) -> list[Placement]:
    """Terms of a sum all have the gradient of the sum."""
    return [Replicate() if isinstance(p, Partial) else p for p in placements]


def _home_of(parameter: Any) -> _GradientHome | None:
    hooks = (parameter._backward_hooks or {}).values()
    return next((hook for hook in hooks if isinstance(hook, _GradientHome)), None)


def reduce_once(model: nn.Module) -> AbstractContextManager[None]:
    """Inside ``with``, each device adds up its own terms of the gradients of ``model``; behind it they are reduced.

    For several backward passes before a step of the optimizer, where each would reduce what it adds to ``grad``: what
    ``no_sync()`` of DistributedDataParallel and ``set_requires_gradient_sync(False)`` of FSDP2 are for. Gradients that
    ZeRO keeps in pieces (stages 2 and 3) are whole inside, on each device. Clip and step behind it; inside, ``grad``
    is a partial sum.

    Args:
        model: on a mesh, by ``dtorch.parallelize``, or of modules of ``dtorch.nn``.

    Raises:
        SettingError: no parameter of it has gradients that are reduced.
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"reduce_once() takes a torch.nn.Module, got {type(model).__name__}")
    parameters = list(model.parameters())
    if not any(_home_of(parameter) for parameter in parameters):
        raise SettingError(
            f"reduce_once(): no gradient of this {type(model).__name__} is reduced; write "
            f"dtorch.parallelize(model, mesh), or dtorch.nn.reduce_gradients(model) for one that is on a mesh"
        )
    return _waiting(parameters, lambda parameter, home: True, takes_whole=True)


def reduce_once_without_pieces(parameters: Iterable[Any]) -> AbstractContextManager[None]:
    """``reduce_once``, but for gradients that are kept in smaller pieces than parameters are used (ZeRO).

    Those are reduced each time, as terms would take the memory that the pieces save.
    """

    def is_whole(parameter: Any, home: _GradientHome) -> bool:
        return list(home.placements) == _with_gradients_whole(parameter.placements)

    return _waiting(parameters, is_whole, takes_whole=False)


@contextmanager
def _waiting(
    parameters: Iterable[Any], is_meant: Callable[[Any, _GradientHome], bool], takes_whole: bool
) -> Iterator[None]:
    waiting: list[_GradientHome] = []
    for parameter in parameters:
        home = _home_of(parameter)
        if home is not None and home.parameter is None and is_meant(parameter, home):
            home.wait(parameter, takes_whole)
            waiting.append(home)
    try:
        yield
    finally:
        with torch.no_grad():
            for home in waiting:
                home.reduce()
