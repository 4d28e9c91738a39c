"""What an op name means on a worker: a torch operator, or one of our own under ``dtorch::``.

To add a kernel of our own, write a function of local tensors and constants in ``shard_kernels``, and decorate it::

    @kernel("my_op")
    def my_op(x: torch.Tensor, start: int) -> torch.Tensor: ...

A template named ``dtorch::my_op`` calls it with its arguments: inputs as local tensors, ``LocalStart`` as an int,
``LocalShape`` as a list, ``ScalarSlot`` as an int. It returns a new tensor or a
tuple of new ones, and may raise: what it raises is shown to the user as the failure of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.fast_bindings import fast_binding

_Function = TypeVar("_Function", bound=Callable[..., Any])

REDISTRIBUTE = "dtorch::redistribute"
EXCHANGE_ROWS = "dtorch::exchange_rows"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function, and what it returns."""

    function: Callable[..., Any]
    #: Number of returns of the schema, those of mutated inputs included.
    num_returns: int = 1
    #: Whether a return is a list of tensors.
    returns_list: bool = False
    #: Positions of returns that are mutated inputs, which are no outputs.
    mutated_returns: frozenset[int] = frozenset()

    @property
    def returns_one(self) -> bool:
        """Whether what the function returns is the one output itself."""
        return self.num_returns == 1 and not self.returns_list

    def spread(self, result: Any, num_outputs: int) -> Sequence[torch.Tensor | None]:
        """The outputs in what the function returned, in the order of the op record.

        Raises:
            InternalFailure: there are more or fewer than the template says.
        """
        parts = result if self.num_returns > 1 and isinstance(result, tuple) else (result,)
        outputs: list[torch.Tensor | None] = []
        for position, part in enumerate(parts):
            if position in self.mutated_returns:
                continue
            outputs.extend(part) if isinstance(part, list | tuple) else outputs.append(part)
        if len(outputs) != num_outputs:
            outputs = [output for output in outputs if output is not None]
        if len(outputs) != num_outputs:
            raise InternalFailure(
                f"the kernel returned {len(outputs)} tensors, its template says {num_outputs}"
            )
        return outputs


_own: dict[str, Kernel] = {}


def kernel(name: str, *, num_returns: int = 1) -> Callable[[_Function], _Function]:
    """Register a function as ``dtorch::<name>``."""

    def register(function: _Function) -> _Function:
        assert f"dtorch::{name}" not in _own, f"dtorch::{name} has two kernels"
        _own[f"dtorch::{name}"] = Kernel(function, num_returns=num_returns)
        return function

    return register


#: Ops whose kernels conjugate their (first) result by setting its bit, which symbols of it do not have.
_LAZY = frozenset({"aten::_linalg_solve_ex", "aten::linalg_lu_solve"})


def _resolved(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        first: torch.Tensor = result[0] if isinstance(result, tuple) else result
        if first.is_conj():
            torch._C._set_conj(first, False)  # in place, because it may be the tensor given as out=
            first.conj_physical_()
        return result

    return call


@lru_cache(maxsize=4096)
def find_kernel(name: str) -> Kernel:
    """The kernel of ``namespace::name.overload``; without an overload the default one.

    Raises:
        InternalFailure: there is none.
    """
    if name in _own:
        return _own[name]
    namespace, separator, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    if namespace == "dtorch" or not separator:
        raise InternalFailure(f"this worker has no kernel {name}; dtorch has: {', '.join(sorted(_own))}")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise InternalFailure(f"torch {torch.__version__} on this worker has no operator {name}")
    returns = found._schema.returns
    function = fast_binding(found) or found._op
    return Kernel(
        _resolved(function) if found._schema.name in _LAZY else function,
        num_returns=len(returns),
        returns_list=any("[]" in str(item.type) or "List" in str(item.type) for item in returns),
        mutated_returns=frozenset(
            index
            for index, item in enumerate(returns)
            if item.alias_info is not None and item.alias_info.is_write
        ),
    )
