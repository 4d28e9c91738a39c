"""Which values of a body may share memory, who writes to it, and which of it is seen outside."""

from __future__ import annotations

from bisect import bisect_right

from dtorch_runtime.passes.body import Body


class Memory:
    """Areas of memory. Values that may share memory are in one area.

    All inputs of a call are in one, because the caller may give it two views of a tensor. So are the outputs of an op
    whose template does not say where they lie, and its inputs.
    """

    def __init__(self, body: Body) -> None:
        self._parent: dict[int, int] = {}
        #: Of each area that is written to, the indices of the ops that do so; rising.
        self._writes: dict[int, list[int]] = {}
        num_inputs = body.record.num_inputs
        for value in range(2, num_inputs + 1):
            self._join(1, value)
        for op in body.ops:
            views = op.template.views
            for place, output in enumerate(op.outputs):
                if not output:
                    continue
                if views is None:
                    for value in op.inputs:
                        self._join(value, output)
                elif views[place] >= 0:
                    self._join(op.inputs[views[place]], output)
        for index, op in enumerate(body.ops):
            for place in op.template.mutates:
                self._writes.setdefault(self.area(op.inputs[place]), []).append(index)
        self._outer = {self.area(value) for value in range(1, body.num_outer + 1)}

    def area(self, value: int) -> int:
        """The area of a value."""
        parent = self._parent
        while (above := parent.get(value, value)) != value:
            parent[value] = parent.get(above, above)
            value = above
        return value

    def is_written(self, value: int) -> bool:
        """Whether any op writes to the memory of a value."""
        return self.area(value) in self._writes

    def is_written_between(self, value: int, first: int, last: int) -> bool:
        """Whether an op between the two with these indices writes to it."""
        writes = self._writes.get(self.area(value))
        if writes is None:
            return False
        place = bisect_right(writes, first)
        return place < len(writes) and writes[place] < last

    def span(self, value: int, index: int, num_ops: int) -> tuple[int, int]:
        """Before which ops a value may be read in place of before that at ``index``: from the first to the second."""
        writes = self._writes.get(self.area(value), [])
        place = bisect_right(writes, index)
        earliest = writes[place - 1] + 1 if place else 0
        return earliest, writes[place] if place < len(writes) else num_ops

    def is_outer(self, value: int) -> bool:
        """Whether somebody outside sees the memory of a value, and may write to it after the call."""
        return self.area(value) in self._outer

    def unite(self, a: int, b: int) -> None:
        """Two values become one. Nothing writes to the second, nor to the first from now on."""
        outer = self.is_outer(a) or self.is_outer(b)
        self._join(a, b)
        if outer:
            self._outer.add(self.area(a))

    def _join(self, a: int, b: int) -> None:
        """Two values may share memory."""
        a, b = self.area(a), self.area(b)
        if a != b:
            self._parent[b] = a
