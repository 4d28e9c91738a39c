"""Runs passes over the body of a template."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import msgspec

from dtorch_runtime.ir.body import REPEATED, parse_body
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.passes.body import Body, read_body, write_body
from dtorch_runtime.passes.bucket import fill_buckets, num_joined
from dtorch_runtime.passes.common import share_common
from dtorch_runtime.passes.dead import remove_dead
from dtorch_runtime.passes.redistribute import fuse_redistributes, num_fused
from dtorch_runtime.passes.regions import form_regions, num_compiled
from dtorch_runtime.passes.reorder import num_moved, reorder_transfers
from dtorch_runtime.passes.reuse import num_reused, reuse_memory
from dtorch_runtime.wire.records import TemplateRecord


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass.

    Attributes:
        run: what it does.
        verb: what it has done to the ops that ``count`` counts, as it is told.
        count: how many those are, given a body before and after.
        repeats: whether it runs again after the ones behind it, which make work for it.
        is_exact: whether it leaves every bit of the results as it is.
    """

    run: Callable[[Body], Body]
    verb: str
    count: Callable[[Body, Body], int]
    repeats: bool
    is_exact: bool = True


def _num_fewer(before: Body, after: Body) -> int:
    return len(before.ops) - len(after.ops)


#: By their names in ``Settings.passes``, in the order in which they run.
PASSES: Final[Mapping[str, Pass]] = {
    "dead": Pass(remove_dead, "removed", _num_fewer, repeats=True),
    "common": Pass(share_common, "removed", _num_fewer, repeats=True),
    "redistribute": Pass(fuse_redistributes, "removed", num_fused, repeats=True),
    "bucket": Pass(fill_buckets, "joined", num_joined, repeats=False),
    "reorder": Pass(reorder_transfers, "moved", num_moved, repeats=False),
    "compile": Pass(form_regions, "joined", num_compiled, repeats=False, is_exact=False),
    "reuse": Pass(reuse_memory, "changed", num_reused, repeats=False),
}
#: Ids of templates that passes make begin here; those of clients are below.
FIRST_OWN_ID: Final = 1 << 40
#: One pass makes work for another; more than this was never needed.
_MAX_ROUNDS: Final = 3


class OwnTemplates:
    """The templates that passes have made for one session; each once."""

    def __init__(self) -> None:
        self._known: dict[bytes, TemplateRecord] = {}

    def numbered(self, template: TemplateRecord) -> TemplateRecord:
        """The template with an id of its own, which it keeps; ``template_id`` is 0."""
        key = msgspec.msgpack.encode(template)
        found = self._known.get(key)
        if found is None:
            number = FIRST_OWN_ID + len(self._known)
            found = self._known[key] = msgspec.structs.replace(template, template_id=number)
        return found


@dataclass(slots=True)
class Rewritten:
    """A template with a new body.

    Attributes:
        made: the templates that the body names and that passes made.
        num_changed: how many ops each pass has removed, or changed in its way.
    """

    record: TemplateRecord
    made: list[TemplateRecord] = field(default_factory=list)
    num_changed: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name} {PASSES[name].verb} {count}" for name, count in self.num_changed.items())


def rewrite(
    record: TemplateRecord,
    templates: Mapping[int, TemplateRecord],
    meshes: Mapping[int, DeviceMesh],
    passes: Sequence[str],
    own: OwnTemplates,
    *,
    node_of: Mapping[int, Hashable] = MappingProxyType({}),
    check: bool = False,
) -> Rewritten:
    """Run passes over a template with a body. Its inputs, outputs and scalars stay as they are.

    What an eager program repeats is not run over by passes that are not exact.

    Args:
        record: the template.
        templates: those that its body names.
        meshes: those that these name.
        node_of: the node of each device, as far as that is known.
        passes: names in ``PASSES``; their order does not matter.
        check: whether to check the body after each pass.

    Raises:
        GraphError: the body cannot be.
    """
    body = read_body(record, templates, meshes, node_of)
    num_changed = {
        name: 0
        for name, known in PASSES.items()
        if name in passes and (known.is_exact or record.op != REPEATED)
    }

    def run(name: str) -> None:
        nonlocal body
        before, body = body, PASSES[name].run(body)
        num_changed[name] += PASSES[name].count(before, body)
        if check:
            _check(body, templates)

    for _ in range(_MAX_ROUNDS):
        before = body
        for name in num_changed:
            if PASSES[name].repeats:
                run(name)
        if body == before:
            break
    for name in num_changed:
        if not PASSES[name].repeats:
            run(name)
    body, made = _numbered(body, own)
    return Rewritten(write_body(body), made, num_changed)


def _numbered(body: Body, own: OwnTemplates) -> tuple[Body, list[TemplateRecord]]:
    ops = [
        op if op.template.template_id else replace(op, template=own.numbered(op.template)) for op in body.ops
    ]
    made = {op.template.template_id: op.template for op in ops if op.template.template_id >= FIRST_OWN_ID}
    return body.with_ops(ops), list(made.values())


def _check(body: Body, templates: Mapping[int, TemplateRecord]) -> None:
    numbered, made = _numbered(body, OwnTemplates())
    parse_body(write_body(numbered), {**templates, **{record.template_id: record for record in made}})
