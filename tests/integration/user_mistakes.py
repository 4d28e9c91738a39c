"""What users get wrong with meshes, placements and ops: a short program, the class of the error, what it must say.

The three texts of a row are what was given, what is allowed, and what to write. Mistakes that torch itself reports have
torch's class and torch's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard


class Mistake(NamedTuple):
    what: str
    program: Callable[[], Any]
    error: type[Exception]
    given: str
    allowed: str
    write: str


LINE, OTHER = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
PLAIN = torch.zeros(2)


def x(*shape: int, at: Any = None, mesh: DeviceMesh = LINE, dtype: Any = None) -> Any:
    """A tensor of zeros on two devices."""
    placements = None if at is None else [at]
    return dtorch.from_torch(torch.zeros(shape, dtype=dtype), device_mesh=mesh, placements=placements)


def leaf(*shape: int) -> Any:
    return x(*shape).requires_grad_()


def on_grid() -> Any:
    return dtorch.zeros(2, device_mesh=GRID)


def refused(
    *, write: str = "redistribute(placements=[", given: str, allowed: str = "allowed along each mesh axis"
) -> Any:
    return (dtorch.PlacementError, given, allowed, write)


MESHES = [
    Mistake(
        "a device type",
        lambda: DeviceMesh("tpu", [0]),
        dtorch.MeshError,
        "'tpu'",
        "'cpu', 'cuda'",
        "DeviceMesh('cpu'",
    ),
    Mistake(
        "a device twice",
        lambda: DeviceMesh("cpu", [0, 0]),
        dtorch.MeshError,
        "repeated: [0]",
        "once",
        "[0, 1]",
    ),
    Mistake(
        "a negative id",
        lambda: DeviceMesh("cpu", [-1]),
        dtorch.MeshError,
        "got -1",
        "not negative",
        "write the ids",
    ),
    Mistake(
        "a ragged mesh",
        lambda: DeviceMesh("cpu", [[0, 1], [2]]),
        dtorch.MeshError,
        "[2]]",
        "one length",
        "[[0, 1], [2, 3]]",
    ),
    Mistake(
        "an empty mesh", lambda: DeviceMesh("cpu", []), dtorch.MeshError, "empty list", "at least one", "[0]"
    ),
    Mistake(
        "names for ids",
        lambda: DeviceMesh("cpu", ["a"]),
        dtorch.MeshError,
        "got 'a'",
        "nested lists",
        "[[0, 1], [2, 3]]",
    ),
    Mistake(
        "equal axis names",
        lambda: DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "a")),
        *(dtorch.MeshError, "('a', 'a')", "different", "('dp', 'tp')"),
    ),
    Mistake(
        "too many axis names",
        lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")),
        *(dtorch.MeshError, "2 names for 1 axes", "('a', 'b')", "one name for each axis"),
    ),
    Mistake(
        "a string for axis names",
        lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names="ab"),
        *(dtorch.MeshError, "the string 'ab'", "a tuple of names", "write ('ab',)"),
    ),
    Mistake(
        "an axis that is not there",
        lambda: GRID["pp"],
        dtorch.MeshError,
        "'pp'",
        "('dp', 'tp')",
        "Write one of",
    ),
    Mistake(
        "an axis twice",
        lambda: GRID["dp", "dp"],
        dtorch.MeshError,
        "('dp', 'dp')",
        "different axis names",
        "mesh[",
    ),
    Mistake("an axis number", lambda: GRID.size(5), dtorch.MeshError, "no axis 5", "2 axes", "0 to 1"),
    Mistake(
        "a stage axis", lambda: GRID.unbind("pp"), dtorch.MeshError, "'pp'", "('dp', 'tp')", "mesh_dim_names="
    ),
    Mistake(
        "a number for a mesh shape",
        lambda: dtorch.init_device_mesh("cpu", 2),
        *(dtorch.MeshError, "got 2", "positive ints", "(2,)"),
    ),
    Mistake(
        "a mesh of nothing",
        lambda: dtorch.init_device_mesh("cpu", (0,)),
        dtorch.MeshError,
        "(0,)",
        "positive ints",
        "(2, 4)",
    ),
    Mistake(
        "more devices than the cluster has",
        lambda: dtorch.zeros(2, device_mesh=DeviceMesh("cpu", [7])),
        *(dtorch.MeshError, "device 7", "devices 0 to 3", "dtorch.init(devices_per_node="),
    ),
    Mistake(
        "a GPU that the cluster lacks",
        lambda: dtorch.zeros(2, device_mesh=DeviceMesh("cuda", [0])),
        *(dtorch.MeshError, "DeviceMesh('cuda', [0])", "'cpu' device", "DeviceMesh('cpu'"),
    ),
    Mistake(
        "a list for a mesh",
        lambda: dtorch.zeros(2, device_mesh=[0, 1]),
        *(dtorch.MeshError, "[0, 1]", "takes a DeviceMesh", "dtorch.DeviceMesh('cpu', [0, 1])"),
    ),
    Mistake(
        "a device type for a guard",
        lambda: dtorch.Graph.default_graph().device_mesh_guard("cpu").__enter__(),
        *(dtorch.MeshError, "'cpu'", "takes a DeviceMesh", "dtorch.DeviceMesh('cpu', [0, 1])"),
    ),
]

PLACEMENTS = [
    Mistake(
        "too few placements",
        lambda: dtorch.zeros(2, device_mesh=GRID, placements=[Replicate()]),
        *(dtorch.PlacementError, "1 entries", "2 axes", "one for each axis"),
    ),
    Mistake(
        "a placement without a list",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=Shard(0)),
        *(dtorch.PlacementError, "Shard(dim=0)", "a list", "[Shard(dim=0)]"),
    ),
    Mistake(
        "a class for a placement",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=[Replicate]),  # type: ignore[list-item]  # what is refused
        *(dtorch.PlacementError, "Replicate'>", "Replicate(), Shard(dim) or Partial(op)", "with parentheses"),
    ),
    Mistake(
        "a string for a placement",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=["S(0)"]),  # type: ignore[list-item]  # what is refused
        *(dtorch.PlacementError, "'S(0)'", "Replicate(), Shard(dim) or Partial(op)", "[Shard(0)]"),
    ),
    Mistake(
        "a number for placements",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=0),
        *(dtorch.PlacementError, "got 0", "Replicate(), Shard(dim), Partial(op)", "[Shard(0)]"),
    ),
    Mistake(
        "a dict for placements",
        lambda: dtorch.zeros(2, device_mesh=GRID, placements={"dp": Shard(0)}),
        *(dtorch.PlacementError, "{'dp': Shard(dim=0)}", "a list", "redistribute_by_dict"),
    ),
    Mistake(
        "a dim that the tensor lacks",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=[Shard(1)]),
        *(dtorch.PlacementError, "Shard(dim=1)", "1 dims", "a dim from -1 to 0"),
    ),
    Mistake(
        "a negative dim that the tensor lacks",
        lambda: dtorch.zeros(2, device_mesh=LINE, placements=[Shard(-2)]),
        *(dtorch.PlacementError, "Shard(dim=-2)", "1 dims", "a dim from -1 to 0"),
    ),
    Mistake(
        "a number cut",
        lambda: dtorch.tensor(1.0, device_mesh=LINE, placements=[Shard(0)]),
        *(dtorch.PlacementError, "Shard(dim=0)", "0 dims", "only Replicate() or Partial()"),
    ),
    Mistake(
        "a unit of nothing",
        lambda: Shard(0, unit=0),
        dtorch.PlacementError,
        "got 0",
        "a positive int",
        "Shard(0)",
    ),
    Mistake(
        "a negative unit",
        lambda: Shard(0, unit=-2),
        dtorch.PlacementError,
        "got -2",
        "a positive int",
        "unit=64",
    ),
    Mistake("half a dim", lambda: Shard(0.5), dtorch.PlacementError, "got 0.5", "an int", "Shard(0)"),
    Mistake(
        "a reduction",
        lambda: Partial("mean"),
        dtorch.PlacementError,
        "'mean'",
        "sum, avg, max",
        "Partial('sum')",
    ),
    Mistake(
        "an average of integers",
        lambda: dtorch.zeros(4, dtype=torch.int64, device_mesh=LINE, placements=[Partial("avg")]),
        *(dtorch.PlacementError, "Partial('avg')", "int64", "x.to(torch.float32)"),
    ),
    Mistake(
        "placements as the first argument",
        lambda: x(2).redistribute([Replicate()]),
        *(dtorch.MeshError, "[Replicate()]", "takes a DeviceMesh", "placements=[...]"),
    ),
    Mistake(
        "another mesh without placements",
        lambda: x(2).redistribute(GRID),
        *(dtorch.PlacementError, "the mesh 2 axes", "needs placements", "placements=[...]"),
    ),
    Mistake(
        "like a plain tensor",
        lambda: x(2).redistribute_like(PLAIN),
        *(dtorch.MixedTensorError, "got Tensor", "takes a dtorch tensor", "x.redistribute("),
    ),
    Mistake(
        "by an unknown axis",
        lambda: on_grid().redistribute_by_dict({"pp": Replicate()}),
        *(dtorch.MeshError, "'pp'", "('dp', 'tp')", "Write one of them"),
    ),
    Mistake(
        "by dict, an axis missing",
        lambda: on_grid().redistribute_by_dict({"tp": Replicate()}, default="error"),
        *(dtorch.PlacementError, "axis 'dp'", "default='error'", "default='keep' or 'replicate'"),
    ),
    Mistake(
        "by dict, another default",
        lambda: on_grid().redistribute_by_dict({}, default="zero"),
        *(dtorch.PlacementError, "'zero'", "'keep', 'replicate' or 'error'", "default='keep'"),
    ),
    Mistake(
        "by dict, a number",
        lambda: on_grid().redistribute_by_dict({"tp": 0}),
        *(dtorch.PlacementError, "got 0", "Replicate(), Shard(dim) or Partial(op)", "[Shard(0)]"),
    ),
    Mistake(
        "by dict, a list",
        lambda: on_grid().redistribute_by_dict([Replicate()]),
        *(dtorch.PlacementError, "[Replicate()]", "a dict from axis names", "{'tp': Shard(0)}"),
    ),
    Mistake(
        "by dict, nothing to keep",
        lambda: x(2).redistribute_by_dict({}, device_mesh=GRID),
        *(dtorch.PlacementError, "axis 'dp'", "has no axis of that name", "default='replicate'"),
    ),
]

OPS = [
    Mistake("a function of a partial sum", lambda: x(4, at=Partial()).relu(), *refused(given="[P]")),
    Mistake("a number added to a partial sum", lambda: x(4, at=Partial()) + 1, *refused(given="not linear")),
    Mistake(
        "a product of partial sums",
        lambda: x(4, at=Partial()) * x(4, at=Partial()),
        *refused(given="not linear"),
    ),
    Mistake("a partial sum compared", lambda: x(4, at=Partial()) > 0, *refused(given="[P]")),
    Mistake(
        "a write to a partial sum", lambda: x(4, at=Partial()).add_(1), *refused(given="self is Partial")
    ),
    Mistake("the sum of largest", lambda: x(4, 6, at=Partial("max")).sum(0), *refused(given="[P(max)]")),
    Mistake("a product of half a factor", lambda: x(4, 6, at=Shard(1)) @ x(6, 2), *refused(given="[S(1)]")),
    Mistake("softmax of a part", lambda: x(4, 6, at=Shard(1)).softmax(1), *refused(given="dim 1 of self")),
    Mistake(
        "other units", lambda: x(6, at=Shard(0)) + x(6, at=Shard(0, 2)), *refused(given="[3, 6] and [4, 6]")
    ),
    Mistake("a row of cut rows", lambda: x(4, 6, at=Shard(0))[1], *refused(given="dim 0 of self")),
    Mistake(
        "a view across cuts", lambda: x(4, 6, at=Shard(1)).view(24), *refused(given="merged behind dim 0")
    ),
    Mistake("joining cut rows", lambda: torch.cat([x(4, at=Shard(0))] * 2), *refused(given="tensors[0]")),
    Mistake("a write of other pieces", lambda: x(4, 6).add_(x(4, 6, at=Shard(0))), *refused(given="[S(0)]")),
    Mistake(
        "a write through a cut row", lambda: x(4, 6, at=Shard(0))[1].zero_(), *refused(given="dim 0 of self")
    ),
    Mistake(
        "out= elsewhere",
        lambda: torch.exp(x(4, at=Shard(0)), out=x(4)),
        *refused(given="out, which stays [R]"),
    ),
    Mistake(
        "a new size for pieces",
        lambda: x(4, 6, at=Shard(0)).resize_(2, 3),
        *refused(given="[S(0)]", allowed="Allowed: Replicate()"),
    ),
    Mistake(
        "half a matrix inverted", lambda: torch.linalg.inv(x(4, 4, at=Shard(0))), *refused(given="[S(0)]")
    ),
    Mistake("where are pieces not zero", lambda: x(2, 4, at=Shard(1)).nonzero(), *refused(given="[S(1)]")),
    Mistake(
        "two meshes",
        lambda: x(2) + x(2, mesh=OTHER),
        dtorch.MeshError,
        "[2, 3]",
        "one mesh",
        "device_mesh=x.device_mesh",
    ),
]
