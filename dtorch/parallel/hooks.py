"""Module hooks that bring activations to the placements that a parallel plan needs."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtorch.factory import from_torch
from dtorch.graph import Graph
from dtorch.parallel.cache import place_caches
from dtorch.parallel.tp_plan import BATCH_AXES, TP_AXIS, ModulePlan, has_ranks
from dtorch.tensors import Tensor
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Placements, Replicate, Shard

#: Names of the argument that says what the batch size is, in the order in which they are looked for.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "input_values", "input_features", "pixel_values")


def add_module_hooks(module: nn.Module, plan: ModulePlan) -> None:
    """The hooks that ``plan`` asks for; they touch the ``tp`` axis only."""
    if plan.splits_input is not None:
        cut = plan.splits_input

        def split_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *rest = args
            return (first.redistribute_by_dict({TP_AXIS: Shard(first.ndim - 1, cut.unit)}), *rest)

        module.register_forward_pre_hook(split_input)
    if plan.restores_output:
        module.register_forward_hook(_restore_output)


def _restore_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    restored: Tensor = output.redistribute_by_dict({TP_AXIS: Replicate()})
    return restored


# ---- the model's entry and exit ----


@dataclass(frozen=True, slots=True)
class _Caller:
    """Where the caller's main input lies; None where it is a plain tensor."""

    mesh: DeviceMesh | None
    placements: Placements | None
    shape: tuple[int, ...]

    def kept(self, placement: Placement, tensor: Tensor) -> Placement:
        """How a result is placed where the main input is placed so: cut along a dim that is the input's, or whole."""
        if not isinstance(placement, Shard):
            return Replicate()
        end = placement.dim + 1
        return placement if end <= tensor.ndim and tensor.shape[:end] == self.shape[:end] else Replicate()


class _Frames(threading.local):
    """The calls of parallel models in progress on this thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[tuple[int, _Caller, AbstractContextManager[Any]]] = []


_frames = _Frames()


def add_entry_hooks(model: nn.Module, mesh: DeviceMesh, end: DeviceMesh) -> None:
    """Make calls of ``model``, and of the encoder that ``generate()`` calls by itself, run on ``mesh``."""
    _add_entry_hooks(model, mesh, end, is_part=False)
    encoder = encoder_of(model)
    if encoder is not None:
        _add_entry_hooks(encoder, mesh, end, is_part=True)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The part of a Hugging Face model that ``generate()`` calls by itself; None where there is none."""
    find = getattr(model, "get_encoder", None)
    encoder = find() if find is not None else None
    is_part = isinstance(encoder, nn.Module) and encoder is not model and encoder in model.modules()
    return encoder if is_part else None


def _add_entry_hooks(model: nn.Module, mesh: DeviceMesh, end: DeviceMesh, is_part: bool) -> None:
    """Make calls of ``model`` run on ``mesh``, whatever mesh the caller works on.

    Tensors among the arguments, in lists, tuples and dicts too, are brought to the mesh, and those that have the
    batch as dim 0 are split along its axes ``dp`` and ``ep``. Masks stay whole: models look up rows of them by number,
    and where they meet what is split each device uses its own rows. What the model returns goes back to the mesh of the
    caller's main input, sharded along its batch or its sequence where that was, replicated otherwise; to ``end``,
    where a call of the model ends, for plain input.
    """
    names = list(inspect.signature(model.forward).parameters)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_part and _frames.open:  # a call by the model that it is a part of
            return None
        main = find_main_input(module, args, kwargs)
        batch = main.shape[0] if main is not None and main.ndim else None
        if isinstance(main, Tensor):
            caller, graph = _Caller(main.device_mesh, main.placements, tuple(main.shape)), main.graph
        else:
            caller, graph = _Caller(None, None, ()), Graph.default_graph()
        guard = graph.device_mesh_guard(mesh)
        guard.__enter__()
        _frames.open.append((id(module), caller, guard))
        place_caches((*args, *kwargs.values()))

        def bring(name: str, value: Any) -> Any:
            rows = None if "mask" in name else batch
            return map_tensors(lambda tensor: _bring(tensor, mesh, rows), value)

        return (
            tuple(map(bring, itertools.chain(names, itertools.repeat("")), args)),
            {name: bring(name, value) for name, value in kwargs.items()},
        )

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Also called when the forward raised, and then even if `enter` never ran because a hook before it raised.
        if not _frames.open or _frames.open[-1][0] != id(module):
            return None
        _, caller, guard = _frames.open.pop()
        try:
            return map_tensors(lambda tensor: _give_back(tensor, end, caller), output)
        finally:
            guard.__exit__(None, None, None)

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    model.register_forward_hook(leave, with_kwargs=True, always_call=True)


def generate_on(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let ``model.generate()`` work on ``mesh`` with all that it makes, and return to the caller's mesh."""
    if callable(getattr(model, "generate", None)):

        def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _generate_on(self, mesh, args, kwargs)

        # A copy of the model has it too.
        object.__setattr__(model, "generate", types.MethodType(generate, model))


def _generate_on(model: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    target = given[0].device_mesh if given else Graph.default_graph().default_mesh

    def bring(tensor: torch.Tensor) -> torch.Tensor:
        is_here = isinstance(tensor, Tensor) and tensor.device_mesh == mesh
        return tensor if is_here else _to_mesh(tensor, mesh)

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        return _to_mesh(tensor, target) if isinstance(tensor, Tensor) else tensor

    graph = given[0].graph if given else Graph.default_graph()
    with graph.device_mesh_guard(mesh):
        output = type(model).generate(model, *map_tensors(bring, args), **map_tensors(bring, kwargs))
        return map_tensors(give_back, output)


def _to_mesh(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    whole = [Replicate()] * mesh.ndim
    if isinstance(tensor, Tensor):
        return tensor.redistribute(device_mesh=mesh, placements=whole)
    return from_torch(tensor, device_mesh=mesh, placements=whole)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``function`` applied to the tensors in its tuples, lists and dicts (model outputs are dicts).

    Other objects, such as key/value caches, are passed through.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, item in tree.items():
            result[key] = map_tensors(function, item)
        return result
    return tree


def find_main_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The argument that says how many rows the batch has: by name, else the first tensor with several dims."""
    names = (getattr(module, "main_input_name", _MAIN_INPUTS[0]), *_MAIN_INPUTS)
    given = [*args, *(kwargs[name] for name in names if name in kwargs), *kwargs.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    return next((tensor for tensor in tensors if tensor.ndim > 1), tensors[0] if tensors else None)


def _bring(tensor: torch.Tensor, mesh: DeviceMesh, batch: int | None) -> torch.Tensor:
    is_batched = batch is not None and tensor.ndim > 1 and tensor.shape[0] == batch
    cut = Shard(0) if is_batched else Replicate()
    wanted = {
        axis: cut if has_ranks(mesh, axis) else Replicate() for axis in BATCH_AXES if mesh.has_axis(axis)
    }
    if isinstance(tensor, Tensor) and tensor.device_mesh == mesh:
        return tensor.redistribute_by_dict(wanted) if wanted else tensor
    placements = [wanted.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]
    if isinstance(tensor, Tensor):
        return tensor.redistribute(device_mesh=mesh, placements=placements)
    if tensor.ndim == 0 or tensor.device.type != "cpu":
        return tensor
    return from_torch(tensor, device_mesh=mesh, placements=placements)


def _give_back(tensor: torch.Tensor, end: DeviceMesh, caller: _Caller) -> torch.Tensor:
    if not isinstance(tensor, Tensor):
        return tensor
    target = caller.mesh or end
    placements: list[Placement] = [Replicate()] * target.ndim
    if caller.placements is not None:
        placements = [caller.kept(placement, tensor) for placement in caller.placements]
    return tensor.redistribute(device_mesh=target, placements=placements)
