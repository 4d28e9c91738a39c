"""Which part of a model is on which stage of a mesh with an axis ``pp``. Decisions; nothing is changed here.

A model is taken apart into *units*, in the order in which it registers them: the children of its lists of layers, and
every other module outside of such a list. Layers are shared out evenly; what comes before the first layer is on its
stage, what comes behind a layer on that layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from dtorch.parallel.pipeline.assign import assign_layers_to_stages
from dtorch.parallel.tp_plan import PP_AXIS
from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Stages:
    """The meshes of the stages, and the stage of each unit by its name. One stage where the mesh has no ``pp``.

    A call of the model begins on stage 0, and ends on stage ``end``, where its last unit with weights is.
    """

    meshes: tuple[DeviceMesh, ...]
    units: Mapping[str, int]
    end: int

    def mesh_of(self, name: str) -> DeviceMesh:
        """The mesh of the module with this name; modules that hold units are on the first."""
        while name and name not in self.units:
            name = name.rpartition(".")[0]
        return self.meshes[self.units.get(name, 0)]


def plan_stages(model: nn.Module, mesh: DeviceMesh) -> Stages:
    """The stages of ``model`` on ``mesh``.

    Raises:
        SettingError: the model has no list of layers, fewer layers than stages, or a module that shares weights with
            several stages.
    """
    if not mesh.has_axis(PP_AXIS):
        return Stages((mesh,), {}, 0)
    meshes = tuple(_named(stage_mesh) for stage_mesh in mesh.unbind(PP_AXIS))
    units = list(_units(model))
    num_layers = sum(unit.is_layer for unit in units)
    if not num_layers and len(meshes) > 1:
        raise SettingError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of layers, so parallelize() cannot tell "
            f"where its {len(meshes)} stages begin; keep the layers in one, or give a mesh without {PP_AXIS!r}"
        )
    of_layers = assign_layers_to_stages(num_layers, len(meshes)) if num_layers else []
    return Stages(meshes, *_with_shared_weights(units, of_layers))


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    module: nn.Module
    is_layer: bool


def _named(mesh: DeviceMesh) -> DeviceMesh:
    """A stage of a mesh that has no other axis: decisions go by names, so its one axis keeps that of the stages."""
    if mesh.mesh_dim_names is not None:
        return mesh
    return DeviceMesh(mesh.device_type, list(mesh.devices), mesh_dim_names=(PP_AXIS,))


def _units(model: nn.Module) -> Iterator[_Unit]:
    """In order of registration, each module once."""
    lists = _outermost(model, nn.ModuleList) or _outermost(model, nn.Sequential)
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module, are_layers: bool) -> Iterator[_Unit]:
        for key, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if not are_layers and any(id(part) in lists for part in child.modules()):
                yield from walk(name, child, id(child) in lists)
            else:
                seen.add(id(child))
                yield _Unit(name, child, are_layers)

    return walk("", model, id(model) in lists)


def _outermost(module: nn.Module, kind: type[nn.Module]) -> set[int]:
    """The ids of modules of a kind that have children and are inside no other of it."""
    if isinstance(module, kind) and len(module._modules):
        return {id(module)}
    return {found for child in module.children() for found in _outermost(child, kind)}


def _with_shared_weights(units: list[_Unit], of_layers: list[int]) -> tuple[dict[str, int], int]:
    """The stage of each unit, and that of the last one with weights.

    One that shares a weight with an earlier unit (a head that is tied to the embedding) is where that is.
    """
    owners: dict[int, int] = {}
    stages: dict[str, int] = {}
    left = iter(of_layers)
    stage = end = 0
    for unit in units:
        if unit.is_layer:
            stage = next(left)
        own = list(unit.module.parameters())
        if own or unit.is_layer:
            shared = sorted({owners[id(parameter)] for parameter in own if id(parameter) in owners})
            if len(shared) > 1:
                raise SettingError(
                    f"{unit.name!r} shares weights with modules on the stages {shared}, and it can be on one of them "
                    f"only; give a mesh with fewer stages, or the module weights of its own"
                )
            end = stages[unit.name] = shared[0] if shared else stage
            for parameter in own:
                owners.setdefault(id(parameter), end)
        elif next(unit.module.buffers(), None) is not None:
            # Tables that all layers read (rotary frequencies) are made at the beginning, wherever they are registered.
            stages[unit.name] = 0
    return stages, end
