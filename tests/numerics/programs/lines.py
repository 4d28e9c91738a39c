"""What random programs are made of: tables of lines of code, by what they do.

A line is a function of a ``Draft``, which picks variables and numbers. Values are small whole numbers as long as only
lines of ``EXACT`` and ``SHARP`` made them, so that sums in any order are equal to the last bit. ``SHARP`` lines jump
where their input hardly changes, so they take such values only; after a line of ``ROUGH`` values are compared with a
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tests.numerics.programs.draft import Draft

Line: TypeAlias = Callable[[Draft], str | tuple[int, str]]


def sizes(d: Draft, x: str) -> str:
    """Another shape of as many elements, maybe with a -1."""
    return str(d.other_shape(x))


#: Several results: (how many, the expression).
EXACT: dict[str, Line] = {
    "add": lambda d: f"{(x := d.number())} + {d.fits(x)}",
    "sub_alpha": lambda d: f"torch.sub({(x := d.number())}, {d.fits(x, same_kind=True)}, alpha={d.small()})",
    "rsub": lambda d: f"{d.small()} - {d.number()}",
    "mul": lambda d: f"{(x := d.number())} * {d.fits(x)}",
    "scale": lambda d: f"{d.number()} * {d.small()}",
    "neg": lambda d: f"-{d.number()}",
    "abs": lambda d: f"{d.real()}.abs()",
    "relu": lambda d: f"F.relu({d.real()})",
    "clamp": lambda d: f"{d.real()}.clamp(-2, {d.small()})",
    "maximum": lambda d: f"torch.maximum({(x := d.real())}, {d.fits(x, same_kind=True)})",
    "square": lambda d: f"{d.number()}.square()",
    "addcmul": lambda d: (
        f"torch.addcmul({(x := d.floating())}, {d.fits(x, same_kind=True)}, {d.fits(x, same_kind=True)}, value=2)"
    ),
    "lerp": lambda d: f"torch.lerp({(x := d.floating())}, {d.fits(x, same_kind=True)}, 0.5)",
    "where": lambda d: f"torch.where({d.boolean_like(x := d.number())}, {x}, {d.fits(x, same_kind=True)})",
    "masked_fill": lambda d: f"{(x := d.number())}.masked_fill({d.boolean_like(x)}, {d.small()})",
    "logical_not": lambda d: f"{d.boolean()}.logical_not()",
    "bitwise": lambda d: f"{(x := d.whole())} {d.choice('&|^')} {d.fits(x, same_kind=True)}",
    "zeros_like": lambda d: f"torch.zeros_like({d.any()})",
    "full_like": lambda d: f"torch.full_like({d.number()}, {d.small()})",
    "new_ones": lambda d: f"{d.any()}.new_ones({d.shape()})",
    "clone": lambda d: f"{d.any()}.clone()",
    "contiguous": lambda d: f"{d.any()}.contiguous()",
    "detach": lambda d: f"{d.any()}.detach()",
    "item": lambda d: f"{d.number()} + {d.real()}.sum().item()",
    "tril": lambda d: f"{d.number(2)}.{d.choice(('tril', 'triu'))}({d.integer(-1, 2)})",
    "flip": lambda d: f"{(x := d.any(1))}.flip({d.dim(x)})",
    "roll": lambda d: f"{(x := d.any(1))}.roll({d.integer(-2, 3)}, {d.dim(x)})",
    "repeat": lambda d: f"{(x := d.any(1))}.repeat({', '.join(d.choice('12') for _ in range(d.ndim(x)))})",
    "pad": lambda d: f"F.pad({d.floating(1)}, ({d.integer(0, 2)}, {d.integer(0, 3)}))",
    "cumsum": lambda d: f"{(x := d.number(1))}.cumsum({d.dim(x)})",
    "diff": lambda d: f"{(x := d.number(1))}.diff(dim={d.dim(x)})",
    # ---- products and reductions ----
    "matmul": lambda d: "{} @ {}".format(*d.product()),
    "linear": lambda d: "F.linear({}, {})".format(*d.product(transposed=True)),
    "einsum": lambda d: "torch.einsum('ij,jk->ki', {}, {})".format(*d.product()),
    "outer": lambda d: f"torch.outer({(x := d.number(1, 1))}, {d.same_dtype(x, ndim=1)})",
    "sum": lambda d: f"{d.number()}.sum()",
    "sum_dim": lambda d: f"{(x := d.number(1))}.sum({d.dim(x)}{d.keepdim()})",
    "amax": lambda d: f"{(x := d.real(1))}.{d.choice(('amax', 'amin'))}({d.full_dim(x)}{d.keepdim()})",
    "prod": lambda d: f"{(x := d.number(1))}.prod({d.dim(x)})",
    "all": lambda d: f"{(x := d.any(1))}.{d.choice(('any', 'all'))}({d.dim(x)})",
    "count_nonzero": lambda d: f"{(x := d.any(1))}.count_nonzero({d.dim(x)})",
    # ---- views ----
    "view": lambda d: f"{(x := d.any())}.view({sizes(d, x)})",
    "reshape": lambda d: f"{(x := d.any())}.reshape({sizes(d, x)})",
    "flatten": lambda d: f"{d.any(2)}.flatten({d.integer(0, 1)})",
    "transpose": lambda d: f"{(x := d.any(2))}.transpose({d.dim(x)}, {d.dim(x)})",
    "permute": lambda d: f"{(x := d.any(2))}.permute({d.order(x)})",
    "unsqueeze": lambda d: f"{(x := d.any(0, 3))}.unsqueeze({d.integer(0, d.ndim(x) + 1)})",
    "squeeze": lambda d: f"{d.any()}.squeeze()",
    "expand": lambda d: f"{(x := d.any(0, 3))}.expand({d.integer(1, 4)}, {', '.join(['-1'] * d.ndim(x))})",
    "narrow": lambda d: "{}.narrow({}, {}, {})".format(x := d.any(1), dim := d.dim(x), *d.span(x, dim)),
    "slice": lambda d: f"{(x := d.any(1))}[{d.slices(x)}]",
    "select": lambda d: f"{(x := d.any(1))}.select({(dim := d.full_dim(x))}, {d.position(x, dim)})",
    "diagonal": lambda d: f"{d.any(2)}.diagonal({d.integer(-1, 2)})",
    "unfold": lambda d: f"{(x := d.any(1))}.unfold({d.full_dim(x)}, 1, {d.integer(1, 3)})",
    "view_as": lambda d: f"{(x := d.any())}.view_as({x})",
    "split": lambda d: (
        2,
        f"{(x := d.any(1))}.split([{(n := d.position(x, dim := d.full_dim(x)))}, {d.size(x, dim) - n}], {dim})",
    ),
    "chunk": lambda d: (2, f"(*(c := {(x := d.any(1))}.chunk(2, {d.full_dim(x)})), c[0])[:2]"),
    "unbind": lambda d: (1, f"{(x := d.any(1))}.unbind({d.full_dim(x)})[0]"),
    # ---- joining and indexing ----
    "cat": lambda d: "torch.cat([{}, {}], {})".format(*d.joined()),
    "stack": lambda d: f"torch.stack([{(x := d.any(0, 3))}, {d.twin(x)}], {d.integer(0, d.ndim(x) + 1)})",
    "index_select": lambda d: (
        f"{(x := d.any(1))}.index_select({(dim := d.full_dim(x))}, {d.positions(x, dim, x)})"
    ),
    "index": lambda d: f"{(x := d.any(1))}[{d.positions(x, 0, x)}]",
    "index_two": lambda d: f"{(x := d.any(2))}[{d.positions(x, 0, x)}, {d.positions(x, 1, x)}]",
    "gather": lambda d: f"{(x := d.any(1))}.gather({(dim := d.full_dim(x))}, {d.index_like(x, dim)})",
    "scatter": lambda d: (
        f"{(x := d.number(1))}.scatter({(dim := d.full_dim(x))}, {d.index_like(x, dim)}, {d.small()})"
    ),
    "index_add": lambda d: (
        f"{(x := d.number(1))}.index_add({(dim := d.full_dim(x))}, torch.arange({d.size(x, dim)}, device={x}.device), "
        f"{d.twin(x)})"
    ),
    "slice_scatter": lambda d: f"{(x := d.number(1))}.slice_scatter({d.twin(x)}, {d.dim(x)})",
    "embedding": lambda d: f"F.embedding({d.positions(x := d.floating(2, 2), 0, x)}, {x})",
    # Torch makes it in another way of tensors that are no plain ones, and other strides of strides that are not rows.
    "one_hot": lambda d: f"F.one_hot({d.whole()}.contiguous() % 3, 3)",
    # ---- dtypes ----
    "to": lambda d: f"{d.real()}.to({d.choice(('torch.float64', 'torch.float32', 'torch.int64'))})",
    "complex": lambda d: f"torch.complex({(x := d.double())}, {d.fits(x, same_kind=True)})",
    "view_as_real": lambda d: f"torch.view_as_real({d.complex()}.resolve_conj())",
    "conj": lambda d: f"{d.complex()}.conj()",
    "conj_part": lambda d: f"{d.complex()}.conj().{d.choice(('real', 'imag'))}",
    "part": lambda d: f"{d.complex()}.{d.choice(('real', 'imag'))}",
    "resolve": lambda d: f"{d.any()}.resolve_conj().resolve_neg()",
    # ---- placements ----
    "redistribute": lambda d: f"redistribute({(x := d.any())}, {d.placements(x)})",
    # ---- random numbers ----
    "rand_like": lambda d: (
        f"drawn({d.integer(0, 99)}, lambda x: torch.randint_like(x, 5), {d.floating()}.detach())"
    ),
    "dropout": lambda d: f"drawn({d.integer(0, 99)}, lambda x: F.dropout(x, 0.5), {d.floating()}.detach())",
    "bernoulli": lambda d: (
        f"drawn({d.integer(0, 99)}, lambda x: torch.bernoulli(torch.full_like(x, 0.5)), {d.floating()}.detach())"
    ),
    "randperm": lambda d: (
        f"drawn({d.integer(0, 99)}, lambda x: torch.randperm({d.integer(1, 6)}, device=x.device), "
        f"{d.floating()}.detach())"
    ),
}

SHARP: dict[str, Line] = {
    "to_bool": lambda d: f"{d.number()} != 0",
    "compare": lambda d: f"{(x := d.real())} {d.choice(('<', '<=', '==', '!=', '>'))} {d.fits(x)}",
    "sign": lambda d: f"{d.real()}.sign()",
    "floor": lambda d: f"({d.floating()} / 2).{d.choice(('floor', 'round', 'trunc'))}()",
    "remainder": lambda d: f"{d.real()} % 3",
    "floor_divide": lambda d: f"torch.div({d.real()}, 2, rounding_mode='floor')",
    "argmax": lambda d: f"({(x := d.ramp())}).argmax({d.full_dim(x)})",
    "sort": lambda d: (2, f"torch.sort({d.ramp()}, stable=True)"),
    "topk": lambda d: (2, f"torch.topk({(x := d.ramp(1))}, {d.position(x, -1) + 1})"),
    "max_dim": lambda d: (2, f"torch.max({(x := d.ramp(1))}, {d.full_dim(x)})"),
    "argsort": lambda d: f"{d.ramp(1)}.argsort(stable=True)",
    "cummax": lambda d: (1, f"{(x := d.real(1))}.cummax({d.dim(x)})[0]"),
    "masked_select": lambda d: f"{(x := d.real())}[{x} > 0]",
    "nonzero": lambda d: f"{d.real()}.nonzero()",
    "unique": lambda d: f"{d.real()}.unique()",
    "bincount": lambda d: f"torch.bincount({d.whole(1, 1)} % 4, minlength=5)",
    "searchsorted": lambda d: (
        f"torch.bucketize({(x := d.floating())}, torch.arange(-2., 3., device={x}.device).to({x}.dtype))"
    ),
}

ROUGH: dict[str, Line] = {
    "div": lambda d: f"{(x := d.number())} / ({d.fits(x)}.abs() + 1)",
    "exp": lambda d: f"({d.floating()} / 8).clamp(-3, 3).exp()",
    "sigmoid": lambda d: f"{d.floating()}.{d.choice(('sigmoid', 'tanh', 'sin', 'cos', 'atan', 'erf'))}()",
    "log": lambda d: (
        f"({d.floating()}.abs() + 1).{d.choice(('log', 'sqrt', 'rsqrt', 'reciprocal', 'log1p'))}()"
    ),
    "gelu": lambda d: f"F.{d.choice(('gelu', 'silu', 'softplus', 'leaky_relu', 'elu'))}({d.floating()})",
    "softmax": lambda d: f"{(x := d.floating(1))}.{d.choice(('softmax', 'log_softmax'))}({d.dim(x)})",
    "logsumexp": lambda d: f"{(x := d.floating(1))}.logsumexp({d.full_dim(x)})",
    "mean": lambda d: f"{(x := d.floating(1))}.mean({d.full_dim(x)}{d.keepdim()})",
    "var": lambda d: f"{(x := d.floating(1))}.var({d.full_dim(x)}, correction=0)",
    "norm": lambda d: f"{(x := d.floating(1))}.norm(dim={d.full_dim(x)})",
    "layer_norm": lambda d: f"F.layer_norm({(x := d.floating(1))}, ({d.size(x, -1)},))",
    "cross_entropy": lambda d: f"F.cross_entropy({(x := d.floating(2, 2))}, {d.index_of_rows(x)})",
    "mse_loss": lambda d: f"F.mse_loss({(x := d.floating())}, {d.twin(x)})",
    "scan": lambda d: f"{(x := d.floating(1))}.logcumsumexp({d.dim(x)})",
    "uniform": lambda d: (
        f"drawn({d.integer(0, 99)}, lambda x: torch.{d.choice(('rand', 'randn'))}_like(x), {d.floating()}.detach())"
    ),
    "std_mean": lambda d: (2, f"torch.var_mean({(x := d.floating(1))}, {d.full_dim(x)}, correction=0)"),
}

#: Statements that write to their first variable.
WRITES: dict[str, Line] = {
    "add_": lambda d: f"{(x := d.target())}.add_({d.fits(x, into=True)})",
    "add_scalar_": lambda d: f"{d.target()}.add_({d.small()})",
    "mul_": lambda d: f"{d.target()}.mul_({d.small()})",
    "sub_": lambda d: f"{(x := d.target())}.sub_({d.fits(x, into=True)})",
    "operator": lambda d: f"{(x := d.target())} += {d.fits(x, into=True)}",
    "copy_": lambda d: f"{(x := d.target())}.copy_({d.fits(x, into=True)})",
    "zero_": lambda d: f"{d.target()}.zero_()",
    "fill_": lambda d: f"{d.target()}.fill_({d.small()})",
    "neg_": lambda d: f"{d.target()}.neg_()",
    "clamp_": lambda d: f"{d.real_target()}.clamp_(-2, 2)",
    "relu_": lambda d: f"F.relu_({d.real_target()})",
    "masked_fill_": lambda d: f"{(x := d.target())}.masked_fill_({d.boolean_like(x)}, {d.small()})",
    "addcmul_": lambda d: f"{(x := d.target())}.addcmul_({d.twin(x)}, {d.twin(x)})",
    "set_row": lambda d: f"{(x := d.target(1))}[{d.position(x, 0)}] = {d.small()}",
    "set_slice": lambda d: f"{(x := d.target(1))}[{d.slices(x)}] = {d.small()}",
    "add_slice": lambda d: f"{(x := d.target(1))}[{d.slices(x)}] += {d.small()}",
    "set_rows": lambda d: f"{(x := d.target(1))}[{d.positions(x, 0, x)}] = {d.small()}",
    "set_mask": lambda d: f"{(x := d.target())}[{d.boolean_like(x)}] = {d.small()}",
    "copy_slice": lambda d: (
        f"{(x := d.target(1))}.narrow({(dim := d.dim(x))}, 0, 1).copy_({d.twin(x)}.narrow({dim}, 0, 1))"
    ),
    "select_": lambda d: (
        f"{(x := d.target(1))}.select({(dim := d.full_dim(x))}, {d.position(x, dim)}).add_(1)"
    ),
    "transposed_": lambda d: f"{d.target(2)}.transpose(0, 1).mul_({d.small()})",
    "diagonal_": lambda d: f"{d.target(2)}.diagonal().fill_({d.small()})",
    "viewed_": lambda d: f"{d.target()}.view(-1).add_({d.small()})",
    "index_fill_": lambda d: (
        f"{(x := d.target(1))}.index_fill_({(dim := d.full_dim(x))}, {d.positions(x, dim, x)}, {d.small()})"
    ),
    "scatter_": lambda d: (
        f"{(x := d.target(1))}.scatter_({(dim := d.full_dim(x))}, {d.index_like(x, dim)}, {d.small()})"
    ),
    "out": lambda d: f"torch.add({(x := d.target(with_grad=False))}, {d.small()}, out={x})",
    "transpose_": lambda d: f"{d.target(2, with_grad=False)}.transpose_(0, 1)",
    "unsqueeze_": lambda d: f"{d.target(0, 3, with_grad=False)}.unsqueeze_(0)",
    "foreach": lambda d: (
        f"torch._foreach_add_([{(x := d.target(with_grad=False))}, {d.twin(x, to_write=True)}], {d.small()})"
    ),
    "cumsum_": lambda d: f"{(x := d.target(1))}.cumsum_({d.dim(x)})",
}

ROUGH_WRITES: dict[str, Line] = {
    "div_": lambda d: f"{d.floating_target()}.div_(3)",
    "sigmoid_": lambda d: f"{d.floating_target()}.{d.choice(('sigmoid_', 'tanh_', 'sin_'))}()",
    "lerp_": lambda d: f"{(x := d.floating_target())}.lerp_({d.twin(x)}, 0.3)",
    "drawn_": lambda d: (
        f"{(x := d.floating_target())}.copy_(drawn({d.integer(0, 99)}, lambda x: x.normal_(), {x}.detach().clone()))"
    ),
}
