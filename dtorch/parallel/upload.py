"""A stored tensor to its devices: each reads its own piece where its node sees the file, and is sent it elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch

from dtorch.graph import Graph
from dtorch.issue import Entry, issue, make_entry, upload_boxes
from dtorch.location import capture
from dtorch.meshes import layout_record
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.parallel.weights import Sources, StoredTensor
from dtorch.spec import Spec, intern_spec
from dtorch.tensors import Tensor
from dtorch_runtime.errors import RemoteOpError, SettingError
from dtorch_runtime.ir.layout import Layout, box_shape, num_elements, resolve_placements
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, split
from dtorch_runtime.wire.records import Arg, DeviceArg, DTypeArg, ListArg, LocalShape, LocalStart
from dtorch_runtime.worker.blobs import name_of
from dtorch_runtime.worker.file_kernels import NO_TENSORS, StoredPiece
from dtorch_runtime.worker.stored import CHECKED_BYTES, FileFacts, StoredFile

#: Who reads a file: the devices, if their nodes see it, else this process; the devices or nobody; this process.
ReadBy: TypeAlias = Literal["auto", "workers", "client"]
READ_BY: Final = ("auto", "workers", "client")
_READ: Final = "dtorch::read"
_CHECK: Final = "dtorch::check_files"
#: Parts of ``CHECKED_BYTES`` that one op compares at most.
_PARTS_AT_ONCE: Final = 256


def upload(
    stored: StoredTensor, mesh: DeviceMesh, placements: Sequence[Placement], read_by: ReadBy = "auto"
) -> Tensor:
    """The tensor on ``mesh``, in the dtype of the file. ``placements`` have no partial axes.

    Each device reads its own piece, or is sent it in blocks of rows; how many of them may be on the way at once is
    ``Settings.max_outstanding_bytes``. What goes wrong while a device reads is raised by ``finish_reading``.

    Raises:
        SettingError: ``read_by="workers"``, and a node does not see a file.
    """
    graph = Graph.default_graph()
    _refuse_replays(graph, stored)
    layout = Layout(mesh, resolve_placements(placements, mesh, len(stored.shape)))
    spec = intern_spec(stored.shape, stored.dtype, layout)
    location = capture(sys._getframe(1))
    paths = {piece.file.path for piece in stored.pieces}
    if not stored.is_for_workers:
        if read_by == "workers":
            raise SettingError(
                f"read_by='workers': {stored.file} holds pickles, which only this process reads; leave it out"
            )
        read_by = "client"
    unseen = {} if read_by == "client" else _unseen(graph, stored.sources, mesh, paths, location)
    if unseen and read_by == "workers":
        raise SettingError(
            f"read_by='workers': {'; '.join(unseen.values())}. Give a path that these nodes see, or write "
            f"read_by='auto', and what they do not see is sent to them"
        )
    made: Tensor
    if read_by == "client" or unseen:
        made = upload_boxes(Tensor, graph, spec, stored.blocks, stored.name, location)
    else:
        made = issue(Tensor, _reading(graph, stored, spec), graph, (), location)
    return made


def verify(wanted: Iterable[tuple[StoredTensor, DeviceMesh | None]]) -> None:
    """Compare stored tensors with the checksums of their files, where there are some.

    Each part of a file is read once for each mesh that wants something of it, by a device of the mesh if all its nodes
    see the file, else by this process; as are tensors for no mesh.

    Raises:
        SettingError: a file is not what it was, or cannot be read.
        RemoteOpError: an op failed before, and nobody has seen it.
    """
    here: list[StoredTensor] = []
    of_mesh: dict[DeviceMesh, dict[StoredFile, set[int]]] = {}
    for stored, mesh in wanted:
        if mesh is None or not _is_checked_by_workers(stored, mesh):
            here.append(stored)
            continue
        for piece in stored.pieces:
            of_mesh.setdefault(mesh, {}).setdefault(piece.file, set()).update(_parts(piece, stored.dtype))
    checks = [
        _check(mesh.device_type, device, parts)
        for mesh, files in of_mesh.items()
        for device, parts in _shares([(f, n) for f, numbers in files.items() for n in sorted(numbers)], mesh)
    ]
    try:
        for stored in here:
            stored.verify()
    finally:
        if checks:
            finish_reading(Graph.default_graph())


def finish_reading(graph: Graph) -> None:
    """Wait until everything that the graph has issued has run.

    Raises:
        SettingError: a device could not read its piece; with the node and the file.
        RemoteOpError: another op failed before, and nobody has seen it.
    """
    first: RemoteOpError | None = None
    while True:  # each tensor of a file that is gone has failed, and none of it is to be told again later
        try:
            graph.sync()
            break
        except RemoteOpError as error:
            if error.failure.op not in (_READ, _CHECK):
                raise
            first = first or error
    if first is not None:
        failure = first.failure
        raise SettingError(
            f"device {failure.device} (node {failure.node}) could not read: {failure.message}"
        ) from first


def _refuse_replays(graph: Graph, stored: StoredTensor) -> None:
    if graph.watching is not None:
        graph.watching.refuse(
            f"reads {stored.name} from {stored.file}: a replay would read it again. Load it before, and pass it as "
            f"an argument"
        )


# ---- the op with which devices read ----


def _reading(graph: Graph, stored: StoredTensor, spec: Spec) -> Entry:
    key = (_READ, spec, *((p.file.path, p.file.facts, p.start, p.box) for p in stored.pieces))
    key += tuple(tuple(_checks(piece, spec) or ()) for piece in stored.pieces)
    entry = graph.entries.get(key)
    if entry is None:
        graph.session.check_open()
        plan = OpPlan(
            op=_READ,
            args=_arguments(stored, spec),
            kwargs={"dtype": DTypeArg(name_of(spec.dtype)), "device": DeviceArg()},
            layouts=(spec.layout,),
            outputs=(NewOutput(spec),),
        )
        entry = graph.entries[key] = make_entry(graph.session, plan, stored.name, 0)
    return entry


def _arguments(stored: StoredTensor, spec: Spec) -> tuple[Arg, ...]:
    record, shape = layout_record(spec.layout), list(spec.shape)
    files: list[Arg] = []
    pieces: list[Arg] = []
    for number, piece in enumerate(stored.pieces):
        facts, crcs = piece.file.facts, _checks(piece, spec)
        checks = None if crcs is None else ListArg(list(crcs))
        files.append(ListArg([piece.file.path, facts.num_bytes, facts.header_crc32, checks]))
        bounds: list[Arg] = [bound for interval in piece.box for bound in interval]
        pieces.append(ListArg([number, piece.start, ListArg(bounds)]))
    starts: list[Arg] = [LocalStart(shape, record, dim) for dim in range(len(shape))]
    return ListArg(starts), LocalShape(shape, record), ListArg(files), ListArg(pieces)


def _checks(piece: StoredPiece, spec: Spec) -> list[int] | None:
    """The checksums of the parts in which a piece lies: number of the part, CRC-32, and so on."""
    crcs = piece.file.crcs
    if crcs is None:
        return None
    return [number for part in _parts(piece, spec.dtype) for number in (part, crcs[part])]


def _parts(piece: StoredPiece, dtype: torch.dtype) -> range:
    """The parts of a file, each with a checksum, in which a piece lies."""
    stop = piece.start + dtype.itemsize * num_elements(box_shape(piece.box))
    return range(piece.start // CHECKED_BYTES, -(-stop // CHECKED_BYTES))


# ---- the op with which they compare ----


def _is_checked_by_workers(stored: StoredTensor, mesh: DeviceMesh) -> bool:
    if not stored.is_for_workers or any(piece.file.crcs is None for piece in stored.pieces):
        return False  # of a file without checksums, what can be compared is in its header
    graph = Graph.default_graph()
    _refuse_replays(graph, stored)
    paths = {piece.file.path for piece in stored.pieces}
    return not _unseen(graph, stored.sources, mesh, paths, capture(sys._getframe(1)))


def _shares(
    parts: Sequence[tuple[StoredFile, int]], mesh: DeviceMesh
) -> Iterator[tuple[int, Sequence[tuple[StoredFile, int]]]]:
    """Which device compares which parts: all have as much to do, and no op takes long."""
    devices = sorted(set(mesh.devices))
    for device, (start, stop) in zip(devices, split(len(parts), len(devices)), strict=True):
        for first in range(start, stop, _PARTS_AT_ONCE):
            yield device, parts[first : min(first + _PARTS_AT_ONCE, stop)]


def _check(device_type: str, device: int, parts: Sequence[tuple[StoredFile, int]]) -> Tensor:
    by_file: dict[StoredFile, list[int]] = {}
    for file, number in parts:
        assert file.crcs is not None, "others are compared by this process"
        by_file.setdefault(file, []).extend((number, file.crcs[number]))
    files: list[Arg] = [
        ListArg([file.path, file.facts.num_bytes, file.facts.header_crc32, ListArg(list(checks))])
        for file, checks in by_file.items()
    ]
    spec = intern_spec((), torch.int64, _alone(device_type, device))
    return _issued(_CHECK, (ListArg(files), DeviceArg()), spec, "check files", capture(sys._getframe(1)))


def _alone(device_type: str, device: int) -> Layout:
    return Layout(DeviceMesh(device_type, [device]), (Replicate(),))


def _issued(op: str, args: tuple[Arg, ...], spec: Spec, what: str, location: int) -> Tensor:
    """The result of an op that is made for once."""
    graph = Graph.default_graph()
    plan = OpPlan(op=op, args=args, layouts=(spec.layout,), outputs=(NewOutput(spec),))
    made: Tensor = issue(Tensor, make_entry(graph.session, plan, what, 0), graph, (), location)
    return made


# ---- who sees which files ----


def _unseen(
    graph: Graph, sources: Sources, mesh: DeviceMesh, paths: Collection[str], location: int
) -> dict[str, str]:
    """For each node of the mesh that cannot read one of these files, why."""
    session = graph.session
    asked: dict[str, Any] = {}
    nodes = {node.name: node for node in session.nodes() if set(node.devices) & set(mesh.devices)}
    for name, node in nodes.items():
        if (id(session), name) not in sources.unseen:
            device = min(set(node.devices) & set(mesh.devices))
            asked[name] = _look(sources.files, mesh.device_type, device, location)
    for name, future in asked.items():
        found = {
            path: why
            for (path, file), (num_bytes, crc32) in zip(
                sources.files.items(), future.get().tolist(), strict=True
            )
            if (why := _difference(file, num_bytes, crc32))
        }
        sources.unseen[id(session), name] = found
    unseen: dict[str, str] = {}
    for name in nodes:
        reasons = sources.unseen[id(session), name]
        first = next((path for path in sorted(paths) if path in reasons), None)
        if first is not None:
            unseen[name] = f"node {name} (host {nodes[name].host}) {reasons[first]}"
    return unseen


def _look(files: Mapping[str, StoredFile], device_type: str, device: int, location: int) -> Any:
    spec = intern_spec((len(files), 2), torch.int64, _alone(device_type, device))
    args = (ListArg(list(files)), DeviceArg())
    return _issued("dtorch::look_for_files", args, spec, "look for files", location).to_torch_async()


def _difference(file: StoredFile, num_bytes: int, header_crc32: int) -> str:
    if num_bytes == NO_TENSORS:
        return f"has at {file.path} a file that holds no tensors"
    if num_bytes < 0:
        return f"cannot read {file.path}: {os.strerror(-num_bytes)}"
    if not file.facts.is_of(FileFacts(num_bytes, header_crc32)):
        return f"has at {file.path} another file than this process, of {num_bytes} bytes"
    return ""
