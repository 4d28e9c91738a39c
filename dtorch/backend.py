"""Registers the device "dtorch" with torch: a PrivateUse1 backend written in Python.

Tensors carry the Python dispatch key, so that ops on them reach ``Tensor.__torch_dispatch__``. What is registered here
are calls that make a tensor, which have no tensor to dispatch on, and ops that are kept whole instead of decomposing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dtorch import (
    attention as _attention,  # noqa: F401  registers its calls
    autocast,
    dynamic_calls,
    engine,
    finite as _finite,  # noqa: F401  registers its calls
    foreach as _foreach,  # noqa: F401  registers its calls
    metadata as _metadata,  # noqa: F401  registers its calls
    norms as _norms,  # noqa: F401  registers its call
    random,
    random_calls as _random_calls,  # noqa: F401  registers its calls
    recurrent,
    spectral,
    transforms,
    windows,
)
from dtorch.dispatch import KEPT_WHOLE, LinkedArgument, dispatch
from dtorch.gradients import DIFFERENTIABLE
from dtorch.graph import Graph
from dtorch.linked import dispatch_linked
from dtorch.meshes import check_index
from dtorch.optimizers import place_loaded_state, settle_numbers
from dtorch.state_dicts import load_all_or_nothing
from dtorch.storages import refuse_storages
from dtorch.strided import BACKENDS, not_strided
from dtorch.tensors import Tensor
from dtorch.ties import keep_ties

aten = torch.ops.aten
_lock = threading.Lock()
#: What lives as long as the registration.
_kept: list[Any] = []

#: Made in one op; torch would make an empty tensor and fill it.
_FACTORIES = (
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.scalar_tensor.default,
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def register() -> None:
    """Make ``device="dtorch"`` known to torch; done once."""
    with _lock:
        if _kept:
            return
        hook, guard = _Hook(), engine.install()
        # Torch calls their methods from C++ as long as the process lives, and does not keep them alive itself.
        _kept.extend((hook, guard))
        _setup_privateuseone_for_python_backend(
            "dtorch", backend_module=_DeviceModule(), hook=hook, device_guard=guard
        )
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(_make, dispatch_key="PrivateUse1")
        for dispatch_key, kind in BACKENDS.items():
            everything.fallback(_refusing(kind), dispatch_key=dispatch_key)
        everything.fallback(torch.library.fallthrough_kernel, dispatch_key="AutocastPrivateUse1")
        ops = torch.library.Library("aten", "IMPL")
        _kept.extend((everything, ops))
        # Without kernels of their own the first two end in an internal assert of the fallback, when torch.tensor makes
        # a tensor on the device, or of numbers that are tensors on it.
        for func in (aten._to_copy.default, aten._local_scalar_dense.default, *_FACTORIES):
            ops.impl(func, _maker(func), "PrivateUse1")
        for func in KEPT_WHOLE:
            ops.impl(func, _whole(func), "AutogradPrivateUse1")
            ops.impl(func, _whole(func), "PrivateUse1")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            for func, cell in recurrent.CELLS_AND_LAYERS.items():
                ops.impl(func, cell, key)
            ops.impl(aten.stft.default, spectral.stft, key)
            ops.impl(aten._pad_circular.default, windows.pad_circular, key)
        ops.impl(
            aten.tensor_split.tensor_indices_or_sections, dynamic_calls.tensor_split, "AutogradPrivateUse1"
        )
        ops.impl(aten._pin_memory.default, _pinned, "CPU")
        autocast.register(ops)
        transforms.let_trace(Tensor)
        transforms.leave_uncompiled(dispatch, dispatch_linked, _make)
        _use_foreach_optimizers()
        keep_ties()
        place_loaded_state()
        settle_numbers()
        load_all_or_nothing()
        refuse_storages()


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(Tensor, func, (), args, kwargs)


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """The tensor: what is sent leaves by a socket, and memory is pinned where a worker has a GPU."""
    return tensor.detach()


def _refusing(kind: str) -> Any:
    """For the backends of tensors on the device that would not be strided."""

    def refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
        raise not_strided(func._schema.name, kind)

    return refuse


def _maker(func: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return dispatch(Tensor, func, (), args, kwargs)

    transforms.leave_uncompiled(make)
    return make


def _whole(func: Any) -> Any:
    """One op when no gradient is wanted; else products with our derivatives, others as torch decomposes them.

    Under ``torch.func`` and forward-mode derivatives torch decomposes all: its rules are for the parts.
    """
    differentiable = DIFFERENTIABLE.get(func)

    def call(*args: Any, **kwargs: Any) -> Any:
        if transforms.is_active():
            return func._op_dk(_COMPOSITE, *args, **kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            if differentiable is not None:
                return differentiable(*_positional(func, args, kwargs))
            return func._op_dk(_COMPOSITE, *args, **kwargs)
        if transforms.is_watched():
            with torch._C._AutoDispatchBelowAutograd():
                return func(*args, **kwargs)
        try:
            return dispatch(Tensor, func, (), args, kwargs)
        except LinkedArgument:
            return dispatch_linked(Tensor, func, (), args, kwargs)

    transforms.leave_uncompiled(call)
    return call


def _positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


def _use_foreach_optimizers() -> None:
    """Optimizers do a step in a few ops for types that they know; torch keeps the list in two places."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        types = getattr(module, "_foreach_supported_types", None)
        if isinstance(types, list) and Tensor not in types:
            types.append(Tensor)


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Stream:
    """What torch asks of a stream: here it is the order in which a program issues ops, and there is one."""

    def synchronize(self) -> None:
        """Wait until everything issued by this thread's graph has run; raises its first unfetched error."""
        Graph.default_graph().sync()

    def wait_stream(self, stream: Any) -> None:
        """Ops run in the order of issue."""


_STREAM = _Stream()


class _DeviceModule:
    """``torch.dtorch``: what torch asks of a device. One device; the mesh says where things are."""

    #: Activation checkpoints keep the state of the generator where this is set.
    _initialized = True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one device.

        Raises:
            MeshError: another is meant.
        """
        check_index(device)

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything issued by this thread's graph has run; raises its first unfetched error."""
        Graph.default_graph().sync()

    def current_stream(self, device: Any = None) -> _Stream:
        """The one there is."""
        return _STREAM

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """``with torch.dtorch.stream(s)``: nothing changes."""
        return nullcontext()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """``with torch.dtorch.device(0)``: there is one device.

        Raises:
            MeshError: another is meant.
        """
        check_index(device)
        yield

    def manual_seed(self, seed: int) -> None:
        random.set_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        random.set_seed(int(seed))

    def seed(self) -> None:
        """Seed with a number that nobody can foresee."""
        random.set_seed(secrets.randbits(63))

    def seed_all(self) -> None:
        self.seed()

    def initial_seed(self) -> int:
        return random.get_state()[0]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return random.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        random.set_rng_state(new_state)

    def get_rng_state_all(self) -> Sequence[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        self.set_rng_state(new_states[0])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "DTorch cluster"
