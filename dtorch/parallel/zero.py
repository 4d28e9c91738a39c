"""``zero``: optimizer state, gradients and parameters cut over the devices that would hold copies of them.

The three stages of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054); the third is what FSDP does too. All that changes is where tensors are: the values of every program
stay what they are without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from dtorch.parallel.cuts import Axis, axis_number, piece_placements
from dtorch.parallel.reduction import has_zero, set_gradient_placements
from dtorch.parallel.zero_gather import gather_in_use
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError, SettingError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Placements

Module = TypeVar("Module", bound=nn.Module)


def zero(
    model: Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: Literal[1, 2, 3],
    axis: Axis = "dp",
    compute_dtype: torch.dtype | None = None,
) -> Module:
    """Cut what training keeps of ``model`` over the devices of a mesh axis on which its parameters are replicated.

    Args:
        model: changed in place. Its parameters are on a mesh, by ``dtorch.parallelize`` or because they were made on
            one, and keep the cuts that they have on other axes.
        optimizer: any of ``torch.optim``, with parameters of ``model``. Stages 1 and 2 need it. With stage 3 give it
            when it has state already; one that is made behind this call cuts its state by itself.
        stage: what is cut. 1: the optimizer's state. 2: gradients too. 3: parameters too; each is gathered where a
            module uses it and dropped behind it, in the backward pass again.
        axis: of the mesh, by name or number.
        compute_dtype: stage 3 only: what modules see, and what is gathered, has this dtype; parameters, gradients and
            the optimizer's state keep theirs. Floating-point arguments of ``model`` are converted.

    Returns:
        ``model`` itself.

    Raises:
        SettingError: another stage, no optimizer where one is needed or one for other parameters, a ``compute_dtype``
            that is not floating point or comes with a lower stage, a model that is not on a mesh or had this before,
            as a whole or in part.
        MeshError: no parameter is on a mesh that has the axis.
    """
    _check(model, optimizer, stage, compute_dtype)
    homes = _homes(model, axis)
    own = {id(parameter) for parameter in model.parameters()}
    if optimizer is not None and not any(id(parameter) in own for parameter in _parameters(optimizer)):
        raise SettingError(
            f"zero(): none of the parameters of this {type(optimizer).__name__} is one of the model's; make the "
            f"optimizer behind dtorch.parallelize(model, mesh), from model.parameters()"
        )
    with torch.no_grad():
        for parameter, placements in homes.items():
            whole = parameter.placements
            if stage == 3:
                _move(parameter, placements)
            set_gradient_placements(parameter, whole if stage == 1 else placements, is_of_zero=True)
            if parameter.grad is not None and stage != 1:
                parameter.grad = cast(Tensor, parameter.grad).redistribute(placements=placements)
        if optimizer is not None:
            _cut_state(optimizer, homes)
    if stage == 3:
        # Parameters that stay whole have the dtype too.
        seen = homes if compute_dtype is None else {p for p in model.parameters() if isinstance(p, Tensor)}
        gather_in_use(model, axis, seen, compute_dtype)
    elif optimizer is not None:
        _step_on_pieces(optimizer, homes)
    object.__setattr__(model, "dtorch_zero", stage)
    return model


def _check(model: Any, optimizer: Any, stage: Any, compute_dtype: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SettingError(f"zero() takes a torch.nn.Module, got {type(model).__name__}")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise SettingError(
            f"zero(stage=) is 1 (optimizer state), 2 (gradients too) or 3 (parameters too), got {stage!r}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"zero(optimizer=) takes a torch.optim optimizer, got {type(optimizer).__name__}")
    if optimizer is None and stage != 3:
        raise SettingError(
            f"zero(stage={stage}) cuts the state of an optimizer and was given none; write "
            f"zero(model, optimizer, stage={stage})"
        )
    if compute_dtype is not None and not (
        isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
    ):
        raise SettingError(f"zero(compute_dtype=) is a dtype such as torch.bfloat16, got {compute_dtype!r}")
    if compute_dtype is not None and stage != 3:
        raise SettingError(
            f"zero(compute_dtype=) is for stage 3, which gathers parameters in it; with stage {stage} write "
            f"torch.autocast('dtorch', {compute_dtype})"
        )
    if hasattr(model, "dtorch_zero"):
        raise SettingError(
            f"this {type(model).__name__} has ZeRO stage {model.dtorch_zero} already; build it again for another"
        )
    had = [name for name, parameter in model.named_parameters() if has_zero(parameter)]
    if had:
        raise SettingError(
            f"{len(had)} parameters of this {type(model).__name__} have ZeRO already, {had[0]} first; call zero() "
            f"once, for the whole model"
        )


# ---- where the pieces are ----


def _homes(model: nn.Module, axis: Axis) -> dict[Tensor, Placements]:
    """The placements of the pieces of each parameter that is to be cut.

    Raises:
        SettingError: no parameter is on a mesh.
        MeshError: no mesh has the axis.
    """
    # A recurrent module has its weights in a list of its own, and reads that: they stay whole.
    whole = {id(p) for m in model.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
    placed = [p for p in model.parameters() if isinstance(p, Tensor)]
    if not placed:
        raise SettingError(
            "zero() takes a model that is on a mesh, and this one is not; write "
            "dtorch.parallelize(model, mesh) first"
        )
    with_axis = [p for p in placed if axis_number(p.device_mesh, axis) is not None]
    if not with_axis:
        raise MeshError(
            f"zero(axis={axis!r}): the model is on {placed[0].device_mesh!r}, which has no such axis; name the axis "
            f"along which its parameters are replicated"
        )
    found = {
        p: piece_placements(p.shape, Layout(p.device_mesh, tuple(p.placements)), axis)
        for p in with_axis
        if id(p) not in whole
    }
    return {parameter: placements for parameter, placements in found.items() if placements is not None}


def _move(parameter: Any, placements: Placements) -> None:
    """Let the parameter, the object that optimizers and modules hold, stand for its value placed otherwise."""
    parameter.data = parameter.data.redistribute(placements=placements)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _cut_state(optimizer: torch.optim.Optimizer, homes: dict[Tensor, Placements]) -> None:
    """Cut what an optimizer that has made steps keeps for each parameter as the parameter is cut."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if parameter not in homes or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            placements = homes[cast(Tensor, parameter)]
            if value.placements != placements:
                state[key] = value.redistribute(placements=placements)


# ---- stages 1 and 2 ----


def _step_on_pieces(optimizer: torch.optim.Optimizer, homes: dict[Tensor, Placements]) -> None:
    """Let every step of the optimizer see each parameter as pieces: a local slice before it, a gather behind it.

    What the optimizer makes like its parameters, its state, is cut then as they are. What is gathered is written to the
    memory that the parameter had, as an optimizer writes to it: aliases of it see that, and a captured step finds the
    parameters where they were.
    """
    #: During a step: what each parameter stands for outside of it.
    wholes: dict[Any, Any] = {}

    @torch.no_grad()
    def cut() -> None:
        for parameter in _parameters(optimizer):
            if parameter in homes:
                if parameter not in wholes:  # a step that raised has left pieces
                    wholes[parameter] = parameter.data
                    _move(parameter, homes[parameter])
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.redistribute(placements=homes[parameter])
        _cut_state(optimizer, homes)  # what a state dict has brought since

    @torch.no_grad()
    def gather() -> None:
        for parameter, whole in list(wholes.items()):
            gathered = parameter.data.redistribute(placements=whole.placements)
            parameter.data = whole
            parameter.copy_(gathered)
            del wholes[parameter]

    def whole_inside(closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            gather()
            loss = closure()  # where it raises, parameters stay whole
            cut()
            return loss

        return evaluate

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut()
        # The optimizer itself is the first of the arguments.
        args = tuple(
            whole_inside(arg) if index == 1 and callable(arg) else arg for index, arg in enumerate(args)
        )
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": whole_inside(kwargs["closure"])}
        return args, kwargs

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: gather())
