"""Pass "reuse": an elementwise op writes to the memory of an input that nobody reads afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.passes.body import Body
from dtorch_runtime.passes.memory import Memory
from dtorch_runtime.passes.transfers import transfer_arg
from dtorch_runtime.wire.records import Arg, Slot, TemplateRecord

_IN_PLACE: Final = """
abs ceil clamp cos erf exp expm1 floor gelu hardswish leaky_relu log log1p logical_not neg reciprocal relu round rsqrt
sigmoid sign silu sin sqrt tanh trunc add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor
div.Scalar masked_fill.Scalar
"""
_OUT: Final = {
    "add.Tensor": "add.out",
    "sub.Tensor": "sub.out",
    "mul.Tensor": "mul.out",
    "div.Tensor": "div.out",
    "maximum": "maximum.out",
    "minimum": "minimum.out",
}
_GRAD_INPUT: Final = (
    "gelu_backward",
    "sigmoid_backward",
    "silu_backward",
    "tanh_backward",
    "threshold_backward",
)


def _full(name: str) -> str:
    base, _, overload = name.partition(".")
    return f"aten::{base}.{overload or 'default'}"


def _in_place(name: str) -> str:
    base, _, overload = name.partition(".")
    return _full(f"{base}_.{overload}")


#: Elementwise op -> the one that writes its result to its first input.
IN_PLACE: Final[Mapping[str, str]] = {
    **{_full(name): _in_place(name) for name in _IN_PLACE.split()},
    "aten::pow.Tensor_Scalar": "aten::pow_.Scalar",
}
#: Elementwise op -> the one that writes its result to an argument, and the name of that.
OUT: Final[Mapping[str, tuple[str, str]]] = {
    **{_full(name): (_full(out), "out") for name, out in _OUT.items()},
    **{_full(name): (_full(f"{name}.grad_input"), "grad_input") for name in _GRAD_INPUT},
}


def full_name(op: str) -> str:
    """The name of an op with its overload."""
    return op if "." in op else f"{op}.default"


def can_reuse(op: str) -> bool:
    """Whether an op of this name could write to an input's memory."""
    return full_name(op) in IN_PLACE or full_name(op) in OUT


def num_reused(before: Body, after: Body) -> int:
    """How many ops of one body write to an input in the other."""
    return sum(a.template is not b.template for a, b in zip(before.ops, after.ops, strict=True))


def reuse_memory(body: Body) -> Body:
    """The body with elementwise ops in place, where their input dies.

    Never where the memory is that of an input or an output of the call, or has views that are read later or by the
    same op; where the result is of another shape, dtype or layout; where it is not known whose memory it is; where a
    redistribution reads it, which may be under way still and would have to be waited for.
    """
    return _Reusing(body).run()


class _Reusing:
    """The state of the pass.

    Attributes:
        last_use: the last op that reads anything of an area of memory.
        own: values that ops made in memory of their own: they begin where it begins, and fill it.
        sent: areas that a redistribution reads.
        name_of: for a value that is another one by now, that.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self._memory = memory = Memory(body)
        self._last_use: dict[int, int] = {}
        for index, op in enumerate(body.ops):
            for value in op.inputs:
                self._last_use[memory.area(value)] = index
        self._own: set[int] = set()
        self._sent = {memory.area(op.inputs[0]) for op in body.ops if transfer_arg(op.template) is not None}
        self._name_of: dict[int, int] = {}
        self._templates: dict[tuple[int, int], TemplateRecord] = {}

    def run(self) -> Body:
        ops: list[BodyOp] = []
        for index, op in enumerate(self._body.ops):
            place = self._place(op, index)
            if place is not None:
                old, new = op.inputs[place], op.outputs[0]
                self._become(old, new)
                op = replace(op, template=self._template(op.template, place), outputs=())
            else:
                views = op.template.views
                if views is not None:
                    self._own.update(v for v, view in zip(op.outputs, views, strict=True) if v and view < 0)
            ops.append(op)
        return self._body.with_ops(
            [
                replace(
                    op, inputs=tuple(map(self._name, op.inputs)), outputs=tuple(map(self._name, op.outputs))
                )
                for op in ops
            ]
        )

    def _place(self, op: BodyOp, index: int) -> int | None:
        """Which input the op can write its result to."""
        template, memory = op.template, self._memory
        if len(op.outputs) != 1 or not op.outputs[0] or template.mutates:
            return None
        for place in template.fits:
            if not (_is_first(template, place) or _is_operand(template, place)):
                continue
            value = op.inputs[place]
            area = memory.area(value)
            if (
                value in self._own
                and area not in self._sent
                and self._last_use.get(area) == index
                and not memory.is_outer(value)
                and all(other == value or memory.area(other) != area for other in op.inputs)
            ):
                return place
        return None

    def _become(self, old: int, new: int) -> None:
        """A value gets another content, under the name of another one."""
        memory = self._memory
        last_use = self._last_use.get(memory.area(new), -1)
        is_sent = memory.area(new) in self._sent
        memory.unite(old, new)
        self._last_use[memory.area(old)] = last_use
        if is_sent:
            self._sent.add(memory.area(old))
        self._own.add(new)
        first = self._name(old)
        if new <= self._body.num_outer:
            self._name_of[first] = new
        else:
            self._name_of[new] = first

    def _name(self, value: int) -> int:
        while (other := self._name_of.get(value)) is not None:
            value = other
        return value

    def _template(self, template: TemplateRecord, place: int) -> TemplateRecord:
        key = (id(template), place)
        found = self._templates.get(key)
        if found is None:
            name = full_name(template.op)
            kwargs: dict[str, Arg] = dict(template.kwargs)
            if _is_first(template, place):
                op = IN_PLACE[name]
            else:
                op, out = OUT[name]
                kwargs[out] = Slot(place)
            found = self._templates[key] = msgspec.structs.replace(
                template,
                template_id=0,
                op=op,
                kwargs=kwargs,
                num_outputs=0,
                mutates=[place],
                views=[],
                fits=[],
            )
        return found


def _is_first(template: TemplateRecord, place: int) -> bool:
    """Whether there is an op that writes the result to an input which is the first argument."""
    return full_name(template.op) in IN_PLACE and template.args[:1] == [Slot(place)]


def _is_operand(template: TemplateRecord, place: int) -> bool:
    """Whether there is an op that writes the result to an argument, and the input is one of two tensors."""
    operands = template.args[:2]
    return (
        full_name(template.op) in OUT
        and all(isinstance(arg, Slot) for arg in operands)
        and Slot(place) in operands
    )
