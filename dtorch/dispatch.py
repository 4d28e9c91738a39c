"""One ATen call -> one op: looked up by the specs and constants of its arguments, planned on a miss, issued."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dtorch import auto
from dtorch.auto_issue import AutoEntry, is_entangled, issue_converted, one_by_one
from dtorch.engine import issuing_graph
from dtorch.entries import entry_of, known_auto, resized_entry
from dtorch.future import TensorFuture
from dtorch.graph import FREE_BATCH, Graph, Handle, guard_mesh_of
from dtorch.issue import DEVICE, STRIDED, Entry, issue, make_entry, upload, view_of
from dtorch.location import capture, known
from dtorch.meshes import check_index
from dtorch.propagate import propagate
from dtorch.random import Generator, seed_source
from dtorch.resize import resize_outputs
from dtorch.rules.call import op_of
from dtorch.shapes import NeedsResize
from dtorch.spec import Spec
from dtorch.strided import kind_made_by, kind_of, not_strided
from dtorch_runtime.errors import MixedTensorError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.placement import Partial, Replicate

aten = torch.ops.aten
_get_frame = sys._getframe
_make_wrapper = torch.Tensor._make_wrapper_subclass
_new = object.__new__
_NONE = type(None)
#: Whether there is nothing but integers among types.
_ONLY_INTS = frozenset((int,)).issuperset
#: Constants whose equality is that of what an op does with them, given their type.
_PLAIN = frozenset((int, bool, str, _NONE, torch.dtype, torch.device, torch.layout, torch.memory_format))

#: Calls that are no op of the cluster, or more than one: they come here before propagation.
Special = Callable[[type[torch.Tensor], Any, tuple[Any, ...], dict[str, Any], int], Any]
SPECIAL: dict[Any, Special] = {}


def dispatch(
    cls: type[torch.Tensor],
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """``Tensor.__torch_dispatch__``. The first half is the path of every op of a loop: keep it short.

    Raises:
        PlacementError, MeshError, UnsupportedError: as ``propagate``.
        MixedTensorError: a plain tensor with data is among the arguments.
        ControllerLost, SessionClosed, ForkError: the session of the tensors is over.
    """
    key: list[Any] = [id(func)]
    tensors: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is cls:
            key.append(value._spec)
            tensors.append(value)
        elif kind is int:
            key.append(value)
        elif kind in _PLAIN or (kind is float and value == value and value):
            key.append(kind)
            key.append(value)
        elif kind is list and _ONLY_INTS(map(type, value)):
            key.append(tuple(value))
        else:
            _add_to_key(cls, value, key, tensors)
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            _add_to_key(cls, value, key, tensors)
    frame = _get_frame().f_back  # None on a thread of autograd
    location = known.get((id(frame.f_code), frame.f_lasti)) if frame is not None else None
    if not tensors:
        return _dispatch_slowly(cls, func, args, kwargs or {}, None, location or capture(frame))
    graph: Graph = tensors[0]._handle.graph
    if location is None:
        location = capture(frame, graph.thread_id)
    entry: Entry | None = graph.entries.get(tuple(key))
    if entry is None:
        entry = resized_entry(key, tensors, graph)
        if entry is None:
            return _dispatch_slowly(cls, func, args, kwargs or {}, (tuple(key), tensors, graph), location)
    if not entry.is_direct:
        return _issue_entry(cls, entry, tuple(key), (func, args, kwargs or {}), graph, tensors, location)
    record = [entry.template, location]
    for tensor in tensors:
        handle = tensor._handle
        if handle.graph is not graph:
            return issue(cls, entry, graph, tensors, location)
        record.append(handle.value_id)
    value_id = graph.new_value_id()
    record.append(value_id)
    with graph.lock:
        words = graph.words
        is_first = not words
        if len(graph.dropped) >= FREE_BATCH:
            graph.free_dropped()
        words += record
        graph.num_ops += 1
        if is_first:
            graph.begin_batch()
        elif graph.num_ops >= graph.max_ops:
            graph.send_batch()
    if entry.is_view:
        return view_of(cls, entry, graph, tensors[0], value_id, location)
    result: Any = _make_wrapper(cls, entry.shape, entry.stride, None, None, entry.dtype, STRIDED, DEVICE)
    result._spec = entry.spec
    result._handle = handle = _new(Handle)  # its fields one by one: __init__ would take twice as long
    handle.graph = graph
    handle.value_id = value_id
    handle.origin = entry
    handle.location = location
    return result


def _add_to_key(cls: type[torch.Tensor], value: Any, key: list[Any], tensors: list[Any]) -> None:
    kind = type(value)
    if kind is cls:
        key.append(value._spec)
        tensors.append(value)
    elif kind is list or kind is tuple:
        # The length ends the ambiguity between [a], [b] and [a, b].
        key.append(len(value))
        for item in value:
            _add_to_key(cls, item, key, tensors)
    elif kind is torch.Generator or kind is Generator or kind is torch.UntypedStorage:
        key.append(kind)  # which generator decides about the seeds, not about the op; storages are refused
    elif kind in _PLAIN or (kind is float and value == value and value):
        key.append(kind)
        key.append(value)
    elif issubclass(kind, cls):
        raise LinkedArgument
    else:
        # 0.0 equals -0.0 but means something else, and nan does not equal itself.
        key.append(kind)
        key.append(repr(value))


class LinkedArgument(Exception):
    """A call that did not come through torch has a linked view among its arguments."""


def _issue_entry(
    cls: type[torch.Tensor],
    entry: Entry,
    key: tuple[Any, ...],
    call: tuple[Any, tuple[Any, ...], dict[str, Any]],
    graph: Graph,
    tensors: list[Any],
    location: int,
) -> Any:
    if entry.default_dtype is not None and entry.default_dtype is not torch.get_default_dtype():
        func, args, kwargs = call
        return _dispatch_slowly(cls, func, args, kwargs, (key, tensors, graph), location)
    if entry.plan.num_seeds:
        return issue(cls, entry, graph, tensors, location, seed_source(_generator_in(*call[1:])))
    return issue(cls, entry, graph, tensors, location)


def _generator_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Generator)), None)


# ---- the miss path ----

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
#: Made of other ops by torch, but kept as one here: see ``backend``.
KEPT_WHOLE = (aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default)


@cache
def is_composite(func: Any) -> bool:
    """Whether torch makes this op of others. Under ``inference_mode`` it leaves that to us."""
    name = func.name()
    return func not in KEPT_WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


@cache
def is_custom(func: Any) -> bool:
    """Whether the op was written in Python with ``torch.library``: workers may not know it, but its parts."""
    return func.namespace != "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeExplicitAutograd"
    )


def _dispatch_slowly(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known_call: tuple[tuple[Any, ...], list[Any], Graph] | None,
    location: int,
) -> Any:
    log = auto.current()
    if log is not None and known_call is not None:
        found = known_auto(known_call[0], known_call[2])
        if found is not None:
            return _issue_auto(cls, found, log, func, args, kwargs, known_call, location)
    special = SPECIAL.get(func)
    if special is not None:
        result = special(cls, func, args, kwargs, location)
        if result is not NotImplemented:
            return result
    kind = kind_made_by(func)
    if kind:
        raise not_strided(func._schema.name, kind)
    if is_composite(func):
        return func.decompose(*args, **kwargs)
    if is_custom(func) and known_call is not None:
        with guard_mesh_of(known_call[1][0]):  # for what it makes beside its inputs
            return func._op_dk(_EXPLICIT, *args, **kwargs)
    if known_call is None:
        return make(cls, func, args, kwargs, None, location)
    key, tensors, graph = known_call
    graph.session.check_open()
    if any(_is_plain_tensor(cls, value) for value in _flat((args, kwargs))):
        args, kwargs = _bring_in(cls, func, args, kwargs, graph, tensors, location)
        return dispatch(cls, func, (), args, kwargs)
    try:
        entry = entry_of(cls, func, args, kwargs, tensors, key, graph, log is not None)
    except NeedsResize as needed:
        resize_outputs(tensors, needed.sizes, location)
        return func(*args, **kwargs)
    if log is not None and type(entry) is AutoEntry:
        return _issue_auto(cls, entry, log, func, args, kwargs, known_call, location)
    return issue(cls, entry, graph, tensors, location, seed_source(_generator_in(args, kwargs)))


def _issue_auto(
    cls: type[torch.Tensor],
    entry: AutoEntry,
    log: auto.Log,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known_call: tuple[tuple[Any, ...], list[Any], Graph],
    location: int,
) -> Any:
    """A call whose inputs are converted. Ops on lists are done one after the other where they share memory."""
    _, tensors, graph = known_call
    if op_of(func).writes_lists and is_entangled(entry, tensors):
        for part in one_by_one(args, kwargs):
            dispatch(cls, func, (), *part)
        return None
    seeds = seed_source(_generator_in(args, kwargs))
    return issue_converted(cls, entry, log, graph, tensors, location, seeds)


def make(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout | None,
    location: int,
) -> Any:
    """A call without tensors: makes a tensor with ``layout``, or replicated on the default mesh.

    The graph is the thread's current one; in a backward pass that of the thread which waits for it.
    """
    graph = Graph.default_graph()
    if layout is None:
        mesh = graph.default_mesh
        layout = Layout(mesh, (Replicate(),) * mesh.ndim)
    graph = issuing_graph(graph)
    default_dtype = torch.get_default_dtype()
    key: list[Any] = [id(func), layout, default_dtype]
    _add_to_key(cls, args, key, [])
    for name, value in kwargs.items():
        key.append(name)
        _add_to_key(cls, value, key, [])
    entry = graph.entries.get(tuple(key))
    if entry is None:
        graph.session.check_open()
        plan = propagate(func, args, kwargs, default_layout=layout)
        entry = graph.entries[tuple(key)] = make_entry(graph.session, plan, func, 0)
    return issue(cls, entry, graph, (), location, seed_source(_generator_in(args, kwargs)))


# ---- plain tensors among the arguments ----

#: Arguments that torch takes from the CPU beside tensors of another device: they are uploaded.
_TAKES_CPU_INDICES = frozenset(
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
    }
)

#: Workers call these with a number as well as with a tensor.
_ARITHMETIC = ["add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "eq", "ne", "lt", "le", "gt", "ge"]
_TAKES_NUMBERS = frozenset(getattr(aten, name).Tensor for name in _ARITHMETIC)


def _is_plain_tensor(cls: type[torch.Tensor], value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not cls


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]


def _bring_in(
    cls: type[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: Graph,
    tensors: list[Any],
    location: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with CPU scalars as numbers or uploaded, and CPU indices uploaded.

    Raises:
        MixedTensorError: a plain tensor of another kind.
    """

    def bring(value: Any, is_index: bool) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(bring(item, is_index) for item in value)
        if not _is_plain_tensor(cls, value):
            return value
        is_scalar = value.dim() == 0 and value.device.type == "cpu"
        if is_scalar and not is_index and _is_as_good_as_a_number(func, value, tensors):
            return value.item()
        if (is_index or is_scalar) and value.device.type == "cpu":
            layout = tensors[0]._spec.layout
            whole = Layout(layout.mesh, (Replicate(),) * layout.mesh.ndim)
            return upload(cls, graph, value, whole, location)
        raise _mixed(func, value, tensors[0])

    takes_indices = func in _TAKES_CPU_INDICES
    new_args = tuple(bring(value, takes_indices and position == 1) for position, value in enumerate(args))
    return new_args, {name: bring(value, False) for name, value in kwargs.items()}


def _is_as_good_as_a_number(func: Any, value: torch.Tensor, tensors: list[Any]) -> bool:
    """Whether the op takes a number in place of a 0-dim tensor, and gives the same dtype for it."""
    return func in _TAKES_NUMBERS and any(t.dim() and torch.can_cast(value.dtype, t.dtype) for t in tensors)


def _mixed(func: Any, value: torch.Tensor, beside: Any) -> MixedTensorError:
    name = str(func).removeprefix("aten.")
    spec: Spec = beside._spec
    kind = kind_of(value)
    send = f"t.to_dense().to('dtorch') (it is {kind})" if kind else "t.to('dtorch')"
    return MixedTensorError(
        f"{name} got a plain tensor of shape {list(value.shape)} on {value.device} beside a dtorch tensor "
        f"({spec}). Write {send}, or dtorch.from_torch(t, device_mesh=x.device_mesh, placements=...), "
        f"to compute on the cluster; or x.cpu() to compute here. Only 0-dim CPU tensors mix"
    )


# ---- calls that are no op of the cluster ----


def special(*overloads: Any) -> Callable[[Special], Special]:
    """Register a function for overloads that ``dispatch`` must not plan. NotImplemented goes on to planning."""

    def register(function: Special) -> Special:
        SPECIAL.update(dict.fromkeys(overloads, function))
        return function

    return register


@special(aten._local_scalar_dense.default)
def _item(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    return fetched(args[0]).item()


@special(aten._to_copy.default)
def _to_copy(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    source = args[0]
    device = kwargs.get("device")
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "layout")}
    if type(source) is not cls:
        check_index(device)
        rest.pop("pin_memory", None)
        local = aten._to_copy.default(source, **rest) if rest else source
        graph = Graph.default_graph()
        mesh = graph.default_mesh
        # Dims keep their order in memory; uploads are row-major.
        order = sorted(range(local.dim()), key=lambda dim: (-local.stride(dim), dim))
        rows = local.permute(order)
        whole = Layout(mesh, (Replicate(),) * mesh.ndim)
        if local.is_contiguous() or not rows.is_contiguous():
            return upload(cls, graph, local, whole, location)
        uploaded = upload(cls, graph, rows, whole, location)
        return aten.permute.default(uploaded, [order.index(dim) for dim in range(local.dim())])
    if device is not None and device.type != "dtorch":
        return fetched(source).to(device=device, **rest)
    return NotImplemented


@special(aten.copy_.default)
def _copy(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    target, source = args[0], args[1]
    if type(target) is not cls:
        return target.copy_(fetched(source))
    if type(source) is cls:
        return NotImplemented
    spec: Spec = target._spec
    local = source.detach().to(device="cpu", dtype=spec.dtype).expand(spec.shape)
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.layout.placements)
    on_cluster = upload(cls, target._handle.graph, local, Layout(spec.layout.mesh, placements), location)
    return dispatch(cls, func, (), (target, on_cluster), kwargs)


@special(aten.is_pinned.default)
def _is_pinned(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    return False


@special(aten._lazy_clone.default)
def _lazy_clone(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Torch copies at the first write; pieces are written to where nobody would notice."""
    return aten.clone.default(*args)


@special(aten.detach_.default)
def _detach_(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Comes here in inference mode only, where there is no history: ``torch.tensor`` asks for it."""
    return args[0]


@special(aten.equal.default)
def _equal(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    first, second = args
    if first.shape != second.shape:
        return False
    if type(first) is not cls or type(second) is not cls:
        return torch.equal(*(fetched(value) if type(value) is cls else value for value in (first, second)))
    return bool(aten.all.default(aten.eq.Tensor(first, second)))


@special(aten.allclose.default)
def _allclose(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    return bool(aten.all.default(aten.isclose.default(*args, **kwargs)))


@special(aten._efficientzerotensor.default)
def _zeros(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """Torch makes derivatives that are zero everywhere without memory, which nobody could read."""
    return dispatch(cls, aten.zeros.default, (), args, kwargs)


def fetched(tensor: Any) -> torch.Tensor:
    """The value of a symbol, as a CPU tensor of global shape, waited for; autograd does not see it."""
    future: TensorFuture = tensor._handle.graph.session.fetch(tensor._handle, tensor._spec)
    return future.get()


@special(aten.is_same_size.default)
def _is_same_size(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    return args[0].shape == args[1].shape


@special(aten._has_same_storage_numel.default)
def _has_same_storage_numel(
    cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
) -> Any:
    return args[0].untyped_storage().nbytes() == args[1].untyped_storage().nbytes()
