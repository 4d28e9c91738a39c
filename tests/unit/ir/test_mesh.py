"""``DeviceMesh``: what it is made of, how it is taken apart, and what is no mesh."""

from __future__ import annotations

import pytest

from dtorch_runtime.errors import MeshError
from dtorch_runtime.ir.mesh import DeviceMesh, init_device_mesh


class Array:
    """Stands for a tensor or a numpy array."""

    def __init__(self, nested: object) -> None:
        self._nested = nested

    def tolist(self) -> object:
        return self._nested


@pytest.mark.parametrize(
    ("given", "shape", "devices"),
    [
        (3, (1,), (3,)),
        ([0, 1, 2], (3,), (0, 1, 2)),
        (range(2, 4), (2,), (2, 3)),
        (((5, 1), (0, 2)), (2, 2), (5, 1, 0, 2)),
        ([[[0], [1]]], (1, 2, 1), (0, 1)),
        (Array([[0, 1]]), (1, 2), (0, 1)),
        ([Array([0, 1]), Array([2, 3])], (2, 2), (0, 1, 2, 3)),
    ],
)
def test_shape_and_devices(given, shape, devices):
    mesh = DeviceMesh("cpu", given)
    assert (mesh.shape, mesh.devices, mesh.ndim, mesh.size()) == (shape, devices, len(shape), len(devices))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "at least one device"),
        ([[0, 1], [2]], {}, "ragged"),
        ([0, [1]], {}, "ragged"),
        ([0, 1, 0], {}, "repeated: \\[0\\]"),
        ([0, -1], {}, "not negative"),
        ("01", {}, "nested lists"),
        (0.5, {}, "nested lists"),
        ([0, 1], {"mesh_dim_names": "dp"}, "\\('dp',\\)"),
        ([0, 1], {"mesh_dim_names": ("dp", "tp")}, "2 names for 1 axes"),
        ([[0, 1]], {"mesh_dim_names": ("a", "a")}, "different"),
        ([[0, 1]], {"mesh_dim_names": ("a", "")}, "non-empty"),
    ],
)
def test_what_is_no_mesh(given, options, message):
    with pytest.raises(MeshError, match=message):
        DeviceMesh("cpu", given, **options)


def test_the_device_type_is_checked():
    with pytest.raises(MeshError, match="'cpu', 'cuda', got 'tpu'"):
        DeviceMesh("tpu", [0])


def test_equal_meshes_are_equal_and_hash_alike():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    same = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert mesh == same
    assert hash(mesh) == hash(same)
    for other in (
        DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")),
        "mesh",
    ):
        assert mesh != other


def test_coordinates():
    mesh = DeviceMesh("cpu", [[7, 1], [0, 4]])
    assert [mesh.coordinate(device) for device in (7, 1, 0, 4, 9)] == [(0, 0), (0, 1), (1, 0), (1, 1), None]


GRID = DeviceMesh(
    "cpu", [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]], mesh_dim_names=("pp", "dp", "tp")
)


def test_axes_by_name_and_index():
    assert [GRID.axis(name) for name in ("pp", "dp", "tp", 0, -1)] == [0, 1, 2, 0, 2]
    assert (GRID.size("tp"), GRID.size(0)) == (3, 2)
    assert GRID.has_axis("dp")
    assert not GRID.has_axis("ep")
    assert not DeviceMesh("cpu", [0]).has_axis("dp")


@pytest.mark.parametrize("name", ["ep", 3, -4])
def test_an_axis_that_is_not_there(name):
    with pytest.raises(MeshError, match="no axis"):
        GRID.axis(name)


def test_unbind_takes_an_axis_apart():
    first, second = GRID.unbind("pp")
    assert (first.shape, first.devices, first.mesh_dim_names) == ((2, 3), (0, 1, 2, 3, 4, 5), ("dp", "tp"))
    assert second.devices == (6, 7, 8, 9, 10, 11)
    assert [mesh.devices for mesh in DeviceMesh("cpu", [4, 5]).unbind(0)] == [(4,), (5,)]


@pytest.mark.parametrize(
    ("names", "shape", "devices"),
    [
        ("tp", (3,), (0, 1, 2)),
        (("pp", "tp"), (2, 3), (0, 1, 2, 6, 7, 8)),
        (("tp", "pp"), (3, 2), (0, 6, 1, 7, 2, 8)),
        (("pp", "dp", "tp"), (2, 2, 3), tuple(range(12))),
    ],
)
def test_slices_by_name(names, shape, devices):
    mesh = GRID[names]
    assert (mesh.shape, mesh.devices) == (shape, devices)
    assert mesh.mesh_dim_names == ((names,) if isinstance(names, str) else names)


@pytest.mark.parametrize("names", [(), ("tp", "tp"), "ep"])
def test_slices_that_are_none(names):
    with pytest.raises(MeshError):
        GRID[names]


def test_from_flat_checks_the_size():
    assert DeviceMesh.from_flat("cpu", (2, 1), (5, 3)) == DeviceMesh("cpu", [[5], [3]])
    for shape, devices in (((2, 2), (0, 1, 2)), ((), ()), ((0,), ())):
        with pytest.raises(MeshError, match="do not fill"):
            DeviceMesh.from_flat("cpu", shape, devices)


def test_init_device_mesh_counts_from_zero():
    assert init_device_mesh("cpu", (2, 2)) == DeviceMesh("cpu", [[0, 1], [2, 3]])
    for shape in ((), (0,), (2, -1), (2.0,)):
        with pytest.raises(MeshError, match="positive ints"):
            init_device_mesh("cpu", shape)


def test_repr_can_be_read_back():
    for mesh in (GRID, DeviceMesh("cuda", [3])):
        assert eval(repr(mesh), {"DeviceMesh": DeviceMesh}) == mesh
