"""Activations that are more than one pointwise op."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.nn_shapes import likes
from dtorch.rules.view import LETTERS, letters
from dtorch.shapes import Metas, broadcast


def _prelu(call: Call) -> Metas | None:
    """Where the weight does not make more of the input."""
    shape = call.spec("self").shape
    return likes("self")(call) if broadcast([shape, call.spec("weight").shape]) == shape else None


def _log_sigmoid_shape(call: Call) -> Metas | None:
    """What the derivative needs is kept on a CPU only."""
    assert call.mesh is not None
    return likes("self", "self")(call) if call.mesh.device_type == "cpu" else None


rule("log_sigmoid_forward", "...->...,...", shape=_log_sigmoid_shape)
rule("log_sigmoid_backward", "...,...,...->...", linear="a", slices="*", shape=likes("self"))
rule("_prelu_kernel", "...,...->...", slices="*", shape=_prelu)
rule("_prelu_kernel_backward", "...,...,...->...,...", linear="a", slices="*", shape=likes("self", "self"))
rule("rrelu_with_noise_backward", "...,...,...->...", linear="a", slices="*", shape=likes("self"))


def _halves(call: Call) -> tuple[str, str]:
    """Letters of what is halved along ``dim``, and of a half."""
    names = letters(len(call.spec("self").shape))
    dim = _dim(call)
    return names, f"{names[:dim]}Z{names[dim + 1 :]}"


def _dim(call: Call) -> int:
    dim: int = call.get("dim")
    return dim % max(len(call.spec("self").shape), 1)


def _glu(call: Call) -> str:
    names, half = _halves(call)
    return f"{names}->{half}"


def _glu_backward(call: Call) -> str:
    names, half = _halves(call)
    return f"{half},{names}->{names}"


def _halved(call: Call) -> str:
    return f"{LETTERS[_dim(call)]}Z"


rule("glu", _glu, whole=_halved)
rule("glu_backward", _glu_backward, linear="a", whole=_halved, slices="*", shape=likes("self"))
