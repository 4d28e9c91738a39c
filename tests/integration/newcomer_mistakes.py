"""What somebody gets wrong who comes from PyTorch on one device, or from PyTorch's DTensor; see ``user_mistakes``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import placement_types as torch_placements

import dtorch
from dtorch import Shard
from tests.integration.user_mistakes import GRID, LINE, PLAIN, Mistake, x

#: Without the types that would refuse the mistakes.
OURS: Any = dtorch
ANY_GRID: Any = GRID
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

#: Keyword arguments that PyTorch's functions have.
KEYWORDS = [
    Mistake(what, program, TypeError, f"keyword argument {given!r}", function, write)
    for what, program, given, function, write in (
        ("device= of ours", lambda: OURS.zeros(2, device="cpu"), "device", "zeros()", "device_mesh="),
        (
            "mesh= of ours",
            lambda: OURS.from_torch(PLAIN, mesh=LINE),
            "mesh",
            "from_torch()",
            "device_mesh=",
        ),
        (
            "a placement= of ours",
            lambda: OURS.rand(2, placement=Shard(0)),
            "placement",
            "rand()",
            "placements=[",
        ),
        ("dtype misspelt", lambda: OURS.ones(2, dtyp=torch.int8), "dtyp", "ones()", "write dtype="),
        (
            "a generator= of ours",
            lambda: OURS.randn(2, generator=None),
            "generator",
            "randn()",
            "manual_seed(n)",
        ),
        ("a nonsense keyword", lambda: OURS.eye(2, zzz=1), "zzz", "eye()", "one of device_mesh, dtype"),
        (
            "async_op=",
            lambda: x(2).redistribute(async_op=True),
            "async_op",
            "redistribute()",
            "is asynchronous",
        ),
        (
            "axes as keywords",
            lambda: x(2).redistribute_by_dict(tp=Shard(0)),
            "tp",
            "takes a dict",
            "redistribute_by_dict({'tp': ...})",
        ),
    )
]

DATA = [
    Mistake(
        "a mesh as a size",
        lambda: OURS.zeros(2, LINE),
        *(TypeError, "DeviceMesh('cpu', [0, 1])", "takes ints", "device_mesh= and placements= by name"),
    ),
    Mistake(
        "a list of tensors",
        lambda: dtorch.tensor([PLAIN, PLAIN]),
        *(ValueError, "got a list of tensors", "numbers and nested lists", "torch.stack(tensors)"),
    ),
    Mistake(
        "like a number",
        lambda: OURS.ones_like(3),
        *(TypeError, "got 3", "ones_like takes a tensor", "dtorch.ones(size)"),
    ),
    Mistake(
        "full of a word",
        lambda: OURS.full((2,), "a"),
        *(TypeError, "got 'a'", "full(fill_value=) takes a number", "write e.g. 1.0"),
    ),
    Mistake(
        "up to a word",
        lambda: OURS.arange("3"),
        *(TypeError, "got '3'", "arange(end=) takes a number", "write e.g. 1.0"),
    ),
    Mistake(
        "half a row",
        lambda: OURS.eye(2.5),
        *(TypeError, "got 2.5", "eye(n=) takes an int", "write e.g. 3"),
    ),
    Mistake(
        "a seed for a state",
        lambda: OURS.set_rng_state(3),
        *(TypeError, "got 3", "what get_rng_state gave", "manual_seed(n)"),
    ),
    Mistake(
        "a format for many numbers",
        lambda: f"{x(3):.2f}",
        *(TypeError, "'.2f'", "for one number", "x.tolist()"),
    ),
    Mistake(
        "a placement of DTensor",
        lambda: x(4).redistribute(placements=[torch_placements.Shard(0)]),
        *(dtorch.PlacementError, "Shard(dim=0) of torch.distributed", "Partial(op)", "[dtorch.Shard(0)]"),
    ),
    Mistake(
        "an axis number in brackets",
        lambda: ANY_GRID[0],
        dtorch.MeshError,
        "got 0",
        "axis names",
        "mesh['dp']",
    ),
    Mistake(
        "a name where there are none",
        lambda: LINE["tp"],
        dtorch.MeshError,
        "'tp'",
        "unnamed",
        "mesh_dim_names=",
    ),
    Mistake(
        "an axis twice in a dict",
        lambda: OURS.zeros(2, device_mesh=GRID).redistribute_by_dict({"dp": Shard(0), 0: Shard(0)}),
        *(dtorch.PlacementError, "0: Shard(dim=0)", "one placement for each axis", "write each axis once"),
    ),
]

CLUSTER = [
    Mistake(
        "a number of devices for an address",
        lambda: OURS.connect(4),
        *(dtorch.SettingError, "got 4", "address takes a string", "devices_per_node=4"),
    ),
    Mistake(
        "gpus of a cluster",
        lambda: OURS.init(num_gpus=2),
        *(TypeError, "'num_gpus'", "init()", "write devices_per_node="),
    ),
    Mistake(
        "a mesh for a graph",
        lambda: OURS.Graph(LINE),
        dtorch.MeshError,
        "[0, 1]",
        "no mesh",
        "device_mesh_guard(mesh)",
    ),
    Mistake(
        "a value not waited for",
        lambda: OURS.Tensor.value(x(3)).numpy(),
        *(AttributeError, "'numpy'", "a value to come", "(await future).numpy or future.get().numpy"),
    ),
    Mistake(
        "a row of what was not waited for",
        lambda: OURS.Tensor.value(x(3))[0],
        *(TypeError, "[0]", "a value to come", "future.get()[...]"),
    ),
]

#: What other libraries call what DTorch has under another name, or has not.
NAMES = [
    Mistake(
        f"the name {name}",
        partial(getattr, dtorch, name),
        AttributeError,
        f"attribute {name!r}",
        "dtorch",
        write,
    )
    for name, write in (
        ("distribute_tensor", "write dtorch.from_torch(t, mesh, placements)"),
        ("DTensor", "dtorch.Tensor"),
        ("all_reduce", "x.redistribute(placements=[Replicate()])"),
        ("init_process_group", "there are no ranks; dtorch.init()"),
        ("fully_shard", "dtorch.parallelize(module, mesh)"),
        ("full_tensor", "x.to_torch()"),
        ("float32", "write torch.float32"),
        ("matmul", "write torch.matmul"),
        ("zero", "did you mean dtorch.zeros?"),
    )
]

#: What kernels say of dtypes, in torch's words, before anything is issued.
KERNELS = [
    Mistake(what, program, error, given, allowed, "write x.to(dtype)")
    for what, program, error, given, allowed in (
        (
            "complex numbers clipped in place",
            lambda: x(4, dtype=torch.complex64).relu_(),
            NotImplementedError,
            "relu_.default got torch.complex64",
            "clamp is not supported for complex types",
        ),
        (
            "the positive part of bools",
            lambda: x(4, at=Shard(0), dtype=torch.bool).relu(),
            RuntimeError,
            "got torch.bool",
            "Boolean inputs not supported for relu",
        ),
        (
            "softmax of many integers",
            lambda: x(400, 4, at=Shard(0), dtype=torch.int64).softmax(1),
            NotImplementedError,
            "got torch.int64",
            "not implemented for 'Long'",
        ),
        (
            "integers with weights of floats",
            lambda: F.conv1d(x(1, 2, 5, dtype=torch.int64), x(3, 2, 3)),
            RuntimeError,
            "got torch.int64, torch.float32",
            "expected scalar type Long but found Float",
        ),
        (
            "floats as classes",
            lambda: F.cross_entropy(x(2, 3), x(2)),
            RuntimeError,
            "got torch.float32, torch.float32",
            "expected target dtype to be Long or Byte",
        ),
        (
            "floats as classes, in pieces",
            lambda: F.cross_entropy(x(2, 3, at=Shard(0)), x(2, at=Shard(0))),
            RuntimeError,
            "got torch.float32, torch.float32",
            "expected target dtype to be Long or Byte",
        ),
        (
            "floats as positions",
            lambda: x(3).index_select(0, x(2)),
            RuntimeError,
            "got torch.float32, torch.float32",
            "Expected dtype int32 or int64 for index",
        ),
        (
            "the order of complex numbers",
            lambda: x(4, dtype=torch.complex64) < x(4, dtype=torch.complex64),
            NotImplementedError,
            "got torch.complex64, torch.complex64",
            "not implemented for 'ComplexFloat'",
        ),
        (
            "the divisors of floats",
            lambda: torch.gcd(x(4), x(4)),
            NotImplementedError,
            "got torch.float32",
            "not implemented for 'Float'",
        ),
        (
            "halves factored",
            lambda: torch.linalg.eigvalsh(x(2, 2, dtype=torch.float16)),
            NotImplementedError,
            "got torch.float16",
            "not implemented for 'Half'",
        ),
    )
]


def _load(location: Any) -> Any:
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, file)
    file.seek(0)
    return torch.load(file, map_location=location)


STORAGES = [
    Mistake(what, program, dtorch.UnsupportedError, given, allowed, write)
    for what, program, given, allowed, write in (
        (
            "a file loaded to the device",
            lambda: _load("dtorch"),
            "map_location='dtorch'",
            "Allowed is map_location='cpu'",
            "then t.to('dtorch')",
        ),
        (
            "a file mapped to the device",
            lambda: _load({"cpu": "dtorch:0"}),
            "map_location='dtorch:0'",
            "Allowed is map_location='cpu'",
            "module.load_state_dict(...)",
        ),
        (
            "bytes on the device",
            lambda: torch.UntypedStorage(8, device="dtorch"),
            "a storage on 'dtorch'",
            "on the workers",
            "dtorch.empty(n, dtype=torch.uint8)",
        ),
        (
            "a copy of a storage",
            lambda: copy.deepcopy(x(2).untyped_storage()),
            "a storage on 'dtorch'",
            "on the workers",
            "x.cpu().untyped_storage()",
        ),
        (
            "the bytes of a storage",
            lambda: x(2).untyped_storage().tolist(),
            "storage",
            "on the workers",
            "x.cpu().untyped_storage()",
        ),
        (
            "memory shared with processes",
            lambda: x(2).share_memory_(),
            "no memory here",
            "other processes",
            "x.cpu().share_memory_()",
        ),
        (
            "a module shared with processes",
            lambda: torch.nn.Linear(2, 2).to("dtorch").share_memory(),
            "no memory here",
            "other processes",
            "dtorch.init(address)",
        ),
    )
]

KERNELS.append(
    Mistake(
        "floats shifted",
        lambda: x(4) << 1,
        *(NotImplementedError, "float32", "only integers and bools have bits", "write x.to(torch.int64)"),
    )
)

NEWCOMERS = [*NOT_STRIDED, *CLUSTER, *DEVICES, *MEMORY, *KEYWORDS, *DATA, *NAMES, *KERNELS, *STORAGES]
