"""Whether kernels take these dtypes, asked of torch's CPU kernel here, once for each op and its dtypes.

Meta kernels do not look at most dtypes, and what a worker says of them comes only with the value. So an op that is new
to the cache is run on zeros: of the same shapes where these are small, else of at most 2 elements a dim. It is refused
only when torch says that the kernel has no code for a dtype, or when the error speaks of dtypes and the same zeros of
other dtypes are taken: then neither shapes nor values are to blame. Nothing else that the kernel says counts, and an op
that nothing can be learnt of goes to the workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import Call, Op
from dtorch.rules.counting import OF_INTEGERS
from dtorch.spec import Spec

#: Tensors, and results, with more elements than this are not made here.
_MAX_ELEMENTS = 256
#: The product of an op's integers, which may be sizes of what it makes, when its tensors are smaller than they are.
_MAX_PRODUCT = 4096
#: Parts of other ops, which trust what these have checked; but for some that are what a user calls.
_INTERNAL = re.compile(
    r"_(?!_|softmax|log_softmax|linalg_|fft_|cdist_forward|pdist_forward)|.*backward|.*(lstm|gru|rnn)|segment_reduce"
)
_TYPES = (
    r"dtypes?|scalar type|types?|[Bb]ool(ean)?|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double|[Cc]omplex\w*|"
    r"[Ii]ntegral|[Ii]ntegers?|floating|u?int\d+|b?float\d+"
)
#: What the dispatch to a dtype says that has no such kernel, whatever the values.
_NO_KERNEL = re.compile(r"\"\w+\" not implemented for '\w+'")
_SPEAKS_OF_DTYPES = re.compile(
    r"(support|handle|expect|must|should|require|valid|can't|cannot|only|got)"
    rf".*\b({_TYPES})\b|\b({_TYPES})\b.*(support|handle|expect|must|should|require|valid|got)",
    re.IGNORECASE | re.DOTALL,
)
#: The dtypes of the first input and of the others that an op which refuses its own may take.
_OTHERS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.int64),
    (torch.int64, torch.int64),
    (torch.bool, torch.bool),
)
#: What was asked, by op, dtypes and other constants, and did not fail for its dtypes.
_taken: set[tuple[Any, ...]] = set()


def refuse_dtypes(call: Call, plan: OpPlan) -> bool:
    """Refuse a planned call whose kernel does not take its dtypes, as the kernel would.

    Returns:
        Whether the same call on tensors of other sizes need not be asked about: not when these were too many to try.

    Raises:
        RuntimeError, NotImplementedError, TypeError, ValueError: as torch raises it.
    """
    if not _can_ask(call, plan):
        return all(0 not in spec.shape for spec in call.inputs)
    dtypes = tuple(spec.dtype for spec in call.inputs)
    key = (call.op, dtypes, *_constants(call))
    if key in _taken:
        return True
    is_small = _is_small(call, plan)
    if not is_small and _product(call) > _MAX_PRODUCT:
        return False
    error = _ask(call, dtypes, is_small)
    advice = _advice(call, error, is_small) if error is not None else ""
    if error is None or not advice:
        _taken.add(key)
        return True
    first_line = str(error).partition("\n")[0]
    raise type(error)(f"{first_line}. {call.op.name} got {_names(dtypes)}; write {advice}")


def _can_ask(call: Call, plan: OpPlan) -> bool:
    op = call.op
    return (
        plan.op not in (None, OF_INTEGERS)
        and call.mesh is not None
        and call.mesh.device_type == "cpu"
        and not (op.is_view or op.is_random or plan.num_seeds)
        and not _is_internal(op)
        and all(0 not in spec.shape for spec in call.inputs)
    )


def _is_internal(op: Op) -> bool:
    return op.func.namespace != "aten" or _INTERNAL.match(op.base.removeprefix("aten::")) is not None


def _constants(call: Call) -> Iterator[Any]:
    """What decides beside dtypes which kernel runs: not the sizes, which are new in every step of a loop."""
    for value in (*call.args, *call.kwargs.items()):
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
            yield value[0]
            value = value[1]
        yield value if type(value) in (bool, str, torch.dtype) else type(value)


def _is_small(call: Call, plan: OpPlan) -> bool:
    made = [output.spec for output in plan.outputs if isinstance(output, NewOutput)]
    return sum(math.prod(spec.shape) for spec in (*call.inputs, *made)) <= _MAX_ELEMENTS


def _product(call: Call) -> int:
    product = 1
    stack: list[Any] = [*call.args, *call.kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack.extend(value)
        elif type(value) is int:
            product *= max(1, abs(value))
    return product


def _ask(call: Call, dtypes: Sequence[torch.dtype], is_small: bool) -> Exception | None:
    """The error of the kernel on zeros of these dtypes; None where there is none."""
    remaining = iter(dtypes)
    args = [_zeros(value, remaining, is_small) for value in call.args]
    kwargs = {name: _zeros(value, remaining, is_small) for name, value in call.kwargs.items()}
    kwargs.pop("pin_memory", None)
    try:
        with torch.no_grad():
            call.op.func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    except Exception:  # noqa: BLE001  a warning that the user made an error, an index: of these zeros, not of the call
        return None
    return None


def _zeros(value: Any, dtypes: Iterator[torch.dtype], is_small: bool) -> Any:
    kind = type(value)
    if kind is Spec:
        shape = value.shape if is_small else [min(size, 2) for size in value.shape]
        return torch.zeros(shape, dtype=next(dtypes), device="cpu")
    if kind is list or kind is tuple:
        return [_zeros(item, dtypes, is_small) for item in value]
    if kind is torch.device:
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _advice(call: Call, error: Exception, is_small: bool) -> str:
    """What to write when dtypes are to blame for an error; empty when they may not be."""
    if type(error) not in (RuntimeError, NotImplementedError, TypeError, ValueError):
        return ""
    has_kernel = _NO_KERNEL.search(str(error)) is None
    if has_kernel and _SPEAKS_OF_DTYPES.search(str(error)) is None:
        return ""
    for first, others in _OTHERS:
        dtypes = [first] + [others] * (len(call.inputs) - 1)
        if _ask(call, dtypes, is_small) is None:
            return f"x.to(dtype): its kernel takes {_names(dtypes)}, for example"
    return "" if has_kernel else "x.to(dtype) with a dtype that its kernel takes"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
