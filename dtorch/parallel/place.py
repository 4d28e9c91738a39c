"""The tensors of a model, taken from where they are and put on a mesh, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from dtorch.factory import from_torch
from dtorch.graph import Graph
from dtorch.parallel.tp_plan import ModulePlan
from dtorch.parallel.upload import finish_reading, upload
from dtorch.parallel.weights import Checkpoint, StoredTensor
from dtorch.tensors import Tensor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placements, Replicate

#: Called after each tensor with its name and its number of elements.
Progress: TypeAlias = Callable[[str, int], object]


@dataclass(slots=True)
class Home:
    """Where one tensor stands in a model: several places for a tied weight. Holds no reference to the tensor."""

    places: list[tuple[nn.Module, str]]
    names: list[str]
    mesh: DeviceMesh
    placements: Placements
    is_parameter: bool
    #: Whether checkpoints have it.
    is_persistent: bool
    stored: StoredTensor | None = field(default=None)

    def tensor(self) -> torch.Tensor:
        """The tensor that stands there now."""
        module, key = self.places[0]
        table = module._parameters if self.is_parameter else module._buffers
        found = table[key]
        assert found is not None, "homes are made for tensors"
        return found

    def fill(self, value: Tensor) -> None:
        """Put ``value`` in every place; the tensor that stood there loses its last owner in the model."""
        if self.is_parameter:
            parameter = nn.Parameter(value, requires_grad=self.tensor().requires_grad)
            for module, key in self.places:
                module._parameters[key] = parameter
        else:
            for module, key in self.places:
                module._buffers[key] = value


def collect_homes(
    model: nn.Module, mesh_of: Callable[[str], DeviceMesh], plans: Mapping[str, ModulePlan]
) -> list[Home]:
    """Every different parameter and buffer of ``model``, with the mesh and the placements that it gets.

    Args:
        mesh_of: the mesh of the module with a name. A tied weight is on that of the first one.
    """
    homes: dict[int, Home] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                is_parameter = table is module._parameters
                home = homes.get(id(tensor))
                if home is None:
                    mesh = mesh_of(prefix)
                    home = homes[id(tensor)] = Home(
                        places=[],
                        names=[],
                        mesh=mesh,
                        placements=plans[prefix].placements[key]
                        if is_parameter
                        else (Replicate(),) * mesh.ndim,
                        is_parameter=is_parameter,
                        is_persistent=is_parameter or key not in module._non_persistent_buffers_set,
                    )
                home.places.append((module, key))
                home.names.append(f"{prefix}.{key}" if prefix else key)
    return list(homes.values())


def find_stored(homes: Sequence[Home], checkpoint: Checkpoint, base: str) -> None:
    """Tell every home what the checkpoint has for it.

    Raises:
        SettingError: the checkpoint lacks a weight, or has it in another shape.
    """
    missing = []
    for home in homes:
        if not home.is_persistent:
            continue
        home.stored = checkpoint.find(home.names, base)
        tensor = home.tensor()
        if home.stored is None:
            if home.is_parameter or tensor.is_meta:
                missing.append(home.names[0])
        elif home.stored.shape != tuple(tensor.shape):
            raise SettingError(
                f"{home.names[0]} has shape {tuple(tensor.shape)} in the model and {home.stored.shape} in "
                f"{home.stored.file}: this checkpoint is of another model"
            )
    if missing:
        raise SettingError(
            f"checkpoint={str(checkpoint.path)!r} lacks {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. It has "
            f"{', '.join(sorted(checkpoint.tensors)[:3])}, ..."
        )


def check_sources(homes: Sequence[Home]) -> None:
    """Refuse a model with tensors that have no values anywhere.

    Raises:
        SettingError: a tensor is on ``"meta"`` and in no checkpoint.
    """
    empty = [home.names[0] for home in homes if home.stored is None and home.tensor().is_meta]
    if empty:
        raise SettingError(
            f"{len(empty)} tensors are on 'meta' and have no values: {', '.join(empty[:5])}. Say where their values "
            f"are: parallelize(model, mesh, checkpoint=folder)"
        )


def place(homes: Sequence[Home], on_progress: Progress | None = None) -> None:
    """Put every tensor on its mesh, each device receiving its part only.

    Raises:
        SettingError: a file could not be read.
    """
    for home in homes:
        value = _placed(home)
        home.fill(value)
        if on_progress is not None:
            on_progress(home.names[0], value.numel())
    if any(home.stored is not None for home in homes):
        finish_reading(Graph.default_graph())


def _placed(home: Home) -> Tensor:
    tensor, mesh = home.tensor(), home.mesh
    # A partial sum is made on the devices, from whole copies.
    whole = [Replicate() if isinstance(p, Partial) else p for p in home.placements]
    value: Any
    if home.stored is not None:
        value = upload(home.stored, mesh, whole)
        value = value if value.dtype == tensor.dtype else value.to(tensor.dtype)
    elif isinstance(tensor, Tensor):
        value = tensor
        value = value.detach().redistribute(device_mesh=mesh, placements=whole)
    else:
        value = from_torch(tensor.detach(), device_mesh=mesh, placements=whole)
    if any(isinstance(p, Partial) for p in home.placements):
        value = value.redistribute(placements=home.placements)
    return cast(Tensor, value)
