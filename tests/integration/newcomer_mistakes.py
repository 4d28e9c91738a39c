"""What somebody gets wrong who comes from PyTorch on one device, or from PyTorch's DTensor; see ``user_mistakes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dtorch
from tests.integration.user_mistakes import Mistake, x

NESTED = ([torch.zeros(2), torch.zeros(3)],)

#: Tensors of kinds whose pieces no device could hold: what is called, the kind, what to write.
NOT_STRIDED = [
    Mistake(what, program, dtorch.UnsupportedError, given, "tensors are strided", write)
    for what, program, given, write in (
        ("a tensor of oneDNN", lambda: x(4, 4).to_mkldnn(), "to_mkldnn is for", "x, without to_mkldnn()"),
        (
            "sparse zeros",
            lambda: torch.zeros(2, layout=torch.sparse_coo, device="dtorch"),
            "empty is for a tensor that is sparse",
            "to_dense()",
        ),
        (
            "an empty sparse matrix",
            lambda: torch.empty(2, 2, layout=torch.sparse_csr, device="dtorch"),
            "sparse_csr",
            "to_dense()",
        ),
        (
            "indices and values",
            lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="dtorch"),
            "sparse_coo",
            "to_dense()",
        ),
        (
            "indices and values on the device",
            lambda: torch.sparse_coo_tensor(x(2, 1, dtype=torch.int64), x(1), (2, 2)),
            "sparse_coo",
            "to_dense()",
        ),
        (
            "compressed rows",
            lambda: torch.sparse_csr_tensor(x(3, dtype=torch.int64), x(1, dtype=torch.int64), x(1), (2, 2)),
            "sparse_csr",
            "to_dense()",
        ),
        (
            "a sparse tensor sent",
            lambda: torch.eye(3).to_sparse().to("dtorch"),
            "sparse_coo",
            "t.to_dense().to('dtorch')",
        ),
        (
            "compressed rows sent",
            lambda: torch.eye(3).to_sparse_csr().to("dtorch"),
            "sparse_csr",
            "t.to_dense().to('dtorch')",
        ),
        (
            "a quantized tensor sent",
            lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8).to("dtorch"),
            "quantized",
            "t.dequantize().to('dtorch')",
        ),
        (
            "zeros of a quantized dtype",
            lambda: torch.zeros(2, dtype=torch.qint8, device="dtorch"),
            "quantized",
            "x.to(torch.int8)",
        ),
        (
            "a nested tensor sent",
            lambda: torch.nested.nested_tensor(*NESTED).to("dtorch"),
            "nested",
            "layout=torch.jagged).to('dtorch')",
        ),
        (
            "a nested tensor of pieces",
            lambda: torch.nested.nested_tensor([x(2), x(3)]),
            "nested",
            "with the parts on the CPU",
        ),
        (
            "a jagged tensor of pieces",
            lambda: torch.nested.as_nested_tensor([x(2), x(3)], layout=torch.jagged),
            "_nested_view_from_jagged",
            "with the parts on the CPU",
        ),
    )
] + [
    Mistake(
        "a sparse layout like another's",
        lambda: torch.zeros_like(x(2), layout=torch.sparse_coo),
        *(dtorch.UnsupportedError, "layout=torch.sparse_coo", "are strided", "leave layout= out"),
    ),
    Mistake(
        "a sparse factor",
        lambda: torch.eye(3).to_sparse() @ x(3, 3),
        *(
            dtorch.MixedTensorError,
            "it is sparse_coo",
            "Only 0-dim CPU tensors mix",
            "t.to_dense().to('dtorch')",
        ),
    ),
]

_INDEXED: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("zeros on the fifth device", lambda: torch.zeros(2, device="dtorch:5")),
    ("numbers on the fifth device", lambda: torch.tensor([1.0], device="dtorch:5")),
    ("like another on the fifth device", lambda: torch.zeros_like(x(2), device="dtorch:5")),
    ("random numbers on the fifth device", lambda: torch.randn(2, device="dtorch:5")),
    ("a tensor sent to the fifth device", lambda: torch.zeros(2).to("dtorch:5")),
    ("a tensor moved to the fifth device", lambda: x(2).to("dtorch:5")),
    ("a module on the fifth device", lambda: torch.nn.Linear(2, 2).to("dtorch:5")),
    ("the fifth device as the current one", lambda: torch.dtorch.set_device(5)),  # type: ignore[attr-defined]
)
DEVICES = [
    Mistake(
        what, program, dtorch.MeshError, "device='dtorch:5'", "the whole cluster", "DeviceMesh('cpu', [5])"
    )
    for what, program in _INDEXED
]

_OUTSIDE: tuple[tuple[str, Callable[[], Any], str, str], ...] = (
    ("steps beyond the memory", lambda: x(4).as_strided((4,), (2,)), "strides [2]", "size 16"),
    ("an offset beyond the memory", lambda: x(4).as_strided((4,), (1,), 3), "storage offset 3", "size 16"),
    ("a view's steps beyond the memory", lambda: x(4)[2:].as_strided((3,), (1,)), "offset 2", "size 16"),
    ("steps beyond it in place", lambda: x(4).as_strided_((2, 4), (3, 1)), "sizes [2, 4]", "size 16"),
    ("steps beyond a result", lambda: (x(6) + 1)[1:].as_strided((6,), (1,)), "sizes [6]", "size 24"),
)
MEMORY = [
    Mistake(what, program, RuntimeError, given, allowed, "write sizes and strides that end within them")
    for what, program, given, allowed in _OUTSIDE
]

NEWCOMERS = [*NOT_STRIDED, *DEVICES, *MEMORY]
