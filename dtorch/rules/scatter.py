"""Ops that write a part into a copy of a tensor, and the derivatives of views, which write it into zeros."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.view import LETTERS, dim_of, letters, local_input_sizes

# ------------------------------------------------------------------------------------------------- into a copy


def _that_dim(call: Call) -> str:
    return letters(len(call.inputs[0].shape))[dim_of(call)]


def _select_scatter(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    dim = dim_of(call)
    return f"{names},{names[:dim]}{names[dim + 1 :]}->{names}"


def _slice_scatter(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    return f"{names},{names}->{names}"


rule("select_scatter", _select_scatter, moves="a+b", lifts=True, whole=_that_dim)
# The slice's own dim has another size than the whole's, so it must not be cut in either.
rule("slice_scatter", _slice_scatter, moves="a+b", lifts=True, whole=_that_dim)


# ------------------------------------------------------------------------------------------------- windows


def _unfold_backward(call: Call) -> str:
    names = letters(len(call.get("input_sizes")))
    return f"{names}Z->{names}"


rule(
    "unfold_backward",
    _unfold_backward,
    linear="a",
    whole=lambda call: "Z" + LETTERS[call.get("dim") % len(call.get("input_sizes"))],
    localize=local_input_sizes,
)


# ------------------------------------------------------------------------------------------------- by flat position


def _table(call: Call) -> str:
    """The tensor that positions count through is whole."""
    return LETTERS[: len(call.inputs[0].shape)].upper()


def _accumulates(call: Call) -> bool:
    return bool(call.get("accumulate"))


rule("take", lambda call: f"{_table(call)},...->...", moves="a", spreads="a", whole=_table)


def _put(call: Call) -> str:
    index = letters(len(call.spec("index").shape))
    return f"{_table(call)},{index},{index}->{_table(call)}"


rule(
    "put",
    _put,
    linear="a+c",
    lifts=True,
    linear_if=_accumulates,
    whole=lambda call: _table(call) + ("" if _accumulates(call) else LETTERS),
)


# ------------------------------------------------------------------------------------------------- by place in memory


def _source(call: Call) -> str:
    return LETTERS[: len(call.spec("src").shape)]


rule(
    "as_strided_copy",
    lambda call: f"{_table(call)}->{'1' * len(call.get('size'))}",
    moves="a",
    whole=_table,
)
rule(
    "as_strided_scatter",
    lambda call: f"{_table(call)},{_source(call)}->{_table(call)}",
    moves="a+b",
    lifts=True,
    spreads="b",
    whole=lambda call: _table(call) + _source(call),
)


# ------------------------------------------------------------------------------------------------- quarter turns


def _rot90(call: Call) -> str:
    names = letters(len(call.inputs[0].shape))
    a, b = (dim % len(names) for dim in call.get("dims"))
    turned = list(names)
    if call.get("k") % 2:
        turned[a], turned[b] = turned[b], turned[a]
    return f"{names}->{''.join(turned)}"


rule(
    "rot90",
    _rot90,
    moves="a",
    whole=lambda call: "".join(LETTERS[dim % len(call.inputs[0].shape)] for dim in call.get("dims")),
)
