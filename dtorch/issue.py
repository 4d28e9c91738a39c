"""From a plan to records in the op stream, and to the symbols that the user gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch.auto import Moved, log_strict
from dtorch.dynamic import description_spec
from dtorch.graph import Graph, Handle, ViewHandle, next_write
from dtorch.meshes import layout_record
from dtorch.op_plan import LaterOutput, NewOutput, OpPlan, SameTensor, SameValue, Window
from dtorch.overlap import (
    checks_overlap,
    num_bytes_of,
    refuse_lost_gradient,
    refuse_outside,
    refuse_partial_overlap,
)
from dtorch.random import next_seed
from dtorch.spec import Spec, contiguous_stride, intern_spec
from dtorch.values import cut, device_boxes
from dtorch.viewed import fits_of, views_of
from dtorch_runtime.errors import SessionClosed, UnsupportedError
from dtorch_runtime.ir.layout import Box, Layout, box_shape
from dtorch_runtime.wire.records import Slot, TemplateRecord, TransferArg
from dtorch_runtime.worker.blobs import dtype_of, name_of
from dtorch_runtime.worker.dynamic_kernels import read_description

if TYPE_CHECKING:  # the tensor's dispatch issues ops
    from dtorch.connection import Session

#: The one device. Its first name is used, because "dtorch" is known to torch only once ``backend`` is registered.
DEVICE = torch.device("privateuseone:0")
STRIDED = torch.strided
_new = object.__new__
_is_inference = torch.is_inference_mode_enabled
_make_wrapper = torch.Tensor._make_wrapper_subclass


class Entry:
    """A plan made ready for one session: what the cache of calls holds."""

    __slots__ = (
        "checks_overlap",
        "counts_in_memory",
        "default_dtype",
        "dtype",
        "func",
        "has_bits",
        "is_absolute_view",
        "is_direct",
        "is_dynamic",
        "is_view",
        "moves",
        "num_new",
        "plan",
        "shape",
        "spec",
        "stride",
        "template",
        "view_offset_bytes",
        "windows",
    )

    def __init__(self, plan: OpPlan, template: int, func: Any, default_dtype: torch.dtype | None) -> None:
        self.plan = plan
        self.template = template
        #: The overload, kept because the cache knows it by ``id``. A string for ops that have none.
        self.func = func
        #: The default dtype that the plan depends on, or None.
        self.default_dtype = default_dtype
        #: Conversions of strict mode that move bytes, for the list that users see.
        self.moves: Sequence[Moved] = ()
        new = [output for output in plan.outputs if isinstance(output, NewOutput)]
        self.num_new = plan.num_made
        self.is_dynamic = plan.is_dynamic
        #: One op, one new tensor, nothing else to do: the path that has to be fast.
        is_simple = (
            plan.op is not None
            and plan.returns == "one"
            and len(new) == len(plan.outputs) == 1
            and not plan.conversions
            and not plan.mutates
            and not plan.num_seeds
            and default_dtype is None
        )
        #: ``as_strided``, whose result may lie anywhere in the memory of its input.
        self.counts_in_memory = func is torch.ops.aten.as_strided.default
        window = new[0].window if is_simple else None
        #: A view of its only input, whose handle has to say where in memory it is.
        self.is_view = window is not None and len(plan.layouts) == 1 and not self.counts_in_memory
        #: Whether ``dispatch`` issues it by itself. Only of views it makes symbols with the bits of ``Spec``.
        self.is_direct = is_simple and (self.is_view or (window is None and new[0].spec.is_resolved))
        #: Where each value that it makes lies in memory, with the offset in bytes; empty when none is a view.
        windows: list[tuple[Window, int] | None] = [
            None if o.window is None else (o.window, o.window.offset * o.spec.dtype.itemsize) for o in new
        ]
        self.windows = windows if any(windows) else []
        #: Whether its place in memory does not depend on that of the input: ``as_strided`` with an offset.
        self.is_absolute_view = window is not None and window.is_absolute
        if is_simple:
            self.spec = spec = new[0].spec
            self.shape = spec.shape
            self.stride = None if spec.stride == contiguous_stride(spec.shape) else spec.stride
            self.dtype = spec.dtype
            self.has_bits = not spec.is_resolved
        #: Whether the op must not write across what it reads.
        self.checks_overlap = len(plan.layouts) > 1 and bool(plan.mutates) and checks_overlap(func)
        if window is not None:
            self.view_offset_bytes = window.offset * self.dtype.itemsize

    def resized(self, spec: Spec) -> Entry:
        """The same op where its one result has another size: the template says nothing of sizes."""
        other = _new(Entry)
        for name in _SIZELESS:
            setattr(other, name, getattr(self, name))
        other.spec = spec
        other.shape = spec.shape
        plan = self.plan
        other.plan = OpPlan(
            plan.op, plan.args, plan.kwargs, plan.layouts, plan.conversions, (NewOutput(spec),), plan.returns
        )
        return other

    def __str__(self) -> str:
        return str(self.func).removeprefix("aten.").partition(".")[0]


#: What entries of one op share, whatever the size of its one result, which is no view.
_SIZELESS = tuple(
    name for name in Entry.__slots__ if name not in ("plan", "shape", "spec", "view_offset_bytes")
)


def new_symbol(cls: type[torch.Tensor], spec: Spec) -> Any:
    """A tensor of the user's for a value that it has yet to be given."""
    symbol: Any = _make_wrapper(cls, spec.shape, spec.stride, None, None, spec.dtype, STRIDED, DEVICE)
    if not spec.is_resolved:
        set_bits(symbol, spec.is_conj, spec.is_neg)
    symbol._spec = spec
    return symbol


def set_bits(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> None:
    """Tell torch whether the elements are the conjugates, and the negatives, of what is in memory."""
    torch._C._set_conj(tensor, is_conj)
    torch._C._set_neg(tensor, is_neg)


def make_symbol(cls: type[torch.Tensor], spec: Spec, handle: Handle) -> Any:
    """A tensor of the user's for a value of the cluster."""
    symbol = new_symbol(cls, spec)
    symbol._handle = handle
    return symbol


def make_view(cls: type[torch.Tensor], spec: Spec, handle: Handle, source: torch.Tensor) -> Any:
    """A symbol for a view of ``source``: of a normal tensor a normal one, also in inference mode."""
    if torch.is_inference_mode_enabled() and not source.is_inference():
        with torch.inference_mode(False):
            return make_symbol(cls, spec, handle)
    return make_symbol(cls, spec, handle)


def make_entry(
    session: Session,
    plan: OpPlan,
    func: Any,
    num_inputs: int,
    default_dtype: torch.dtype | None = None,
    given: Sequence[Spec] = (),
) -> Entry:
    """Make a plan ready: its meshes and its template are known to the cluster afterwards.

    Args:
        given: the specs of the inputs, before conversions, where they are known.

    Raises:
        MeshError: a mesh names devices that the cluster does not have.
        NodeLost: one of them is gone.
    """
    session.counts.num_misses += 1
    if plan.op is None:
        return Entry(plan, 0, func, default_dtype)
    new = [output.spec.layout for output in plan.outputs if isinstance(output, NewOutput)]
    meshes = dict.fromkeys(layout.mesh for layout in (*plan.layouts, *new))
    record = TemplateRecord(
        template_id=0,
        op=plan.op,
        args=list(plan.args),
        kwargs=dict(plan.kwargs),
        num_inputs=num_inputs,
        num_outputs=plan.num_made,
        num_scalars=plan.num_seeds,
        mesh_ids=[session.define_mesh(mesh) for mesh in meshes],
        mutates=list(plan.mutates),
        views=views_of(plan),
        fits=fits_of(plan, given),
    )
    return Entry(plan, session.define_template(record), func, default_dtype)


def issue(
    cls: type[torch.Tensor],
    entry: Entry,
    graph: Graph,
    tensors: Sequence[Any],
    location: int,
    draw_seed: Callable[[], int] = next_seed,
) -> Any:
    """Issue a planned call on its tensors and return what the user gets. ``tensors`` are in slot order."""
    plan = entry.plan
    if entry.checks_overlap and ViewHandle in [type(tensor._handle) for tensor in tensors]:
        refuse_partial_overlap(entry, plan.mutates, tensors)
    if entry.counts_in_memory:
        refuse_outside(tensors[0], plan)
        if entry.is_absolute_view:
            refuse_lost_gradient(tensors[0])
    if plan.conversions:
        tensors = list(tensors)
        for index, layout in plan.conversions:
            tensors[index] = transfer(cls, tensors[index], layout, location)
        if entry.moves:
            log_strict(entry.moves, location)
    handles = [tensor._handle for tensor in tensors]
    for index in plan.mutates:
        handles[index].root.last_write = next_write()
    foreign = {id(handle.graph): handle.graph for handle in handles if handle.graph is not graph}
    for other in foreign.values():
        if other.session is not graph.session:
            raise SessionClosed(
                f"{entry} got tensors of two sessions, {graph.session!r} and {other.session!r}; a tensor lives in "
                f"the session that made it: fetch it with .to_torch() and send it with dtorch.from_torch()"
            )
        other.flush()
    ids: list[int] = []
    if plan.op is not None:
        seeds = [draw_seed() for _ in range(plan.num_seeds)]
        if seeds and graph.recording is not None:
            graph.recording.draws += [draw_seed] * len(seeds)
        inputs = [handle.value_id for handle in handles]
        ids = graph.append(entry.template, location, inputs, entry.num_new, seeds)
        if foreign:
            graph.flush()  # before the other graph can free what was just used
    return _results(cls, entry, graph, tensors, ids, location)


def view_of(
    cls: type[torch.Tensor], entry: Entry, graph: Graph, source: Any, value_id: int, location: int
) -> Any:
    """The symbol of an issued view of ``source``. As short as the end of ``dispatch``: loops are full of views."""
    handle: Handle = source._handle
    view = _new(ViewHandle)  # its fields one by one, as in ``dispatch``
    view.graph = graph
    view.value_id = value_id
    view.origin = entry
    view.location = location
    view.root = handle.root  # type: ignore[misc]  # a slot in place of the property
    view.offset_bytes = handle.offset_bytes + entry.view_offset_bytes
    if _is_inference():
        return make_view(cls, entry.spec, view, source)
    result: Any = _make_wrapper(cls, entry.shape, entry.stride, None, None, entry.dtype, STRIDED, DEVICE)
    if entry.has_bits:
        set_bits(result, entry.spec.is_conj, entry.spec.is_neg)
    result._spec = entry.spec
    result._handle = view
    return result


def _results(
    cls: type[torch.Tensor], entry: Entry, graph: Graph, tensors: Sequence[Any], ids: list[int], location: int
) -> Any:
    results: list[Any] = []
    handles = _handles(entry, graph, tensors, ids, location)
    later = _awaited(entry.plan, handles) if entry.is_dynamic else iter(())
    new = iter(handles)
    for output in entry.plan.outputs:
        match output:
            case NewOutput(spec, None):
                results.append(make_symbol(cls, spec, next(new)))
            case NewOutput(spec, Window(index)):
                results.append(make_view(cls, spec, next(new), tensors[index]))
            case LaterOutput():
                found, handle = next(later), next(new)
                results.append(None if found is None else make_symbol(cls, found, handle))
            case SameTensor(index):
                results.append(tensors[index])
            case SameValue(index, spec):
                results.append(make_view(cls, spec, tensors[index]._handle, tensors[index]))
            case _:
                results.append(None)
    match entry.plan.returns:
        case "one":
            return results[0]
        case "tuple":
            return tuple(results)
        case "list":
            return results
        case "none":
            # Torch counts the writes of ops that return what they wrote; these, on lists, it leaves to their kernels.
            torch._C._increment_version([tensors[index] for index in entry.plan.mutates])
            return None


def _handles(
    entry: Entry, graph: Graph, tensors: Sequence[Any], ids: list[int], location: int
) -> list[Handle]:
    """A handle for each value that the op makes; those of views know whose memory they share."""
    if not entry.windows:
        return [Handle(graph, value_id, entry, location) for value_id in ids]
    handles: list[Handle] = []
    for value_id, found in zip(ids, entry.windows, strict=True):
        if found is None:
            handles.append(Handle(graph, value_id, entry, location))
            continue
        window, offset_bytes = found
        source: Handle = tensors[window.index]._handle
        start = offset_bytes if window.is_absolute else offset_bytes + source.offset_bytes
        handles.append(ViewHandle(graph, value_id, entry, location, source.root, start))
    return handles


def _awaited(plan: OpPlan, handles: Sequence[Handle]) -> Iterator[Spec | None]:
    """What each later output turned out to be: waits for the description that the op made, its last value."""
    layouts = [output.layout for output in plan.outputs if isinstance(output, LaterOutput)]
    session = handles[-1].graph.session
    future = session.fetch(handles[-1], description_spec(layouts[0]), "shape")
    for layout, result in zip(layouts, read_description(future.get()), strict=True):
        yield (
            None
            if result is None
            else intern_spec(result.shape, dtype_of(result.dtype), layout, result.stride)
        )


def transfer(cls: type[torch.Tensor], tensor: Any, layout: Layout, location: int) -> Any:
    """Issue the redistribution of a tensor to ``layout``; autograd does not see it."""
    spec: Spec = tensor._spec
    graph: Graph = tensor._handle.graph
    key = ("redistribute", spec, layout)
    entry = graph.entries.get(key)
    if entry is None:
        graph.session.check_open()
        argument = TransferArg(
            shape=list(spec.shape),
            dtype=name_of(spec.dtype),
            source=layout_record(spec.layout),
            target=layout_record(layout),
        )
        plan = OpPlan(
            op="dtorch::redistribute",
            args=(Slot(0), argument),
            layouts=(spec.layout, layout),
            outputs=(NewOutput(intern_spec(spec.shape, spec.dtype, layout)),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, "redistribute", 1)
    [value_id] = graph.append(entry.template, location, (tensor._handle.value_id,), 1)
    return make_symbol(cls, entry.spec, Handle(graph, value_id, entry, location))


def upload(cls: type[torch.Tensor], graph: Graph, tensor: torch.Tensor, layout: Layout, location: int) -> Any:
    """Bring a CPU tensor of global shape to the cluster; the layout has no partial axes.

    Raises:
        UnsupportedError: a quantized one.
    """
    if tensor.is_quantized:
        raise UnsupportedError(
            f"DTorch holds plain tensors, got a quantized one of {tensor.dtype}, which torch is about to remove; "
            f"write t.dequantize(), or t.int_repr() for its integers"
        )
    source = tensor.detach().resolve_conj().resolve_neg()
    spec = intern_spec(tuple(tensor.shape), tensor.dtype, layout)
    return upload_boxes(
        cls, graph, spec, lambda box: (cut(source, box).contiguous(),), "from_torch", location
    )


def upload_boxes(
    cls: type[torch.Tensor],
    graph: Graph,
    spec: Spec,
    blocks: Callable[[Box], Iterable[torch.Tensor]],
    origin: str,
    location: int,
) -> Any:
    """Bring a value to the cluster piece by piece. Each device gets its piece only; equal pieces are sent once.

    ``blocks`` gives the elements of a box in row-major order, as contiguous CPU tensors one after the other.
    """
    session = graph.session
    if (recording := graph.watching) is not None:
        recording.refuse(
            f"sends a tensor of shape {list(spec.shape)} of this process to the cluster: a replay would send no "
            f"other one. Make it before, and pass it as an argument"
        )
    session.define_mesh(spec.layout.mesh)
    handle = Handle(graph, graph.new_value_id(), origin, location)
    handle.num_bytes = num_bytes_of(spec)
    # In the order of the graph, so that its FREE can never overtake the upload.
    seq = graph.flush()
    for devices, box in device_boxes(spec.shape, spec.layout):
        seq = session.upload(handle.value_id, devices, spec.dtype, box_shape(box), blocks(box))
    with graph.lock:
        graph.last_seq = max(graph.last_seq, seq)
    return make_symbol(cls, spec, handle)
