"""What propagation decides about one ATen call, and what dispatch carries out.

The tensors of a call are numbered in order of appearance, positional arguments first, lists flattened; that
number is the ``Slot`` index in ``OpPlan.args`` and the position in the op record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dtorch.spec import Spec
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.wire.records import Arg


@dataclass(frozen=True, slots=True)
class NewOutput:
    """The op makes a value; the user gets a new symbol with this spec."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class SameTensor:
    """The op returns its input ``index`` itself (in-place and ``out=`` variants)."""

    index: int


@dataclass(frozen=True, slots=True)
class SameValue:
    """A new symbol for the value of input ``index`` (``detach``, ``alias``): no work for any worker."""

    index: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class NoOutput:
    """``None`` in this place."""


Output: TypeAlias = NewOutput | SameTensor | SameValue | NoOutput


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One call, planned. Depends on the specs and constants of the call only, so it is cached by them.

    ``op`` is None when no worker has anything to do. ``conversions`` are redistributions of inputs that must
    be issued first: (input index, layout it is brought to); strict mode has only those that move no bytes.
    ``num_seeds`` int64 seeds follow the outputs in the op record. ``returns`` says how outputs are packed.
    """

    op: str | None
    args: tuple[Arg, ...] = ()
    kwargs: Mapping[str, Arg] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    conversions: tuple[tuple[int, Layout], ...] = ()
    outputs: tuple[Output, ...] = ()
    returns: Literal["one", "tuple", "list", "none"] = "one"
    mutates: tuple[int, ...] = ()
    num_seeds: int = 0
