"""``DeviceMesh``: an N-D array of cluster-wide device ids whose axes may have names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from dtorch_runtime.errors import MeshError

DEVICE_TYPES = ("cpu", "cuda")


class DeviceMesh:
    """An N-D array of devices. Immutable, hashable; equal when type, ids, shape and axis names are equal.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``. CPU devices are virtual: workers of a node agent.
        mesh: nested lists (or anything with ``tolist()``) of distinct device ids, at least one.
        mesh_dim_names: a name for each axis.

    Raises:
        MeshError: the array is ragged, empty, has a repeated or negative id, or the names do not fit.
    """

    __slots__ = ("__dict__", "_hash", "device_type", "devices", "mesh_dim_names", "shape")

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        if device_type not in DEVICE_TYPES:
            raise MeshError(
                f"device_type is one of {', '.join(map(repr, DEVICE_TYPES))}, got {device_type!r}; "
                f"write DeviceMesh('cpu', [0, 1])"
            )
        nested = mesh.tolist() if hasattr(mesh, "tolist") else mesh
        if isinstance(nested, int):
            nested = [nested]
        shape, devices = _flatten(nested)
        _check_devices(devices)
        self.device_type: str = device_type
        self.shape: tuple[int, ...] = shape
        #: Device ids in row-major order.
        self.devices: tuple[int, ...] = devices
        self.mesh_dim_names: tuple[str, ...] | None = _check_names(mesh_dim_names, shape)
        self._hash = hash((self.device_type, self.shape, self.devices, self.mesh_dim_names))

    @classmethod
    def from_flat(cls, device_type: str, shape: Sequence[int], devices: Sequence[int]) -> DeviceMesh:
        """A mesh from its shape and its ids in row-major order.

        Raises:
            MeshError: the ids do not fill the shape, or the mesh is malformed otherwise.
        """
        if not shape or min(shape) < 1 or math.prod(shape) != len(devices):
            raise MeshError(f"{len(devices)} device ids do not fill a mesh of shape {tuple(shape)}")
        return cls(device_type, _nest(list(devices), tuple(shape)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: int | str | None = None) -> int:
        """Number of devices, or of ranks along ``axis`` (an index or a name)."""
        return len(self.devices) if axis is None else self.shape[self.axis(axis)]

    def axis(self, name: int | str) -> int:
        """The index of an axis given by name (or by index, checked).

        Raises:
            MeshError: there is no such axis.
        """
        if isinstance(name, int):
            if not -self.ndim <= name < self.ndim:
                raise MeshError(
                    f"{self!r} has {self.ndim} axes; there is no axis {name}. Write one from 0 to {self.ndim - 1}"
                )
            return name % self.ndim
        if self.mesh_dim_names is None or name not in self.mesh_dim_names:
            names = self.mesh_dim_names
            write = "one of them, or name the axes: " if names else "axis numbers, or name the axes: "
            raise MeshError(
                f"{self!r} has no axis named {name!r}; its axes are {names or 'unnamed'}. Write {write}"
                f"DeviceMesh(..., mesh_dim_names=...)"
            )
        return self.mesh_dim_names.index(name)

    def has_axis(self, name: str) -> bool:
        """Whether an axis has this name."""
        return self.mesh_dim_names is not None and name in self.mesh_dim_names

    def coordinate(self, device: int) -> tuple[int, ...] | None:
        """The position of a device in the mesh, or None when it is not in it."""
        return self._coordinates.get(device)

    def unbind(self, name: int | str) -> list[DeviceMesh]:
        """The meshes that remain when one axis is taken apart, in its order (e.g. pipeline stages)."""
        axis = self.axis(name)
        return [self._select({axis: index}) for index in range(self.shape[axis])]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh of the named axes, in the order given; other axes are taken at coordinate 0."""
        wanted = _wanted_axes(names, self.mesh_dim_names)
        axes = [self.axis(name) for name in wanted]
        if len(set(axes)) != len(axes) or not axes:
            raise MeshError(
                f"mesh[...] takes one or more different axis names, got {wanted!r}; "
                f"write e.g. mesh[{self.mesh_dim_names}]"
            )
        rest = self._select({axis: 0 for axis in range(self.ndim) if axis not in axes})
        kept = [axis for axis in range(self.ndim) if axis in axes]
        order = [kept.index(axis) for axis in axes]
        return rest._permute(order)

    def _select(self, fixed: dict[int, int]) -> DeviceMesh:
        kept = [axis for axis in range(self.ndim) if axis not in fixed]
        devices = [d for d in self.devices if all(self._coordinates[d][a] == i for a, i in fixed.items())]
        names = None if self.mesh_dim_names is None else [self.mesh_dim_names[axis] for axis in kept]
        return self._build(tuple(self.shape[axis] for axis in kept), devices, names)

    def _permute(self, order: list[int]) -> DeviceMesh:
        shape = tuple(self.shape[axis] for axis in order)
        by_coordinate = {self._coordinates[d]: d for d in self.devices}
        devices = []
        for index in itertools.product(*map(range, shape)):
            source = [0] * self.ndim
            for position, axis in enumerate(order):
                source[axis] = index[position]
            devices.append(by_coordinate[tuple(source)])
        names = None if self.mesh_dim_names is None else [self.mesh_dim_names[axis] for axis in order]
        return self._build(shape, devices, names)

    def _build(self, shape: tuple[int, ...], devices: list[int], names: Sequence[str] | None) -> DeviceMesh:
        if not shape:
            return DeviceMesh(self.device_type, devices, mesh_dim_names=None)
        return DeviceMesh(self.device_type, _nest(devices, shape), mesh_dim_names=names)

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        indices = itertools.product(*map(range, self.shape))
        return dict(zip(self.devices, indices, strict=True))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (self.device_type, self.shape, self.devices, self.mesh_dim_names) == (
            other.device_type,
            other.shape,
            other.devices,
            other.mesh_dim_names,
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {_nest(list(self.devices), self.shape)}{names})"


def init_device_mesh(
    device_type: str, mesh_shape: Iterable[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of the devices 0, 1, 2, ... in row-major order.

    Raises:
        MeshError: a size is not positive, or the names do not fit.
    """
    if not isinstance(mesh_shape, Iterable):
        raise MeshError(f"mesh_shape takes a tuple of positive ints, got {mesh_shape!r}; write e.g. (2,)")
    shape = tuple(mesh_shape)
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        raise MeshError(f"mesh_shape takes positive ints, got {shape!r}; write e.g. (2, 4)")
    ids = list(range(math.prod(shape)))
    return DeviceMesh(device_type, _nest(ids, shape), mesh_dim_names=mesh_dim_names)


def _wanted_axes(names: object, known: tuple[str, ...] | None) -> tuple[str, ...]:
    """What stands in ``mesh[...]``, as a tuple.

    Raises:
        MeshError: it is neither a name nor several.
    """
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, tuple | list):
        example = (known or ("dp",))[0]
        raise MeshError(
            f"mesh[...] takes axis names, got {names!r}; write e.g. mesh[{example!r}] for the mesh of an axis, or "
            f"mesh.unbind(axis)[index] for a part"
        )
    return tuple(names)


def _flatten(nested: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(nested, list | tuple | range):
        raise MeshError(f"mesh takes nested lists of device ids, got {nested!r}; write e.g. [[0, 1], [2, 3]]")
    if not nested:
        raise MeshError("a mesh has at least one device, got an empty list; write e.g. [0]")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in nested):
        return (len(nested),), tuple(nested)
    if any(isinstance(item, int) for item in nested):
        raise MeshError(f"mesh is ragged: {nested!r} mixes ids and lists; write e.g. [[0, 1], [2, 3]]")
    parts = [_flatten(item.tolist() if hasattr(item, "tolist") else item) for item in nested]
    if len({shape for shape, _ in parts}) != 1:
        raise MeshError(
            f"mesh is ragged: {nested!r}; allowed are lists of one length, write e.g. [[0, 1], [2, 3]]"
        )
    return (len(nested), *parts[0][0]), tuple(itertools.chain.from_iterable(ids for _, ids in parts))


def _nest(ids: list[int], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return ids
    stride = len(ids) // shape[0]
    return [_nest(ids[i * stride : (i + 1) * stride], shape[1:]) for i in range(shape[0])]


def _check_devices(devices: tuple[int, ...]) -> None:
    repeated = (
        sorted({d for d in devices if devices.count(d) > 1}) if len(set(devices)) != len(devices) else []
    )
    if repeated:
        raise MeshError(
            f"a device may stand in a mesh once; repeated: {repeated}. Write different ids, e.g. [0, 1]: "
            f"several workers on one machine have an id each"
        )
    if any(d < 0 for d in devices):
        raise MeshError(
            f"device ids are not negative, got {min(devices)}; write the ids that dtorch.init() gave, 0 first"
        )


def _check_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise MeshError(
            f"mesh_dim_names takes a tuple of names, got the string {names!r}; write ({names!r},)"
        )
    result = tuple(names)
    if len(result) != len(shape):
        raise MeshError(
            f"mesh_dim_names has {len(result)} names for {len(shape)} axes: {result!r}; write one name for each axis"
        )
    if any(not isinstance(name, str) or not name for name in result) or len(set(result)) != len(result):
        raise MeshError(
            f"axis names are different non-empty strings, got {result!r}; write e.g. ('dp', 'tp')"
        )
    return result
