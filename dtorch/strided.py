"""DTorch's tensors are strided: of a sparse, mkldnn, quantized or nested one no device could hold a piece.

Meta kernels tell most results that are not; those of ``NAMES`` they take for strided ones, or they cannot run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dtorch_runtime.errors import UnsupportedError

#: Dispatch keys of tensors on the device that would not be strided, with what they are.
BACKENDS = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse_csr",
    "QuantizedPrivateUse1": "quantized",
    "NestedTensorPrivateUse1": "nested",
}
#: Ops that make such tensors, by the start of their names.
NAMES = {
    "_to_sparse": "sparse",
    "sparse_coo_tensor": "sparse_coo",
    "_sparse_coo_tensor": "sparse_coo",
    "sparse_compressed_tensor": "sparse_csr",
    "_sparse_compressed_tensor": "sparse_csr",
    "to_mkldnn": "mkldnn",
    "mkldnn_reorder": "mkldnn",
    "_mkldnn": "mkldnn",
    "_make_per_": "quantized",
    "_empty_affine_quantized": "quantized",
    "_empty_per_channel": "quantized",
    "empty_quantized": "quantized",
    "_nested_": "nested",
}
_WRITE = {
    "mkldnn": "x, without to_mkldnn(): the kernels of CPU devices choose oneDNN by themselves; or fetch it first: "
    "x.cpu().to_mkldnn()",
    "quantized": "x.to(torch.int8) for integers, t.dequantize().to('dtorch') for one that exists; or fetch it first: "
    "x.cpu()",
    "nested": "torch.nested.nested_tensor(parts, layout=torch.jagged).to('dtorch') with the parts on the CPU, or "
    "t.to_padded_tensor(0).to('dtorch') for one that exists; or fetch the parts first: x.cpu()",
}
_WRITE_SPARSE = (
    "t.to_dense().to('dtorch') for one that exists, sparse=False where the op has it; or fetch the strided tensor "
    "first: x.cpu().to_sparse()"
)


def not_strided(op: str, kind: str) -> UnsupportedError:
    """The error for an op that makes or reads a tensor of a kind of ``BACKENDS`` or ``NAMES``."""
    return UnsupportedError(
        f"{op} is for a tensor that is {kind}, which has no placements: DTorch's tensors are strided. Write "
        f"{_WRITE.get(kind, _WRITE_SPARSE)}"
    )


@cache
def kind_made_by(func: Any) -> str:
    """What kind of ``NAMES`` an overload makes; empty for the others."""
    name = func._schema.name.removeprefix("aten::")
    return next((kind for start, kind in NAMES.items() if name.startswith(start)), "")


def check_strided(op: str, result: Any) -> None:
    """Refuse a result, or results, without elements in rows.

    Raises:
        UnsupportedError: it is sparse, quantized or nested.
    """
    for item in result if isinstance(result, list | tuple) else (result,):
        if isinstance(item, torch.Tensor):
            kind = kind_of(item)
            if kind:
                raise not_strided(op, kind)


def kind_of(tensor: torch.Tensor) -> str:
    """What a tensor is instead of strided; empty for a strided one."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").removeprefix("_")
    return "quantized" if tensor.is_quantized else ""
