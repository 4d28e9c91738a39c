"""Functions that make distributed tensors. Sizes, values and ids are global, whatever the placements."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.dispatch import make
from dtorch.graph import Graph
from dtorch.issue import upload
from dtorch.keywords import teaches_keywords
from dtorch.location import capture
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError, UnsupportedError
from dtorch_runtime.ir.layout import Layout, resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate

aten = torch.ops.aten
_Placements = Sequence[Placement] | None


def _layout(device_mesh: DeviceMesh | None, placements: _Placements, ndim: int) -> Layout:
    mesh = Graph.default_graph().default_mesh if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"device_mesh takes a DeviceMesh, got {mesh!r}; write e.g. dtorch.DeviceMesh('cpu', [0, 1])"
        )
    return Layout(mesh, resolve_placements(placements, mesh, ndim))


def _make(
    func: Any,
    args: tuple[Any, ...],
    ndim: int,
    dtype: torch.dtype | None,
    device_mesh: DeviceMesh | None,
    placements: _Placements,
    requires_grad: bool,
) -> Tensor:
    layout = _layout(device_mesh, placements, ndim)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype takes a torch.dtype, got {dtype!r}; write e.g. torch.float32")
    whole = _without_partial(layout)
    kwargs = {} if dtype is None else {"dtype": dtype}
    made: Tensor = make(Tensor, func, args, kwargs, whole, capture(sys._getframe(1)))
    if whole != layout:
        made = made.redistribute(layout.mesh, layout.placements)
    made.requires_grad_(requires_grad)
    return made


def _without_partial(layout: Layout) -> Layout:
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    return Layout(layout.mesh, placements)


def _size(size: tuple[Any, ...]) -> list[int]:
    """``f(2, 3)`` and ``f((2, 3))`` alike.

    Raises:
        TypeError: sizes that are no integers.
        RuntimeError: sizes that 64 bits cannot hold.
    """
    given = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    try:
        sizes = [operator.index(n) for n in given]
    except TypeError:
        placed = ", and device_mesh= and placements= by name" if _is_placed(given) else ""
        raise TypeError(
            f"size takes ints or one sequence of ints, got {size!r}; write e.g. (2, 3){placed}"
        ) from None
    if any(abs(n) >= 2**63 for n in sizes):
        raise RuntimeError(
            f"Overflow when unpacking long long: sizes are less than 2**63, got {sizes}; write smaller sizes"
        )
    return sizes


def _is_placed(given: Any) -> bool:
    """Whether somebody gave a mesh or placements by position."""
    return any(isinstance(each, DeviceMesh | Placement | list | tuple) for each in given)


def _number(function: str, name: str, value: Any) -> Any:
    """A number, also from a tensor with one element, as torch takes it.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if not isinstance(value, numbers.Number):
        raise TypeError(f"{function}({name}=) takes a number, got {value!r}; write e.g. 1.0")
    return value


def _count(function: str, name: str, value: Any) -> int:
    """An integer, also from a tensor with one element, as torch takes it.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}({name}=) takes an int, got {value!r}; write e.g. 3") from None


@teaches_keywords
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of global ``size`` whose values are whatever was in memory.

    Args:
        size: ints, or one sequence of ints.
        dtype: torch's default dtype when None.
        device_mesh: the graph's default mesh when None.
        placements: one for each axis of the mesh; Replicate() when None.
        requires_grad: whether autograd follows it.

    Raises:
        PlacementError: placements that do not fit the mesh or the size.
        MeshError: devices that the cluster does not have.
    """
    shape = _size(size)
    func = aten.empty.memory_format
    return _make(func, (shape,), len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Zeros. Arguments and errors as ``empty``."""
    shape = _size(size)
    return _make(aten.zeros.default, (shape,), len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Ones. Arguments and errors as ``empty``."""
    shape = _size(size)
    return _make(aten.ones.default, (shape,), len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Uniform random numbers on [0, 1), the same under every layout. Arguments and errors as ``empty``."""
    shape = _size(size)
    return _make(aten.rand.default, (shape,), len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Numbers from the standard normal distribution, the same under every layout. Arguments and errors as ``empty``."""
    shape = _size(size)
    return _make(aten.randn.default, (shape,), len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def full(
    size: Sequence[int],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """``fill_value`` everywhere; without a dtype its type decides. Arguments and errors as ``empty``."""
    shape = _size((size,))
    fill_value = _number("full", "fill_value", fill_value)
    return _make(
        aten.full.default, (shape, fill_value), len(shape), dtype, device_mesh, placements, requires_grad
    )


@teaches_keywords
def randint(
    low: int,
    high: int | Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = torch.int64,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Integers from ``low`` (0 when one bound is given) up to but without ``high``, as ``torch.randint``.

    ``randint(high, size)`` and ``randint(low, high, size)``. Other arguments and errors as ``empty``.
    """
    if size is None:
        if high is None or isinstance(high, int):
            raise TypeError(
                f"randint takes (high, size) or (low, high, size), got {(low, high)}; write e.g. "
                f"dtorch.randint(10, (2, 3))"
            )
        args: tuple[Any, Any, list[int]] = (0, low, _size((high,)))
    else:
        args = (low, high, _size((size,)))
    shape = args[2]
    return _make(aten.randint.low, args, len(shape), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def randperm(
    n: int,
    *,
    dtype: torch.dtype | None = torch.int64,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """A random permutation of ``range(n)``, the same under every layout. Arguments and errors as ``empty``."""
    return _make(
        aten.randperm.default, (_count("randperm", "n", n),), 1, dtype, device_mesh, placements, requires_grad
    )


@teaches_keywords
def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """``start`` (0 when one bound is given) to ``end`` without it. Arguments and errors as ``empty``."""
    given = {"start": 0, "end": start} if end is None else {"start": start, "end": end}
    first, last, step = (_number("arange", name, value) for name, value in (given | {"step": step}).items())
    func = aten.arange.start_step
    return _make(func, (first, last, step), 1, dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """``steps`` numbers from ``start`` to ``end``, both included. Arguments and errors as ``empty``."""
    func = aten.linspace.default
    start, end = _number("linspace", "start", start), _number("linspace", "end", end)
    steps = _count("linspace", "steps", steps)
    return _make(func, (start, end, steps), 1, dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Ones on the diagonal of an ``n`` x ``m`` matrix (``n`` x ``n``). Arguments and errors as ``empty``."""
    args = (_count("eye", "n", n), _count("eye", "m", n if m is None else m))
    return _make(aten.eye.m, args, 2, dtype, device_mesh, placements, requires_grad)


def _like(
    make_tensor: Any,
    like: torch.Tensor,
    args: tuple[Any, ...],
    dtype: torch.dtype | None,
    device_mesh: DeviceMesh | None,
    placements: _Placements,
    requires_grad: bool,
) -> Tensor:
    if not isinstance(like, torch.Tensor):
        raise TypeError(
            f"{make_tensor.__name__}_like takes a tensor, got {like!r}; write "
            f"dtorch.{make_tensor.__name__}(size) for a size, dtorch.tensor(data) for data"
        )
    if isinstance(like, Tensor) and device_mesh in (None, like.device_mesh):
        device_mesh = like.device_mesh
        if placements is None:
            placements = _without_partial(like._spec.layout).placements
    made: Tensor = make_tensor(
        like.shape,
        *args,
        dtype=like.dtype if dtype is None else dtype,
        device_mesh=device_mesh,
        placements=placements,
        requires_grad=requires_grad,
    )
    return made


@teaches_keywords
def empty_like(
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Memory as it is, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(empty, like, (), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def zeros_like(
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Zeros, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(zeros, like, (), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def ones_like(
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Ones, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(ones, like, (), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def rand_like(
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Uniform random numbers, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(rand, like, (), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def randn_like(
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """Normal random numbers, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(randn, like, (), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def full_like(
    like: torch.Tensor,
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """``fill_value`` everywhere, with the shape, dtype, mesh and placements of ``like`` where not given otherwise."""
    return _like(full, like, (fill_value,), dtype, device_mesh, placements, requires_grad)


@teaches_keywords
def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor from numbers and nested lists, as ``torch.tensor``. Arguments and errors as ``from_torch``."""
    try:
        local = torch.tensor(data, dtype=dtype, device="cpu")
    except ValueError as error:
        if any(isinstance(each, torch.Tensor) for each in (data if isinstance(data, list | tuple) else ())):
            raise ValueError(
                f"{error}: dtorch.tensor takes numbers and nested lists of them, got a list of tensors; write "
                f"torch.stack(tensors) or torch.cat(tensors), and dtorch.from_torch(...) of plain ones"
            ) from None
        raise
    return from_torch(local, device_mesh=device_mesh, placements=placements, requires_grad=requires_grad)


@teaches_keywords
def from_torch(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: _Placements = None,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """A distributed copy of a plain tensor of global shape. Each device is sent its own piece only.

    Args:
        tensor: a strided tensor; one of dtorch's own is redistributed.
        device_mesh: the graph's default mesh when None.
        placements: one for each axis of the mesh; Replicate() when None.
        requires_grad: whether autograd follows the copy. It never follows where it came from; ``t.to("dtorch")``
            is differentiable.

    Raises:
        PlacementError: placements that do not fit the mesh or the tensor.
        MeshError: devices that the cluster does not have.
        UnsupportedError: the tensor is sparse, nested or quantized, or has no data.
        TypeError: it is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"from_torch takes a torch.Tensor, got {type(tensor).__name__}; write dtorch.tensor(data), or "
            f"torch.from_numpy(array) for an array"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"from_torch takes a strided tensor, got one with layout {tensor.layout}; write t.to_dense() for a sparse "
            f"one, t.to_padded_tensor(0) for a nested one"
        )
    if tensor.device.type == "meta":
        raise UnsupportedError(
            "from_torch takes a tensor with data, got one on meta, which has only a shape; write "
            "dtorch.empty_like(t), or load its values first"
        )
    layout = _layout(device_mesh, placements, tensor.dim())
    if isinstance(tensor, Tensor):
        detached: Any = tensor.detach()
        made: Tensor = detached.redistribute(layout.mesh, layout.placements)
        made.requires_grad_(requires_grad)
        return made
    whole = _without_partial(layout)
    graph = Graph.default_graph()
    made = upload(Tensor, graph, tensor.to("cpu"), whole, capture(sys._getframe(1)))
    if whole != layout:
        made = made.redistribute(layout.mesh, layout.placements)
    made.requires_grad_(requires_grad)
    return made
