"""The probe of dtypes refuses nothing that torch takes: every call of PyTorch's operator database, at both sizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch import DeviceMesh, probe
from dtorch.op_plan import NewOutput, OpPlan
from dtorch.rules.call import Call, op_of
from dtorch.rules.whole import replicated
from dtorch.spec import intern_spec

WHOLE = replicated(DeviceMesh("cpu", [0]))
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)
#: Every so many entries of the database, from a different first one for each dtype.
STEP = 23
NUM_SAMPLES = 2
#: A result so large that the tensors are not made as they are.
LARGE = OpPlan(
    op=None, layouts=(), outputs=(NewOutput(intern_spec((probe._MAX_ELEMENTS + 1,), torch.float32, WHOLE)),)
)


def _spec_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return intern_spec(tuple(value.shape), value.dtype, WHOLE, tuple(value.stride()))
    if type(value) in (list, tuple):
        return type(value)(map(_spec_of, value))
    return value


class _Probing(TorchDispatchMode):
    """Probes each op that torch has run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_probed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = Call(
            op_of(func), _spec_of(tuple(args)), {name: _spec_of(value) for name, value in kwargs.items()}
        )
        result = func(*args, **kwargs)
        if call.inputs:
            for outputs in ((), LARGE.outputs):
                probe._taken.clear()
                probe.refuse_dtypes(call, OpPlan(op=call.op.name, layouts=(), outputs=outputs))
                self.num_probed += 1
        return result


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    samples = op.sample_inputs("cpu", dtype)
    for sample, _ in zip(samples, range(NUM_SAMPLES), strict=False):
        yield sample


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_torch_takes_is_not_refused(dtype: torch.dtype) -> None:
    entries = [op for op in op_db if not op.name.startswith("jiterator")]  # these run on GPUs only
    ops = [op for op in entries[DTYPES.index(dtype) :: STEP] if dtype in op.supported_dtypes("cpu")]
    probing = _Probing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops:
            for sample in _samples(op, dtype):
                with probing:
                    op(sample.input, *sample.args, **sample.kwargs)
    assert probing.num_probed > 10


@pytest.mark.parametrize("shape", [(2, 3), (400, 3)], ids=str)
def test_what_torch_refuses_for_its_dtype_is(shape: tuple[int, ...]) -> None:
    spec = intern_spec(shape, torch.int64, WHOLE)
    call = Call(op_of(torch.ops.aten.gelu.default), (spec,), {})
    plan = OpPlan(op=call.op.name, layouts=(WHOLE,), outputs=(NewOutput(spec),))
    with pytest.raises(NotImplementedError, match=r"'Long'.*got torch\.int64; write x\.to\(dtype\)"):
        probe.refuse_dtypes(call, plan)


@pytest.mark.parametrize(
    ("func", "shape", "dtype"),
    [
        (torch.ops.aten.linalg_cholesky_ex.default, (2, 2), torch.float32),  # zeros have no factors
        (torch.ops.aten.gelu.default, (0,), torch.int64),  # no elements, no kernel
    ],
)
def test_values_and_empty_tensors_are_not_to_blame(
    func: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    spec = intern_spec(shape, dtype, WHOLE)
    call = Call(op_of(func), (spec,), {})
    probe.refuse_dtypes(call, OpPlan(op=call.op.name, layouts=(WHOLE,), outputs=(NewOutput(spec),)))


def test_generators_of_this_process_are_not_drawn_from() -> None:
    spec = intern_spec((3,), torch.float32, WHOLE)
    call = Call(op_of(torch.ops.aten.bernoulli.default), (spec,), {})
    before = torch.get_rng_state()
    probe.refuse_dtypes(call, OpPlan(op=call.op.name, layouts=(WHOLE,), outputs=(NewOutput(spec),)))
    assert torch.equal(torch.get_rng_state(), before)
