"""A recording as it is replayed, and how it is made of one call of the function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtorch.graph import Graph, Handle, ViewHandle
from dtorch.insight.explain import RecordedCall
from dtorch.location import describe
from dtorch.replay.arguments import Arguments
from dtorch.replay.call import Call, Made, NotReplayable, Result, Source, check_types, make_call, make_result
from dtorch.replay.derivative import Backward, Derivative, Replayed, Saved, make_backward, record_backward
from dtorch.replay.inner_ids import FIRST_INNER_ID
from dtorch.replay.recording import Recording
from dtorch.replay.watch import TooMuch, Watch


class Unsettled(NotReplayable):
    """A call changed something that the next one would see; after the first calls of a program that often ends."""


@dataclass(slots=True)
class Plan:
    """How to issue a call again.

    Attributes:
        watch: the state that it is right in.
        sources: where the inputs of the call are found.
        results, treespec: what is returned.
        gradients: where the tensors are found whose gradient the call replaces, and by what.
        had_gradient: whether tensors had a gradient before it; of those whose gradient it replaces or reads.
        backward: of the results, whose places are ``differentiable``, by the tensors at ``inputs``; needs ``saved``.
        num_recorded: ops that the function issued; the call has fewer when some were of no use.
    """

    watch: Watch
    call: Call
    sources: list[Source]
    results: list[Result]
    treespec: Any
    gradients: list[tuple[Source, Result]]
    had_gradient: list[tuple[Source, bool]]
    num_recorded: int
    #: For people.
    shown: RecordedCall
    backward: Backward | None = None
    differentiable: Sequence[tuple[int, ...]] = ()
    inputs: Sequence[Source] = ()
    saved: Sequence[Result] = ()

    def is_current(self, leaves: Sequence[Any]) -> bool:
        """Whether a replay would do what the function would."""
        return (
            all(source.is_current(leaves) for source in self.sources)
            and all((source.find(leaves).grad is not None) is had for source, had in self.had_gradient)
            and self.watch.is_same()
        )

    def change(self, leaves: Sequence[Any]) -> str:
        """Why it is not current."""
        for source in self.sources:
            if not source.is_current(leaves):
                return f"a tensor that it reaches was {source.spec} and is another"
        for source, had in self.had_gradient:
            if (source.find(leaves).grad is not None) is not had:
                return f"a tensor of shape {list(source.spec.shape)} has {'no' if had else 'a'} gradient now"
        return self.watch.change() or "it is current"

    def __str__(self) -> str:
        record = self.call.record
        kept = self.call.num_ops
        text = (
            f"{self.num_recorded} ops recorded, {kept} kept, {record.num_inputs} inputs, {record.num_outputs} outputs; "
            f"passes: {self.call.passes()}"
        )
        if self.backward is None:
            return text
        call = self.backward.call
        return f"{text}; {call.num_ops} ops backward; passes: {call.passes()}"

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Issue the call on these arguments; returns what the function would."""
        inputs = [source.find(leaves) for source in self.sources]
        if self.backward is None:
            handles = self.call.issue(inputs)
            results = self._make(self.results, inputs, handles)
        else:
            results, handles = self._replay_differentiably(self.backward, inputs, leaves)
        for source, gradient in self.gradients:
            source.find(leaves).grad = make_result(gradient, inputs, handles)
        return pytree.tree_unflatten(results, self.treespec)

    def _make(self, results: Sequence[Result], inputs: Sequence[Any], handles: Sequence[Handle]) -> list[Any]:
        return [make_result(result, inputs, handles) for result in results]

    def _replay_differentiably(
        self, backward: Backward, inputs: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[list[Any], list[Handle]]:
        results: list[Any] = []
        handles: list[Handle] = []

        def replay() -> tuple[list[Any], list[Any]]:
            handles.extend(self.call.issue(inputs))
            results.extend(self._make(self.results, inputs, handles))
            return [results[places[0]] for places in self.differentiable], self._make(
                self.saved, inputs, handles
            )

        found: Any = Replayed.apply(backward, replay, *(source.find(leaves) for source in self.inputs))  # type: ignore[no-untyped-call]  # torch's
        for places, result in zip(self.differentiable, found, strict=True):
            for place in places:
                results[place] = result
        return results, handles


class Recorder:
    """Runs a function once, and makes a plan of what it did."""

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Arguments, *, raises: bool
    ) -> None:
        """Look at the state before the function runs.

        Args:
            raises: whether what cannot be replayed raises where the function does it.
        """
        self._name = name
        self._function = function
        self._leaves = arguments.leaves
        self._graph = arguments.graph
        self._recording = Recording(self._graph, name, raises=raises)
        self._saved = Saved()
        self._watch: Watch | NotReplayable
        try:
            self._watch = Watch(function, arguments.objects)
            reached = [tensor for _, tensor in self._watch.tensors]
        except TooMuch as reason:
            self._watch = NotReplayable(str(reason))
            reached = []
        #: Tensors that a replay can find, with how; those of the arguments first.
        self._sources: list[tuple[Any, Source]] = [
            (tensor, Source(tensor._spec, leaf=i)) for i, tensor in enumerate(self._leaves)
        ]
        self._sources += [(tensor, Source(tensor._spec, tensor=tensor)) for tensor in reached]
        #: Tensors that may have a gradient, with how they are found and the gradient before the call.
        self._owners = [
            (tensor, source, tensor.grad)
            for tensor, source in self._sources
            if tensor.requires_grad and tensor.is_leaf
        ]
        self._sources += [
            (gradient, replace(source, spec=gradient._spec, is_gradient=True))
            for _, source, gradient in self._owners
            if gradient is not None
        ]
        self._handles = [tensor._handle for tensor, _ in self._sources]
        self._writes = {id(handle.root): _last_write(handle) for handle in self._handles}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        needs_history = torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in self._sources)
        # ``torch.func`` refuses to run where saved tensors are looked at.
        with self._recording, self._saved if needs_history else nullcontext():
            return self._function(*args, **kwargs)

    def plan(self, result: Any) -> Plan:
        """A plan of what the function did, which returned ``result``.

        Raises:
            NotReplayable: there cannot be one.
        """
        watch = self._check_state()
        results, treespec = pytree.tree_flatten(result)
        ops = self._recording.ops()
        known: dict[int, Any] = {}
        for tensor, _ in self._sources:
            known.setdefault(tensor._handle.value_id, tensor)
        derivative = self._derivative(results, known)
        changed = self._changed_gradients()
        wanted = [value for value in results if isinstance(value, torch.Tensor) and hasattr(value, "_handle")]
        wanted += [tensor.grad for tensor, _ in changed if tensor.grad is not None]
        wanted += derivative.saved if derivative is not None else []
        check_types(results)
        self._check_kept(ops, wanted, keeps_graph=derivative is not None)
        made = make_call(self._graph, ops, wanted, known, self._was_written)
        sources = [self._source(tensor) for tensor in made.inputs]
        uses_gradients = bool(changed) or any(source.is_gradient for source in sources)
        plan = Plan(
            watch,
            made.call,
            sources,
            [made.result(value) for value in results],
            treespec,
            gradients=[(source, made.result(tensor.grad)) for tensor, source in changed],
            had_gradient=[(source, before is not None) for _, source, before in self._owners]
            if uses_gradients
            else [],
            num_recorded=len(ops),
            shown=RecordedCall(self._name, ops, made.ops, made.position, len(made.inputs), made.call.record),
        )
        if derivative is not None:
            self._add_derivative(plan, made, derivative, results)
        return plan

    def close(self) -> None:
        """Nothing more is asked."""
        self._recording.close()

    # ---- checks ----

    def _check_state(self) -> Watch:
        if self._recording.refusal is not None:
            raise NotReplayable(self._recording.refusal)
        if isinstance(self._watch, NotReplayable):
            raise self._watch
        change = self._watch.change()
        if change is not None:
            raise Unsettled(f"changes what the next call sees: {change}")
        for (tensor, _), handle in zip(self._sources, self._handles, strict=True):
            if tensor._handle is not handle:
                raise Unsettled(
                    f"lets a tensor of shape {list(tensor.shape)} stand for another value (set_ or .data)"
                )
            if handle.graph is not self._graph and self._was_written(tensor):
                raise NotReplayable(
                    f"writes to a tensor of shape {list(tensor.shape)} of another graph, whose ops are not recorded"
                )
        values = {tensor._handle.value_id for _, tensor in self._watch.tensors}
        for leaf in self._leaves:
            if leaf._handle.value_id in values:
                raise NotReplayable(
                    f"gets a tensor of shape {list(leaf.shape)} as an argument that it also reaches by itself"
                )
        return self._watch

    def _check_kept(self, ops: Sequence[Any], wanted: Sequence[Any], *, keeps_graph: bool) -> None:
        """Whether the function kept a tensor that it made, for the next call to find."""
        handles = [tensor._handle for tensor in wanted]
        known = {handle.value_id for handle in (*handles, *(handle.root for handle in handles))}
        if keeps_graph:
            known.update(self._saved.tensors)
        else:
            self._saved.tensors.clear()
        made = {value: op for op in ops for value in op.outputs if value < FIRST_INNER_ID}
        kept = self._recording.still_held(made) - known
        if kept:
            gc.collect()
            kept = self._recording.still_held(made) - known
        if kept:
            kept = _held_by_python(kept, self._graph)
        if kept:
            op = made[min(kept)]
            raise Unsettled(
                f"keeps a tensor for later that {op.template.op} made at {describe(op.location_id)}. Return it, "
                f"or copy it into a tensor that exists before the call"
            )

    def _changed_gradients(self) -> list[tuple[Any, Source]]:
        return [(tensor, source) for tensor, source, before in self._owners if tensor.grad is not before]

    def _was_written(self, tensor: Any) -> bool:
        root = tensor._handle.root
        return id(root) in self._writes and _last_write(tensor._handle) != self._writes[id(root)]

    def _source(self, tensor: Any) -> Source:
        return next(source for known, source in self._sources if known is tensor)

    # ---- derivatives ----

    def _derivative(self, results: Sequence[Any], known: Mapping[int, Any]) -> Derivative | None:
        is_known = {id(tensor) for tensor, _ in self._sources}
        differentiable = _unique(
            value
            for value in results
            if isinstance(value, torch.Tensor) and value.grad_fn is not None and id(value) not in is_known
        )
        if not differentiable:
            return None
        inputs = _unique(tensor for tensor, _ in self._sources if tensor.requires_grad)
        for tensor in inputs:
            if self._was_written(tensor):
                raise NotReplayable(f"writes to a tensor of shape {list(tensor.shape)} that has a gradient")
        everything = {**self._saved.tensors, **known}
        return record_backward(self._name, self._graph, differentiable, inputs, everything)

    def _add_derivative(self, plan: Plan, made: Made, derivative: Derivative, results: Sequence[Any]) -> None:
        plan.backward = make_backward(derivative)
        plan.inputs = [self._source(tensor) for tensor in derivative.inputs]
        plan.saved = [made.result(tensor) for tensor in derivative.saved]
        plan.differentiable = [
            tuple(place for place, value in enumerate(results) if value is tensor)
            for tensor in derivative.results
        ]
        for tensor in derivative.results:
            if made.is_view_of_input(tensor):
                raise NotReplayable(
                    "returns a differentiable view of one of its inputs. Return a copy: x.clone()"
                )


def _held_by_python(value_ids: set[int], graph: Graph) -> set[int]:
    """Those of the values with a symbol that Python refers to. Torch itself holds what results are views of."""
    found = set()
    handles = [
        item
        for item in gc.get_objects()
        if type(item) in (Handle, ViewHandle) and item.graph is graph and item.value_id in value_ids
    ]
    for handle in handles:
        symbols = [item for item in gc.get_referrers(handle) if issubclass(type(item), torch.Tensor)]
        for symbol in symbols:
            if any(
                item is not symbols and not isinstance(item, FrameType) for item in gc.get_referrers(symbol)
            ):
                found.add(handle.value_id)
    return found


def _unique(tensors: Any) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _last_write(handle: Handle) -> int:
    return getattr(handle.root, "last_write", 0)
