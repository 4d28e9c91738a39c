"""The logical graph of one session: what was issued and is not done yet, and where every value lives.

Ops stay packed as they came (see ``dtorch_runtime.ir.stream``); ``operators()`` decodes them for passes, ``dump()``
for people. Adding a batch is the controller's hot path, so it makes no object for an op: a batch is cut into
*segments*, runs of records that go to the same nodes, and a value is a table entry that points to its segment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dtorch_runtime.ir.stream import FREE, WORD_BYTES, unpack
from dtorch_runtime.wire.records import TemplateRecord


class GraphError(ValueError):
    """A batch or a template that cannot be: it breaks the protocol, so the session that sent it must end."""


class Route:
    """A set of nodes that records go to. One object for each different set, compared by identity."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[int, ...]) -> None:
        #: Node numbers, ascending.
        self.nodes = nodes

    def __repr__(self) -> str:
        return f"Route{self.nodes}"


class RouteTable:
    """Interns routes."""

    def __init__(self) -> None:
        self._routes: dict[tuple[int, ...], Route] = {}
        self.nowhere = self.to(())

    def to(self, nodes: Sequence[int] | set[int]) -> Route:
        """The route to these nodes."""
        key = tuple(sorted(set(nodes)))
        found = self._routes.get(key)
        return found if found is not None else self._routes.setdefault(key, Route(key))

    def union(self, a: Route, b: Route) -> Route:
        """The route to the nodes of both."""
        return a if a is b else self.to(a.nodes + b.nodes)


class Segment:
    """Consecutive records of one message that go to the same nodes; the producer of their outputs.

    Outlives its records: a value refers to it until it is freed, the frame is dropped when the work is done.
    """

    __slots__ = ("frame", "graph_id", "num_ops", "route", "seq", "start", "stop")

    def __init__(self, seq: int, graph_id: int, route: Route, frame: Any, start: int) -> None:
        self.seq = seq
        self.graph_id = graph_id
        self.route = route
        #: The whole payload of the message, or None: an upload, or done.
        self.frame = frame
        #: Words of the frame, half-open.
        self.start = start
        self.stop = start
        self.num_ops = 0

    def payload(self) -> memoryview:
        """The segment's own part of the frame."""
        view = memoryview(self.frame).cast("B")
        return view[self.start * WORD_BYTES : self.stop * WORD_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One value. ``producer_seq`` is the message that made it, or None when the table does not know it."""

    value_id: int
    producer_seq: int | None
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One op, decoded."""

    seq: int
    graph_id: int
    template: TemplateRecord
    location_id: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    scalars: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Values that no later op uses."""

    seq: int
    graph_id: int
    value_ids: tuple[int, ...]
    nodes: tuple[int, ...]


Vertex: TypeAlias = Operator | Release
#: Width of a record, position of its first output, number of outputs, route.
_Shape: TypeAlias = tuple[int, int, int, Route]
#: Words of a FREE record of one value, by far the most frequent one.
_WIDTH_OF_FREE_ONE = 3


def unpack_checked(frame: Any) -> list[int]:
    """The words of a payload frame that came from outside.

    Raises:
        GraphError: it is not a whole number of words.
    """
    try:
        return unpack(frame)
    except (ValueError, TypeError) as error:
        raise GraphError(str(error)) from None


class LogicalGraph:
    """See the module. Bounded: ops by the session's credits, values by what the client has not freed."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes
        #: template id -> record. A template is defined once.
        self.templates: dict[int, TemplateRecord] = {}
        self._shapes: dict[int, _Shape] = {}
        #: value id -> the segment that produces it. Every id > 0; removed by FREE.
        self.values: dict[int, Segment] = {}
        #: Segments with ops that are not done, by rising seq; each has its frame.
        self.pending: deque[Segment] = deque()
        #: Ops and FREE records added since the session began.
        self.num_records = 0

    def define_template(self, record: TemplateRecord, route: Route) -> None:
        """Add a template whose ops go to ``route``.

        Raises:
            GraphError: its numbers cannot be, or the id stands for another template.
        """
        known = self.templates.get(record.template_id)
        if known is not None and known != record:
            raise GraphError(
                f"template {record.template_id} is defined twice, as {known.op} and as {record.op}"
            )
        counts = (record.num_inputs, record.num_outputs, record.num_scalars)
        if record.template_id <= FREE or min(counts) < 0:
            raise GraphError(
                f"template {record.template_id} ({record.op}) has an impossible id or width {counts}"
            )
        for verb, places in (("mutates", record.mutates), ("fits", record.fits)):
            if not all(0 <= index < record.num_inputs for index in places):
                raise GraphError(
                    f"template {record.template_id} ({record.op}) {verb} inputs that it does not have"
                )
        views = record.views
        if views is not None and (
            len(views) != record.num_outputs or not all(-1 <= index < record.num_inputs for index in views)
        ):
            raise GraphError(
                f"template {record.template_id} ({record.op}) makes views of inputs that it does not have"
            )
        self.templates[record.template_id] = record
        self.set_route(record, route)

    def set_route(self, record: TemplateRecord, route: Route) -> None:
        """Send later ops of a template elsewhere, after nodes came or went."""
        self._shapes[record.template_id] = (record.width, 2 + record.num_inputs, record.num_outputs, route)

    def add_ops(self, seq: int, graph_id: int, frame: Any) -> list[Segment]:
        """Add a batch, and say which of its records go where. Their order is the program's.

        Raises:
            GraphError: the frame is not whole records of known templates, or an output id is negative. The graph
                is then of no more use.
        """
        words = unpack_checked(frame)
        values, shapes = self.values, self._shapes
        segments: list[Segment] = []
        route: Route | None = None
        segment: Segment | None = None
        start, end, num_records, segment_records, first = 0, len(words), 0, 0, 0
        while start < end:
            head = words[start]
            if head == FREE:
                stop = _end_of_free(words, start, end)
                num_outputs = 0
                if stop - start == _WIDTH_OF_FREE_ONE:
                    freed = values.pop(words[start + 2], None)
                    wanted = freed.route if freed is not None else route or self._routes.nowhere
                else:
                    wanted = self._forget(words[start + 2 : stop], route)
            else:
                shape = shapes.get(head)
                if shape is None:
                    raise GraphError(f"op stream names template {head}, which was not defined")
                width, first, num_outputs, wanted = shape
                stop = start + width
                if stop > end:
                    raise GraphError(f"op stream ends inside a record at word {start} of {end}")
            if wanted is not route or segment is None:
                if segment is not None:
                    segment.stop, segment.num_ops = start, num_records - segment_records
                segment = Segment(seq, graph_id, wanted, frame, start)
                segments.append(segment)
                route, segment_records = wanted, num_records
            if num_outputs == 1:
                value_id = words[start + first]
                if value_id > 0:
                    values[value_id] = segment
                elif value_id < 0:
                    raise GraphError(f"op stream names output {value_id}; ids are positive")
            elif num_outputs:
                self._add_outputs(words[start + first : start + first + num_outputs], segment)
            num_records += 1
            start = stop
        if segment is not None:
            segment.stop, segment.num_ops = end, num_records - segment_records
        self.num_records += num_records
        self.pending.extend(segments)
        return segments

    def add_upload(self, seq: int, value_id: int, route: Route) -> Segment:
        """A value, or another piece of it, comes from the client and not from an op.

        Raises:
            GraphError: the id is not positive.
        """
        if value_id <= 0:
            raise GraphError(f"an upload names value {value_id}; ids are positive")
        known = self.values.get(value_id)
        joined = route if known is None else self._routes.union(known.route, route)
        segment = self.values[value_id] = Segment(seq, 0, joined, None, 0)
        return segment

    def retire(self, seq: int) -> None:
        """Every message up to ``seq`` is done: drop its ops. Values stay until they are freed."""
        pending = self.pending
        while pending and pending[0].seq <= seq:
            pending.popleft().frame = None

    def clear(self) -> None:
        """Forget everything: the session is over."""
        self.templates.clear()
        self._shapes.clear()
        self.values.clear()
        self.pending.clear()

    def operators(self) -> Iterator[Vertex]:
        """What is not done yet, decoded, in program order."""
        for segment in self.pending:
            yield from self._decode(segment)

    def dump(self) -> str:
        """What is not done yet, one line a record."""
        return "\n".join(_line(vertex) for vertex in self.operators())

    def explain(self) -> str:
        """A summary: how much there is of what, and where it goes."""
        ops = Counter(
            (v.template.op if isinstance(v, Operator) else "free", v.nodes) for v in self.operators()
        )
        head = (
            f"{sum(ops.values())} ops not done, {len(self.values)} values, {len(self.templates)} templates, "
            f"{self.num_records} records since the start"
        )
        lines = [head]
        lines += [f"  {count:6} x {op} on nodes {list(nodes)}" for (op, nodes), count in ops.most_common()]
        return "\n".join(lines)

    def validate(self) -> None:
        """Check the invariants that the attributes state."""
        assert min(self.values, default=1) > 0
        assert self._shapes.keys() == self.templates.keys()
        seqs = [segment.seq for segment in self.pending]
        assert seqs == sorted(seqs), "segments are out of order"
        assert all(segment.frame is not None for segment in self.pending)

    def _forget(self, value_ids: list[int], route: Route | None) -> Route:
        """Remove freed values, and say which nodes held any of them."""
        holders: Route | None = None
        for value_id in value_ids:
            segment = self.values.pop(value_id, None)
            if segment is not None and segment.route is not holders:
                holders = segment.route if holders is None else self._routes.union(holders, segment.route)
        return holders or route or self._routes.nowhere

    def _add_outputs(self, value_ids: list[int], segment: Segment) -> None:
        if min(value_ids) < 0:
            raise GraphError(f"op stream names output {min(value_ids)}; ids are positive")
        self.values.update(dict.fromkeys(filter(None, value_ids), segment))

    def _operand(self, value_id: int) -> Operand:
        segment = self.values.get(value_id)
        if segment is None:
            return Operand(value_id=value_id, producer_seq=None, nodes=())
        return Operand(value_id=value_id, producer_seq=segment.seq, nodes=segment.route.nodes)

    def _decode(self, segment: Segment) -> Iterator[Vertex]:
        words = unpack(segment.payload())
        nodes, seq, graph_id = segment.route.nodes, segment.seq, segment.graph_id
        start = 0
        while start < len(words):
            template = self.templates.get(words[start])
            if template is None:
                stop = _end_of_free(words, start, len(words))
                ids = tuple(words[start + 2 : stop])
                yield Release(seq=seq, graph_id=graph_id, value_ids=ids, nodes=nodes)
            else:
                stop = start + template.width
                first_output = start + 2 + template.num_inputs
                first_scalar = first_output + template.num_outputs
                yield Operator(
                    seq=seq,
                    graph_id=graph_id,
                    template=template,
                    location_id=words[start + 1],
                    inputs=tuple(map(self._operand, words[start + 2 : first_output])),
                    outputs=tuple(map(self._operand, words[first_output:first_scalar])),
                    scalars=tuple(words[first_scalar:stop]),
                    nodes=nodes,
                )
            start = stop


def _end_of_free(words: list[int], start: int, end: int) -> int:
    num_ids = words[start + 1] if start + 1 < end else -1
    stop = start + 2 + num_ids
    if num_ids < 0 or stop > end:
        raise GraphError(f"op stream ends inside a FREE record at word {start} of {end}")
    return stop


def _line(vertex: Vertex) -> str:
    if isinstance(vertex, Release):
        return f"{vertex.seq}: free {_names(vertex.value_ids)} on {list(vertex.nodes)}"
    outputs = _names(operand.value_id for operand in vertex.outputs)
    inputs = _names(operand.value_id for operand in vertex.inputs)
    scalars = f"; {', '.join(map(str, vertex.scalars))}" if vertex.scalars else ""
    head = f"{vertex.seq}: " + (f"{outputs} = " if outputs else "")
    return f"{head}{vertex.template.op}({inputs}{scalars}) on {list(vertex.nodes)}"


def _names(value_ids: Iterator[int] | Sequence[int] | Any) -> str:
    return ", ".join(f"%{value_id}" if value_id else "_" for value_id in value_ids)
