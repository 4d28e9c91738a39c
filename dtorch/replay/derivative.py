"""Derivatives of captured calls: the backward pass is recorded beside the forward pass, and replayed in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.graph import Graph
from dtorch.issue import make_symbol
from dtorch.replay.call import Call, Made, NotReplayable, Result, make_call, make_result
from dtorch.replay.recording import Recording
from dtorch.spec import Spec
from dtorch_runtime.errors import CaptureError, UserError


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Inside, notes what autograd saves for a backward pass.

    Attributes:
        tensors: symbols for the saved values, by value; without history, so that none of them holds itself.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        super().__init__(self._pack, lambda packed: packed)

    def _pack(self, tensor: Any) -> Any:
        handle = getattr(tensor, "_handle", None)
        if handle is None:
            return tensor
        symbol = make_symbol(type(tensor), tensor._spec, handle)
        self.tensors.setdefault(handle.value_id, symbol)
        return symbol


@dataclass(frozen=True, slots=True)
class Derivative:
    """A recorded backward pass.

    Attributes:
        made: its call. Its inputs are tensors that the forward pass saves, and gradients of results.
        saved: those of its inputs that are no gradients.
        results: what is differentiated.
        given: the gradients of the results that it was recorded with.
        inputs: what the results are differentiated by.
        gradients: the gradient of each of ``inputs``.
    """

    made: Made
    saved: list[Any]
    results: Sequence[Any]
    given: list[Any]
    inputs: list[Any]
    gradients: list[Any]


def record_backward(
    name: str, graph: Graph, results: Sequence[Any], inputs: Sequence[Any], known: Mapping[int, Any]
) -> Derivative | None:
    """Record the backward pass of what was just recorded; the graph of autograd is kept.

    Args:
        results: the differentiable results.
        inputs: everything that they may be differentiated by.
        known: tensors that a replay can find or that the forward pass can save, by value.

    Returns:
        None when the graph of autograd is gone, because a backward pass went through it.

    Raises:
        NotReplayable: the derivative cannot be computed, or depends on tensors that no replay could find.
    """
    _check_leaves(results, inputs)
    given = [torch.ones_like(result.detach()) for result in results]
    recording = Recording(graph, name, raises=False)
    freed = graph.freed
    try:
        with recording:
            found = torch.autograd.grad(results, inputs, given, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "second time" in str(error):
            return None
        raise NotReplayable(f"has a derivative that cannot be computed: {error}") from error
    except UserError as error:  # the program may never ask for it, but a replay would have to know it
        raise NotReplayable(
            f"has a derivative that cannot be computed for a gradient placed as its result is (detach the result, or "
            f"call it under torch.no_grad(), if you need none): {error}"
        ) from error
    finally:
        graph.freed = freed
    if recording.refusal is not None:
        raise NotReplayable(f"has a derivative, and {recording.refusal}")
    pairs = [
        (tensor, gradient) for tensor, gradient in zip(inputs, found, strict=True) if gradient is not None
    ]
    everything = {**known, **{_value(gradient): gradient for gradient in given}}
    made = make_call(graph, recording.ops(), [gradient for _, gradient in pairs], everything, lambda _: False)
    is_given = {id(gradient) for gradient in given}
    saved = [tensor for tensor in made.inputs if id(tensor) not in is_given]
    return Derivative(
        made, saved, results, given, [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
    )


def _value(tensor: Any) -> int:
    value_id: int = tensor._handle.value_id
    return value_id


def _check_leaves(results: Iterable[Any], inputs: Sequence[Any]) -> None:
    """Whether gradients flow to ``inputs`` and nowhere else.

    Raises:
        NotReplayable: they do.
    """
    ends = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in inputs}
    for node in _nodes(results, ends):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise NotReplayable(
                f"has a gradient for a tensor of shape {list(leaf.shape)} that it reaches in a way that cannot be "
                f"watched. Pass it as an argument"
            )


def _nodes(results: Iterable[Any], ends: set[Any]) -> Iterator[Any]:
    todo = list({result.grad_fn for result in results} - ends)
    seen = {*todo, *ends}
    while todo:
        node = todo.pop()
        yield node
        following = {found for found, _ in node.next_functions if found is not None} - seen
        seen |= following
        todo.extend(following)


@dataclass(frozen=True, slots=True)
class Backward:
    """How a replay's backward pass is issued.

    Attributes:
        inputs: for each input of the call, its index among the saved tensors, or -1 - the index of a gradient.
        given: the kind that the gradient of each result must be of.
        results: the gradient of each differentiable input.
    """

    call: Call
    inputs: tuple[int, ...]
    given: tuple[Spec, ...]
    results: tuple[Result, ...]


def make_backward(derivative: Derivative) -> Backward:
    """From what was recorded; the saved tensors are those of ``derivative.saved``, in order."""
    index = {id(tensor): i for i, tensor in enumerate(derivative.saved)}
    index.update((id(gradient), -1 - i) for i, gradient in enumerate(derivative.given))
    return Backward(
        derivative.made.call,
        tuple(index[id(tensor)] for tensor in derivative.made.inputs),
        tuple(gradient._spec for gradient in derivative.given),
        tuple(derivative.made.result(gradient) for gradient in derivative.gradients),
    )


class Replayed(torch.autograd.Function):
    """A replay as one node of autograd: ``apply(backward, replay, *differentiable inputs)``.

    ``replay()`` issues the forward call; it returns the differentiable results and the tensors to save.
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, replay: Callable[[], tuple[list[Any], list[Any]]], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results, saved = replay()
        ctx.backward_plan = backward
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise CaptureError(
                "the gradient of a captured call has no derivative itself (create_graph=True). Call the function as it "
                "is for that: function.__wrapped__(...)"
            )
        plan: Backward = ctx.backward_plan
        given = [_like(gradient, spec) for gradient, spec in zip(gradients, plan.given, strict=True)]
        saved = ctx.saved_tensors
        inputs = [saved[index] if index >= 0 else given[-1 - index] for index in plan.inputs]
        handles = plan.call.issue(inputs)
        return (None, None, *(make_result(result, inputs, handles) for result in plan.results))


def _like(gradient: Any, spec: Spec) -> Any:
    """A gradient with the layout and the strides that the recorded backward pass had."""
    layout = spec.layout
    if gradient._spec.layout != layout:
        gradient = gradient.redistribute(device_mesh=layout.mesh, placements=layout.placements)
    return gradient if gradient._spec is spec else gradient.contiguous()
