"""Parameters that are kept in pieces and whole only where a module uses them.

While a module runs, reading its attribute ``weight`` gives the parameter gathered, ``parameter.redistribute(...)``,
which autograd differentiates into a reduction to pieces. Outside of modules the attribute is the parameter. What
autograd would keep of the gathered weight for the backward pass is replaced by the parameter, and gathered again there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from dtorch.graph import Handle
from dtorch.parallel.cuts import Axis, axis_number
from dtorch.parallel.hooks import map_tensors
from dtorch.parallel.reduction import takes_whole_terms
from dtorch.tensors import Tensor
from dtorch_runtime.ir.placement import Placement, Replicate


def gather_in_use(
    model: nn.Module, axis: Axis, parameters: Collection[Any], dtype: torch.dtype | None
) -> None:
    """Let the modules of ``model`` see these parameters whole on ``axis``, and in ``dtype``, while they run."""
    gathers = _Gathers(axis, dtype)
    for module in model.modules():
        names = [name for name, p in module._parameters.items() if p is not None and p in parameters]
        if names:
            module.__class__ = _reading(type(module), names, gathers)
        module.register_forward_pre_hook(_enter, prepend=True)
        module.register_forward_hook(_leave, always_call=True)
    if dtype is not None:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (_converted(args, dtype), _converted(kwargs, dtype)),
            with_kwargs=True,
        )


def _reading(kind: type[nn.Module], names: list[str], gathers: _Gathers) -> type[nn.Module]:
    """The class with a property for each of the parameters. State dicts and ``parameters()`` do not go through it."""

    def reading(name: str) -> property:
        return property(lambda module: gathers.read(module, name))

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**body, **{name: reading(name) for name in names}})


def _converted(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


# ---- the modules that run ----


class _Frame:
    """A module that is running: what was gathered for it, which is dropped when it ends."""

    __slots__ = ("gathered", "keeps_pieces", "module_id")

    def __init__(self, module_id: int) -> None:
        self.module_id = module_id
        #: By the parameter's id and whether autograd records.
        self.gathered: dict[tuple[int, bool], Tensor] = {}
        #: Whether what autograd saves goes through `_pack`.
        self.keeps_pieces = False


class _Running(threading.local):
    """The modules in progress on this thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        #: What was gathered ahead of its use, by the key of a frame's.
        self.ahead: dict[tuple[int, bool], Tensor] = {}
        #: What was gathered from which parameter, by the id of the handle; the frames keep the handles.
        self.sources: dict[int, tuple[_Gathers, Tensor]] = {}
        #: Of the outermost module: the parameter gathered last, and the last that autograd asked to keep.
        self.last_read: Tensor | None = None
        self.last_kept: _Kept | None = None


_running = _Running()


def _enter(module: nn.Module, args: Any) -> None:
    _running.frames.append(_Frame(id(module)))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    # Also called when the forward raised, and then even if `_enter` never ran because a hook before it raised.
    running = _running
    if not running.frames or running.frames[-1].module_id != id(module):
        return
    frame = running.frames.pop()
    if frame.keeps_pieces:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if frame.gathered:
        for tensor in frame.gathered.values():
            running.sources.pop(id(tensor._handle), None)
        _, tensor = frame.gathered.popitem()
        graph = tensor.graph
        frame.gathered.clear()
        del tensor
        graph.free_soon()
    if not running.frames:
        running.ahead.clear()
        running.last_read = running.last_kept = None


class _Gathers:
    """How the parameters of one model are gathered, and in which order its modules asked for them the last time."""

    def __init__(self, axis: Axis, dtype: torch.dtype | None) -> None:
        self.axis = axis
        self.dtype = dtype
        #: By a parameter's id, the one that was asked for next.
        self.following: dict[int, Tensor] = {}

    def read(self, module: nn.Module, name: str) -> Any:
        """What ``module.name`` is: the parameter, or in a running module the whole of it."""
        parameter: Any = module._parameters[name]
        # What checkpointing computes again is computed in a backward pass, and not always by calling a module.
        is_used = bool(_running.frames) or torch._C._current_graph_task_id() != -1
        if not is_used or not isinstance(parameter, Tensor):
            return parameter
        if not _running.frames:
            return self.whole(parameter)
        return self._for_module(parameter)

    def _for_module(self, parameter: Tensor) -> Tensor:
        running = _running
        key = (id(parameter), torch.is_grad_enabled())
        for frame in reversed(running.frames):
            if key in frame.gathered:
                return frame.gathered[key]
        found = running.ahead.pop(key, None)
        if found is None:
            found = self.whole(parameter)
        frame = running.frames[-1]
        frame.gathered[key] = found
        running.sources[id(found._handle)] = (self, parameter)
        if key[1] and not frame.keeps_pieces and _saves_directly():
            torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
            frame.keeps_pieces = True
        self._gather_ahead(parameter, key[1])
        return found

    def _gather_ahead(self, parameter: Tensor, records: bool) -> None:
        """Issue the gather of the parameter that was used next the last time, to run beside this one's use."""
        running = _running
        if running.last_read is not None:
            self.following[id(running.last_read)] = parameter
        running.last_read = parameter
        following = self.following.get(id(parameter))
        if following is None:
            return
        key = (id(following), records)
        if key not in running.ahead and not any(key in frame.gathered for frame in running.frames):
            running.ahead[key] = self.whole(following)

    def whole(self, parameter: Tensor) -> Tensor:
        """The parameter whole on the axis, converted before it is sent. Differentiable."""
        number = axis_number(parameter.device_mesh, self.axis)
        placements: list[Placement] = [
            Replicate() if index == number else p for index, p in enumerate(parameter.placements)
        ]
        tensor: Any = parameter
        if self.dtype is not None and parameter.is_floating_point():
            tensor = tensor.to(self.dtype)
        if torch.is_grad_enabled() and takes_whole_terms(parameter):
            return cast(Tensor, _Gathered.apply(tensor, placements))  # type: ignore[no-untyped-call]  # torch's
        return cast(Tensor, tensor.redistribute(placements=placements))


class _Gathered(torch.autograd.Function):
    """A parameter whole, whose gradient is not brought back to pieces here: what the parameter's hook gets is terms."""

    @staticmethod
    def forward(ctx: Any, pieces: Any, placements: list[Placement]) -> Any:
        return pieces.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gradient, None


# ---- what autograd keeps ----


class _Kept:
    """In the place of a gathered weight that a backward pass needs: the parameter."""

    __slots__ = ("ahead", "before", "gathers", "is_transposed", "parameter", "version")

    def __init__(
        self, gathers: _Gathers, parameter: Tensor, is_transposed: bool, before: _Kept | None
    ) -> None:
        self.gathers = gathers
        self.parameter = parameter
        self.is_transposed = is_transposed
        self.version = parameter._version
        #: What was kept before it, which the backward pass needs after it.
        self.before = before
        #: The whole weight, while its gather was issued ahead.
        self.ahead: Tensor | None = None

    @torch.no_grad()
    def issue(self) -> Tensor:
        """
        Raises:
            RuntimeError: the parameter was written to since the forward pass.
        """
        if self.parameter._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {list(self.parameter.shape)} is at version {self.parameter._version}; expected "
                f"version {self.version} instead. Call backward() before optimizer.step()"
            )
        whole = self.gathers.whole(self.parameter)
        return cast(Tensor, whole.mT) if self.is_transposed else whole


def _saves_directly() -> bool:
    """Whether no other hooks (of checkpointing, say) decide about what autograd saves: those go on deciding alone."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is None or top[0] is _pack


def _pack(tensor: torch.Tensor) -> Any:
    handle: Handle | None = getattr(tensor, "_handle", None)
    root = None if handle is None else handle.root
    source = _running.sources.get(id(root))
    if source is None or tensor._version:
        # Of a result, autograd must not be handed the tensor itself: it would refer to itself.
        return tensor if tensor.grad_fn is None else tensor.detach()
    gathers, parameter = source
    is_transposed = handle is not root
    if is_transposed and not _is_transpose(tensor, parameter):
        return tensor.detach()
    kept = _Kept(gathers, parameter, is_transposed, _running.last_kept)
    _running.last_kept = kept
    return kept


def _is_transpose(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    rows, columns = parameter.stride()[-2:] if parameter.ndim == 2 else (0, 0)
    return tuple(tensor.shape) == tuple(parameter.shape[::-1]) and tensor.stride() == (columns, rows)


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _Kept):
        return cast(torch.Tensor, kept)
    kept.parameter.graph.free_soon()  # what was unpacked before this
    whole = kept.issue() if kept.ahead is None else kept.ahead
    kept.ahead = None
    before = kept.before
    if before is not None and before.ahead is None:
        before.ahead = before.issue()
    return whole
