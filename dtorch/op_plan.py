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
class Window:
    """Where a view begins in the memory of input ``index``, in elements of the view.

    ``offset`` counts from the first element of the input, or, when ``is_absolute``, from the start of the memory.
    """

    index: int
    offset: int
    is_absolute: bool = False


@dataclass(frozen=True, slots=True)
class NewOutput:
    """The op makes a value; the user gets a new symbol with this spec. A view shares memory with an input."""

    spec: Spec
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class LaterOutput:
    """The op makes a value of which only the data tells shape and strides; they are in the op's last output.

    None is returned in its place when the op leaves it out.
    """

    layout: Layout


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


Output: TypeAlias = NewOutput | LaterOutput | SameTensor | SameValue | NoOutput


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One call, planned. Depends on the specs and constants of the call only, so it is cached by them.

    ``op`` is None when no worker has anything to do. ``conversions`` are redistributions of inputs that must
    be issued first: (input index, layout it is brought to); strict mode has only those that move no bytes.
    An op with a ``LaterOutput`` makes one more value, its last: the description of all results.
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

    @property
    def is_dynamic(self) -> bool:
        """Whether the op makes a description of its results beside them."""
        return any(isinstance(output, LaterOutput) for output in self.outputs)

    @property
    def num_made(self) -> int:
        """How many values the op makes."""
        made = sum(isinstance(output, NewOutput | LaterOutput) for output in self.outputs)
        return made + self.is_dynamic
