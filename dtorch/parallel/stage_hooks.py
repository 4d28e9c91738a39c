"""Module hooks that bring activations from stage to stage, in a model that does not know of stages."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtorch.graph import Graph
from dtorch.linked import last_write
from dtorch.parallel.hooks import map_tensors
from dtorch.parallel.pipeline.batches import to_mesh
from dtorch.parallel.stages import Stages
from dtorch.tensors import Tensor
from dtorch_runtime.ir.mesh import DeviceMesh


def add_stage_hooks(model: nn.Module, stages: Stages) -> None:
    """Let each unit of ``model`` run on its mesh: what it is called with is brought there.

    Behind a unit the program goes on where it was, so that what the model's own code makes between units (masks,
    states) is beside the activations. Labels go where the model ends.
    """
    if len(stages.meshes) == 1:
        return
    for name, module in model.named_modules():
        if name in stages.units:
            _add_unit_hooks(module, stages.mesh_of(name))
    _add_call_hooks(model, stages.meshes[stages.end])


@dataclass(slots=True)
class _Call:
    """A call of a model in stages: where the program is, and what was brought from stage to stage already."""

    model_id: int
    mesh: DeviceMesh | None = None
    guard: AbstractContextManager[Any] | None = None
    #: By the tensor's id and the mesh; masks and tables of positions go once to each, not once to each layer.
    brought: dict[tuple[Any, ...], tuple[weakref.ReferenceType[Tensor], Tensor]] = field(default_factory=dict)

    def go_to(self, mesh: DeviceMesh) -> None:
        """Let what is made without a mesh be there."""
        if mesh == self.mesh:
            return
        self.leave()
        self.guard = Graph.default_graph().device_mesh_guard(mesh)
        self.guard.__enter__()
        self.mesh = mesh

    def leave(self) -> None:
        if self.guard is not None:
            self.guard.__exit__(None, None, None)
            self.guard = self.mesh = None

    def bring(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if not isinstance(tensor, Tensor) or tensor.device_mesh == mesh:
            return tensor
        # Autograd records a move only where it records, and a write to the tensor makes another value of it.
        key = (id(tensor), mesh, last_write(tensor._handle), torch.is_grad_enabled())
        known = self.brought.get(key)
        if known is not None and known[0]() is tensor:
            return known[1]
        moved = to_mesh(tensor, mesh)
        self.brought[key] = weakref.ref(tensor), moved
        return moved


class _Calls(threading.local):
    """Those in progress on this thread, outermost first; and the guards of units that run outside of any."""

    def __init__(self) -> None:
        self.open: list[_Call] = []
        self.alone: list[tuple[int, AbstractContextManager[Any]]] = []


_calls = _Calls()


def _add_call_hooks(model: nn.Module, end: DeviceMesh) -> None:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(id(module))
        _calls.open.append(call)

        def bring(name: str, value: Any) -> Any:
            return map_tensors(lambda t: call.bring(t, end), value) if "label" in name else value

        return args, {name: bring(name, value) for name, value in kwargs.items()}

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # Also called when the forward raised, and then even if `enter` never ran because a hook before it raised.
        if _calls.open and _calls.open[-1].model_id == id(module):
            _calls.open.pop().leave()

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, prepend=True, always_call=True)


def _add_unit_hooks(module: nn.Module, mesh: DeviceMesh) -> None:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _calls.open:
            call = _calls.open[-1]
            call.go_to(mesh)
        else:  # computed again for its backward, or called by itself
            call = _Call(id(module))
            guard = Graph.default_graph().device_mesh_guard(mesh)
            guard.__enter__()
            _calls.alone.append((id(module), guard))

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            return call.bring(tensor, mesh)

        return map_tensors(bring, args), map_tensors(bring, kwargs)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if _calls.alone and _calls.alone[-1][0] == id(module):
            _calls.alone.pop()[1].__exit__(None, None, None)

    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(leave, prepend=True, always_call=True)
