"""What users get wrong with plain tensors, data, torch itself and settings; see ``user_mistakes``."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Settings, Shard
from tests.integration.user_mistakes import GRID, LINE, MESHES, OPS, PLACEMENTS, PLAIN, Mistake, leaf, x

MIXED_WRITE = "t.to('dtorch')"
MIXED = [
    Mistake(what, program, dtorch.MixedTensorError, given, "Only 0-dim CPU tensors mix", MIXED_WRITE)
    for what, program, given in (
        ("a plain tensor", lambda: x(2) + PLAIN, "plain tensor of shape [2]"),
        ("a plain tensor on the left", lambda: PLAIN + x(2), "plain tensor of shape [2]"),
        ("a plain target", lambda: torch.zeros(2).add_(x(2)), "add_.Tensor got a plain tensor"),
        ("plain weights", lambda: F.linear(x(2, 3), torch.zeros(4, 3)), "shape [4, 3]"),
        ("a plain module", lambda: nn.Linear(3, 4)(x(2, 3)), "linear.default"),
        ("a plain one in a list", lambda: torch.cat([x(2), PLAIN]), "cat.default"),
        ("a plain choice", lambda: torch.where(x(2) > 0, PLAIN, x(2)), "where.self"),
        ("plain targets of a loss", lambda: F.mse_loss(x(2), PLAIN), "mse_loss.default"),
    )
] + [
    Mistake(
        "plain data",
        lambda: setattr(x(2), "data", PLAIN),
        dtorch.MixedTensorError,
        "on cpu",
        "another dtorch tensor",
        MIXED_WRITE,
    ),
    Mistake(
        "a plain source",
        lambda: x(2).set_(PLAIN),
        dtorch.MixedTensorError,
        "on cpu",
        "another dtorch tensor",
        MIXED_WRITE,
    ),
    Mistake(
        "a plain gradient",
        lambda: setattr(leaf(2), "grad", PLAIN),
        RuntimeError,
        "'cpu'",
        "'dtorch'",
        "same device",
    ),
]

DATA = [
    Mistake(
        "a seed that is no number",
        lambda: dtorch.manual_seed("x"),  # type: ignore[arg-type]
        *(TypeError, "got 'x'", "an integer", "dtorch.manual_seed(0)"),
    ),
    Mistake(
        "a list",
        lambda: dtorch.from_torch([1]),
        TypeError,
        "got list",
        "a torch.Tensor",
        "dtorch.tensor(data)",
    ),
    Mistake(
        "an array",
        lambda: dtorch.from_torch(np.zeros(3)),
        TypeError,
        "ndarray",
        "a torch.Tensor",
        "torch.from_numpy",
    ),
    Mistake(
        "a sparse tensor",
        lambda: dtorch.from_torch(torch.eye(3).to_sparse()),
        *(dtorch.UnsupportedError, "torch.sparse_coo", "a strided tensor", "t.to_dense()"),
    ),
    Mistake(
        "a sparse result",
        lambda: x(3, 3).to_sparse(),
        dtorch.UnsupportedError,
        "sparse",
        "no placements",
        "x.cpu().to_sparse()",
    ),
    Mistake(
        "a quantized dtype",
        lambda: torch.quantize_per_tensor(x(3), 0.1, 0, torch.qint8),
        *(dtorch.UnsupportedError, "torch.qint8", "plain tensors", "x.to(torch.int8)"),
    ),
    Mistake(
        "a tensor without data",
        lambda: dtorch.from_torch(torch.zeros(3, device="meta")),
        *(dtorch.UnsupportedError, "on meta", "a tensor with data", "dtorch.empty_like(t)"),
    ),
    Mistake(
        "a dtorch tensor with a dim that it lacks",
        lambda: dtorch.from_torch(x(3), device_mesh=LINE, placements=[Shard(2)]),
        *(dtorch.PlacementError, "Shard(dim=2)", "1 dims", "a dim from -1 to 0"),
    ),
    Mistake(
        "the class as a factory",
        lambda: dtorch.Tensor([1, 2]),
        *(dtorch.UnsupportedError, "dtorch.Tensor(...)", "not called", "dtorch.tensor(data)"),
    ),
    Mistake(
        "a dtype by name",
        lambda: dtorch.zeros(2, dtype="float32"),
        TypeError,
        "'float32'",
        "a torch.dtype",
        "torch.float32",
    ),
    Mistake("a string for a size", lambda: dtorch.zeros("3"), TypeError, "'3'", "ints", "(2, 3)"),
    Mistake("a float for a size", lambda: dtorch.zeros(2.5), TypeError, "2.5", "ints", "(2, 3)"),
    Mistake("a negative size", lambda: dtorch.zeros(-1), RuntimeError, "-1", "negative dimension", "[-1]"),
    Mistake(
        "more than there is",
        lambda: dtorch.zeros(2**62, 4),
        RuntimeError,
        "4611686018427387904, 4",
        "2**63",
        "smaller sizes",
    ),
    Mistake(
        "a size of 70 bits", lambda: dtorch.zeros(2**70), RuntimeError, str(2**70), "2**63", "smaller sizes"
    ),
    Mistake(
        "a huge view",
        lambda: x(1).expand(2**62, 4),
        RuntimeError,
        "4611686018427387904",
        "2**63",
        "smaller sizes",
    ),
    Mistake(
        "gradients of integers",
        lambda: x(2, dtype=torch.int64).requires_grad_(),
        RuntimeError,
        "Tensors",
        "floating point",
        "require gradients",
    ),
    Mistake(
        "one bound, no size",
        lambda: dtorch.randint(3),
        TypeError,
        "randint",
        "(high, size)",
        "(low, high, size)",
    ),
    Mistake(
        "no address",
        lambda: x(3).data_ptr(),
        dtorch.UnsupportedError,
        "no address",
        "on the workers",
        "x.cpu()",
    ),
    Mistake(
        "no memory to share",
        lambda: np.from_dlpack(x(3)),
        dtorch.UnsupportedError,
        "no memory here",
        "share",
        "x.cpu()",
    ),
    Mistake(
        "a storage for a tensor",
        lambda: x(3).set_(PLAIN.untyped_storage()),
        *(dtorch.UnsupportedError, "x.set_(storage)", "Allowed is a tensor", "x.set_(y)"),
    ),
    Mistake(
        "a view changed under autograd",
        lambda: (leaf(2, 3) * 1)[0:1].t_(),
        *(dtorch.UnsupportedError, "t_()", "a tensor that is no view", "x = x.t("),
    ),
]

DATA.append(
    Mistake(
        "an offset within a view, with gradients",
        lambda: (leaf(4, 6) * 1)[1].as_strided((2, 2), (1, 2), 8),
        *(dtorch.UnsupportedError, "element 6", "begin at element 0", "base.as_strided("),
    )
)

TORCH = [
    Mistake(
        "factors that do not fit",
        lambda: x(4, 6) @ x(4, 6),
        RuntimeError,
        "[4, 6] X [4, 6]",
        "same reduction dim",
        "must have",
    ),
    Mistake("shapes that do not broadcast", lambda: x(3) + x(4), RuntimeError, "[4]", "[3]", "broadcastable"),
    Mistake(
        "a view of another size", lambda: x(4, 6).view(5, 5), RuntimeError, "[5, 5]", "size 24", "invalid"
    ),
    Mistake(
        "rows of other lengths",
        lambda: torch.cat([x(4, 6), x(4, 5)]),
        RuntimeError,
        "got 5",
        "Expected 6",
        "must match",
    ),
    Mistake("an index out of range", lambda: x(4, 6)[9], IndexError, "index 9", "size 4", "out of bounds"),
    Mistake(
        "a dim out of range", lambda: x(4, 6).sum(5), IndexError, "got 5", "[-2, 1]", "Dimension out of range"
    ),
    Mistake(
        "softmax along no dim",
        lambda: x(4, 6).softmax(3),
        IndexError,
        "got 3",
        "[-2, 1]",
        "Dimension out of range",
    ),
    Mistake(
        "other dtypes",
        lambda: x(4, 6) @ x(6, 2, dtype=torch.float64),
        RuntimeError,
        "float != double",
        "same dtype",
        "y.to(x.dtype)",
    ),
    Mistake(
        "bits of floats",
        lambda: x(4) & x(4),
        NotImplementedError,
        "float32",
        "integers and bools",
        "x.to(torch.int64)",
    ),
    Mistake(
        "floats as indices",
        lambda: F.embedding(x(4), x(5, 3)),
        RuntimeError,
        "torch.float32",
        "Long, Int",
        "indices.long()",
    ),
    Mistake(
        "the mean of integers",
        lambda: x(4, dtype=torch.int64).mean(),
        RuntimeError,
        "torch.int64",
        "floating point or complex",
        "mean()",
    ),
    Mistake(
        "an item of many", lambda: x(3).item(), RuntimeError, "3 elements", "cannot be converted", "Scalar"
    ),
    Mistake(
        "backward of many",
        lambda: (leaf(3) * 2).backward(),
        RuntimeError,
        "grad",
        "scalar outputs",
        "implicitly created only",
    ),
    Mistake(
        "a write to a leaf",
        lambda: leaf(3).add_(1),
        RuntimeError,
        "leaf Variable",
        "requires grad",
        "in-place operation",
    ),
    Mistake(
        "numpy with gradients",
        lambda: leaf(3).numpy(),
        RuntimeError,
        "requires grad",
        "NumPy knows no gradients",
        "x.detach().numpy()",
    ),
    Mistake(
        "a write to an expanded tensor",
        lambda: x(3, 1).expand(3, 4).add_(1),
        RuntimeError,
        "[3, 4]",
        "single memory location",
        "clone()",
    ),
    Mistake(
        "a write across itself",
        lambda: (lambda a: a[1:].add_(a[:-1]))(x(4)),
        RuntimeError,
        "add_",
        "single memory location",
        "clone()",
    ),
    Mistake(
        "a copy of a result",
        lambda: copy.deepcopy(leaf(3) * 2),
        RuntimeError,
        "Only Tensors created",
        "graph leaves",
        "x.detach()",
    ),
]

SETTINGS = [
    Mistake(
        "a word for a number",
        lambda: Settings.from_environment({"DTORCH_NUM_THREADS": "many"}),
        *(dtorch.SettingError, "'many'", "type int", "DTORCH_NUM_THREADS"),
    ),
    Mistake(
        "a negative time",
        lambda: Settings(wait_timeout_s=-1),
        dtorch.SettingError,
        "-1",
        "positive float",
        "wait_timeout_s",
    ),
    Mistake(
        "a string for a count",
        lambda: Settings(batch_ops="x"),
        dtorch.SettingError,
        "'x'",
        "positive int",
        "batch_ops",
    ),
    Mistake(
        "an address without a key",
        lambda: dtorch.connect("nonsense").__enter__(),
        dtorch.SettingError,
        "key",
        "joining a cluster",
        "DTORCH_SESSION_KEY",
    ),
    Mistake(
        "connect without with",
        lambda: dtorch.connect("tcp://h:1").devices,
        dtorch.SettingError,
        "connect()",
        "is used as",
        "with dtorch.connect(",
    ),
    Mistake(
        "a word for a time",
        lambda: x(3).value().get(timeout_s="x"),
        dtorch.SettingError,
        "'x'",
        "a number of seconds",
        "10.0",
    ),
    Mistake(
        "no callback",
        lambda: x(3).value().add_done_callback(3),
        dtorch.SettingError,
        "got 3",
        "a function",
        "lambda future",
    ),
    Mistake(
        "no model",
        lambda: dtorch.parallelize(3, LINE),  # type: ignore[type-var]  # what is refused
        dtorch.SettingError,
        "int",
        "torch.nn.Module",
        "parallelize()",
    ),
    Mistake(
        "no mesh",
        lambda: dtorch.parallelize(nn.Linear(2, 2), "cpu"),
        dtorch.SettingError,
        "str",
        "a mesh",
        "dtorch.init_device_mesh(",
    ),
    Mistake(
        "no plan",
        lambda: dtorch.parallelize(nn.Linear(2, 2), GRID, plan="best"),
        dtorch.SettingError,
        "'best'",
        "'auto', 'search' or a dict",
        "'colwise'",
    ),
]

ALL = [*MESHES, *PLACEMENTS, *OPS, *MIXED, *DATA, *TORCH, *SETTINGS]
