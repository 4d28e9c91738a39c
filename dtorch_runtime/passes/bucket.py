"""Pass "bucket": several small all-reduces become one, and several small gathers.

What they move is laid end to end, moved once, and cut apart again. Each element is the sum of the same terms in the
same order as before, so it is the same to the last bit. (Li et al. 2020, "PyTorch Distributed: experiences on
accelerating data parallel training", call this gradient bucketing.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.ir.layout import Layout, all_boxes, box_shape, num_elements
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.passes.body import Body
from dtorch_runtime.passes.memory import Memory
from dtorch_runtime.passes.transfers import Transfer, read_transfer, transfer_arg, transfer_template
from dtorch_runtime.wire.records import Arg, ListArg, LocalShape, Slot, TemplateRecord, TransferArg

PACK: Final = "dtorch::pack"
UNPACK: Final = "dtorch::unpack"
#: What a device gives and gets in one is at most this: above, the two copies cost more than the wait that is saved
#: (measured, see docs/passes.md).
SMALL_BYTES: Final = 32 * 1024
#: Of all that one bucket holds. Larger ones would start later, and be planned otherwise than their parts.
BUCKET_BYTES: Final = 512 * 1024
#: Among CPU devices of one agent, calls that move less run in one thread: there a small redistribution costs less than
#: the two copies. In others each is a meeting of threads.
MEETINGS_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Member:
    """A small redistribution, and where it may be: before the op ``earliest`` at the earliest, and so on.

    Attributes:
        index: of its op.
        key: equal for those that may go together.
        num_bytes: what a device holds afterwards.
    """

    index: int
    op: BodyOp
    transfer: Transfer
    key: Hashable
    num_bytes: int
    earliest: int
    latest: int


def fill_buckets(body: Body) -> Body:
    """The body with small redistributions of a kind together, where none is then later than its first reader.

    Not where all devices are CPU devices of one agent, and little is moved: ``MEETINGS_BYTES``.
    """
    if _is_in_one_process(body) and _moved_bytes(body) < MEETINGS_BYTES:
        return body
    spare = iter(body.spare_values())
    taken: dict[int, None] = {}
    before: dict[int, list[BodyOp]] = {}
    for bucket in _buckets(_members(body)):
        names = (next(spare, 0), next(spare, 0))
        if not names[1]:
            break
        place = max(member.earliest for member in bucket)
        before.setdefault(place, []).extend(_together(bucket, *names))
        taken.update((member.index, None) for member in bucket)
    ops: list[BodyOp] = []
    for index in range(len(body.ops) + 1):
        ops += before.get(index, ())
        if index < len(body.ops) and index not in taken:
            ops.append(body.ops[index])
    return body.with_ops(ops) if taken else body


def _is_in_one_process(body: Body) -> bool:
    nodes = {
        body.node_of.get(device, ("of", device)) for mesh in body.meshes.values() for device in mesh.devices
    }
    return len(nodes) == 1 and all(mesh.device_type == "cpu" for mesh in body.meshes.values())


def _moved_bytes(body: Body) -> int:
    """Of the tensors that are moved, whole."""
    found = (transfer_arg(op.template) for op in body.ops)
    return sum(num_elements(arg.shape) * _itemsize_bytes(arg.dtype) for arg in found if arg is not None)


def num_joined(before: Body, after: Body) -> int:
    """How many redistributions of one body are in buckets of the other."""
    del before
    return sum(len(op.outputs) for op in after.ops if op.template.op == UNPACK)


def _members(body: Body) -> list[_Member]:
    """The small redistributions that could go with others, in order."""
    found: list[_Member] = []
    memory = Memory(body)
    transfers = [read_transfer(op, body.meshes) for op in body.ops]
    moved = {op.outputs[0] for op, transfer in zip(body.ops, transfers, strict=True) if transfer is not None}
    made = {value: index for index, op in enumerate(body.ops) for value in op.outputs}
    first_use: dict[int, int] = {}
    for index, op in enumerate(body.ops):
        for value in op.inputs:
            first_use.setdefault(value, index)
    for index, (op, transfer) in enumerate(zip(body.ops, transfers, strict=True)):
        # One whose input was just moved could overtake it.
        if transfer is None or op.inputs[0] in moved:
            continue
        kind = _kind(transfer)
        if kind is None:
            continue
        key, num_bytes = kind
        earliest, latest = memory.span(op.inputs[0], index, len(body.ops))
        found.append(
            _Member(
                index,
                op,
                transfer,
                key,
                num_bytes,
                max(earliest, made.get(op.inputs[0], -1) + 1),
                min(latest, first_use.get(op.outputs[0], len(body.ops))),
            )
        )
    return found


def _buckets(members: Sequence[_Member]) -> list[list[_Member]]:
    """Those that can be at one place together; two or more each. Where the first must be, others may join it."""
    rest = sorted(members, key=lambda member: (member.latest, member.index))
    buckets = []
    while rest:
        first, *rest = rest
        bucket, num_bytes = [first], first.num_bytes
        for other in sorted(rest, key=lambda member: member.index):
            fits = num_bytes + other.num_bytes <= BUCKET_BYTES
            if fits and other.key == first.key and other.earliest <= first.latest:
                bucket.append(other)
                num_bytes += other.num_bytes
        if len(bucket) > 1:
            bucket.sort(key=lambda member: member.index)
            buckets.append(bucket)
            gone = {member.index for member in bucket}
            rest = [member for member in rest if member.index not in gone]
    return buckets


def _kind(transfer: Transfer) -> tuple[Hashable, int] | None:
    """What redistributions must have in common, and the bytes that a device holds afterwards; None if it is not small.

    Either axes with terms become replicated and the others stay as they are, or one cut becomes replicated and the
    other axes are. All devices hold as many elements as one another.
    """
    arg, source, target = transfer.arg, transfer.source, transfer.target
    if source.mesh != target.mesh or len(source.placements) != len(target.placements):
        return None
    # On an axis of one device every placement is as good as another.
    sizes = zip(source.mesh.shape, source.placements, target.placements, strict=True)
    pairs = [(old, new) if size > 1 else (Replicate(), Replicate()) for size, old, new in sizes]
    changed = [(old, new) for old, new in pairs if old != new]
    reduces = all(isinstance(old, Partial) and isinstance(new, Replicate) for old, new in changed)
    kept = [old for old, new in pairs if old == new]
    gathers = len(changed) == 1 and isinstance(changed[0][0], Shard) and isinstance(changed[0][1], Replicate)
    if not changed or not (reduces or gathers) or any(isinstance(old, Partial) for old in kept):
        return None
    if gathers and any(isinstance(old, Shard) for old in kept):
        return None
    num_local = _num_local(tuple(arg.shape), source)
    if not num_local or not _num_local(tuple(arg.shape), target):
        return None
    num_bytes = num_elements(arg.shape) * _itemsize_bytes(arg.dtype)
    if num_bytes > SMALL_BYTES:
        return None
    ends = tuple(str(_flat(placement)) for old_new in pairs for placement in old_new)
    return (arg.source.mesh_id, arg.dtype, ends), num_bytes


def _num_local(shape: tuple[int, ...], layout: Layout) -> int:
    """The elements of each device; 0 where they differ, or where the layout does not fit the shape."""
    try:
        sizes = {num_elements(box_shape(box)) for box in all_boxes(shape, layout)}
    except (ValueError, IndexError):
        return 0
    return sizes.pop() if len(sizes) == 1 else 0


def _flat(placement: Placement) -> Placement:
    return Shard(0) if isinstance(placement, Shard) else placement


def _itemsize_bytes(dtype: str) -> int:
    """Of a dtype by its name: float32, bool, float8_e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8


def _together(bucket: Sequence[_Member], packed: int, moved: int) -> list[BodyOp]:
    """Lay the pieces end to end, move them, and cut them apart."""
    first = bucket[0]
    arg, source, target = first.transfer.arg, first.transfer.source, first.transfer.target
    mesh_id, where, count = arg.source.mesh_id, first.op.location_id, len(bucket)
    num_local = sum(_num_local(tuple(member.transfer.arg.shape), member.transfer.source) for member in bucket)
    cuts = [
        size for size, old in zip(source.mesh.shape, source.placements, strict=True) if isinstance(old, Shard)
    ]
    flat = TransferArg(
        [num_local * math.prod(cuts)],
        arg.dtype,
        layout_to_record(_flattened(source), mesh_id),
        layout_to_record(_flattened(target), mesh_id),
    )
    pack = TemplateRecord(
        0, PACK, [ListArg([Slot(index) for index in range(count)])], {}, count, 1, 0, [mesh_id], views=[-1]
    )
    unpack = TemplateRecord(0, UNPACK, _unpack_args(bucket), {}, 1, count, 0, [mesh_id], views=[-1] * count)
    return [
        BodyOp(pack, where, tuple(member.op.inputs[0] for member in bucket), (packed,), ()),
        BodyOp(transfer_template(flat), where, (packed,), (moved,), ()),
        BodyOp(unpack, where, (moved,), tuple(member.op.outputs[0] for member in bucket), ()),
    ]


def _unpack_args(bucket: Sequence[_Member]) -> list[Arg]:
    """What was moved, the shape that each piece had, the dim along which it was gathered, from how many devices."""
    dims: list[Arg] = []
    num_pieces = 1
    shapes: list[Arg] = []
    for member in bucket:
        transfer = member.transfer
        shapes.append(LocalShape(transfer.arg.shape, transfer.arg.source))
        dim = 0
        mesh_shape = transfer.source.mesh.shape
        for size, old, new in zip(
            mesh_shape, transfer.source.placements, transfer.target.placements, strict=True
        ):
            if size > 1 and isinstance(old, Shard) and old != new:
                dim, num_pieces = old.dim, size
        dims.append(dim)
    return [Slot(0), ListArg(shapes), ListArg(dims), num_pieces]


def _flattened(layout: Layout) -> Layout:
    pairs = zip(layout.mesh.shape, layout.placements, strict=True)
    return Layout(layout.mesh, tuple(_flat(p) if size > 1 else Replicate() for size, p in pairs))
