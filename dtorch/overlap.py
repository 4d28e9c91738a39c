"""Torch refuses to write to a tensor whose elements share memory; the client knows from the strides that they do."""

from __future__ import annotations

from dtorch.rules.call import Call

#: Those that torch lets write to expanded tensors.
_ALLOWED = frozenset(
    {
        "aten::fill_",
        "aten::zero_",
        "aten::masked_fill_",
        "aten::index_fill_",
        "aten::index_put_",
        "aten::_index_put_impl_",
    }
)


def refuse_overlap(call: Call) -> None:
    """Check the tensors that a call writes to.

    Raises:
        RuntimeError: one of them is expanded, as torch raises it.
    """
    if call.op.base in _ALLOWED:
        return
    for index in call.written:
        spec = call.inputs[index]
        if any(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True)):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
