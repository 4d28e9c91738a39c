"""What a user writes with: plain PyTorch, run on a cluster.

Importing it is quick: torch, and everything that needs it, is loaded by the first use of a name that needs it.
The device "dtorch" is known to torch as soon as both are imported, in either order.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_CLUSTER = ("init", "shutdown", "connect", "Cluster")
_MESH = ("DeviceMesh", "init_device_mesh")
_PLACEMENT = ("Placement", "Replicate", "Shard", "Partial")
_ERRORS = (
    "DTorchError",
    "UserError",
    "PlacementError",
    "MeshError",
    "MixedTensorError",
    "UnsupportedError",
    "CaptureError",
    "SettingError",
    "StateDictError",
    "ForkError",
    "RemoteOpError",
    "InfrastructureError",
    "NodeLost",
    "ControllerLost",
    "ClusterTimeout",
    "TransportError",
    "HandshakeError",
    "SecurityError",
    "SessionClosed",
    "InternalError",
)
_FACTORY = (
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "eye",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "tensor",
    "from_torch",
)
_RANDOM = ("manual_seed", "get_rng_state", "set_rng_state", "fork_rng", "Generator")

#: Public name -> the module that has it.
_HOMES = {
    **dict.fromkeys(_CLUSTER, "dtorch.cluster"),
    **dict.fromkeys(_MESH, "dtorch_runtime.ir.mesh"),
    **dict.fromkeys(_PLACEMENT, "dtorch_runtime.ir.placement"),
    **dict.fromkeys(_ERRORS, "dtorch_runtime.errors"),
    "Settings": "dtorch_runtime.settings",
    **dict.fromkeys(_FACTORY, "dtorch.factory"),
    **dict.fromkeys(_RANDOM, "dtorch.random"),
    "Tensor": "dtorch.tensors",
    "TensorFuture": "dtorch.future",
    "Graph": "dtorch.graph",
    "call_async": "dtorch.asynchronous",
    "capture": "dtorch.replay.capture",
    "parallelize": "dtorch.parallel",
    "plan": "dtorch.parallel",
    "load": "dtorch.loading",
    "assign_layers_to_stages": "dtorch.parallel.pipeline",
    "prefetch": "dtorch.prefetching",
    "profile": "dtorch.insight.profile",
    "explain": "dtorch.insight.explain",
    "counters": "dtorch.insight.counters",
    "visualize": "dtorch.insight.visualize",
    **dict.fromkeys(("memory_stats", "reset_peak_memory_stats"), "dtorch.memory"),
    **dict.fromkeys(("auto_redistribute", "explain_redistributions"), "dtorch.auto"),
}
#: Packages of public names, which need no import of their own: ``dtorch.parallel.describe``.
_SUBPACKAGES = frozenset(("checkpoint", "nn", "parallel"))
#: Modules that do not import torch.
_WITHOUT_TORCH = frozenset(
    (
        "dtorch.cluster",
        "dtorch_runtime.ir.mesh",
        "dtorch_runtime.ir.placement",
        "dtorch_runtime.errors",
        "dtorch_runtime.settings",
    )
)
__all__ = [*_HOMES]  # frozen by a test  # noqa: PLE0604  strings, made from the tuples above

if TYPE_CHECKING:  # `as` tells type checkers that the name is public
    from dtorch.asynchronous import call_async as call_async
    from dtorch.auto import (
        auto_redistribute as auto_redistribute,
        explain_redistributions as explain_redistributions,
    )
    from dtorch.cluster import Cluster as Cluster, connect as connect, init as init, shutdown as shutdown
    from dtorch.factory import (
        arange as arange,
        empty as empty,
        empty_like as empty_like,
        eye as eye,
        from_torch as from_torch,
        full as full,
        full_like as full_like,
        linspace as linspace,
        ones as ones,
        ones_like as ones_like,
        rand as rand,
        rand_like as rand_like,
        randint as randint,
        randn as randn,
        randn_like as randn_like,
        randperm as randperm,
        tensor as tensor,
        zeros as zeros,
        zeros_like as zeros_like,
    )
    from dtorch.future import TensorFuture as TensorFuture
    from dtorch.graph import Graph as Graph
    from dtorch.insight.counters import counters as counters
    from dtorch.insight.explain import explain as explain
    from dtorch.insight.profile import profile as profile
    from dtorch.insight.visualize import visualize as visualize
    from dtorch.loading import load as load
    from dtorch.memory import (
        memory_stats as memory_stats,
        reset_peak_memory_stats as reset_peak_memory_stats,
    )
    from dtorch.parallel import parallelize as parallelize, plan as plan
    from dtorch.parallel.pipeline import assign_layers_to_stages as assign_layers_to_stages
    from dtorch.prefetching import prefetch as prefetch
    from dtorch.random import (
        Generator as Generator,
        fork_rng as fork_rng,
        get_rng_state as get_rng_state,
        manual_seed as manual_seed,
        set_rng_state as set_rng_state,
    )
    from dtorch.replay.capture import capture as capture
    from dtorch.tensors import Tensor as Tensor
    from dtorch_runtime.errors import (
        CaptureError as CaptureError,
        ClusterTimeout as ClusterTimeout,
        ControllerLost as ControllerLost,
        DTorchError as DTorchError,
        ForkError as ForkError,
        HandshakeError as HandshakeError,
        InfrastructureError as InfrastructureError,
        InternalError as InternalError,
        MeshError as MeshError,
        MixedTensorError as MixedTensorError,
        NodeLost as NodeLost,
        PlacementError as PlacementError,
        RemoteOpError as RemoteOpError,
        SecurityError as SecurityError,
        SessionClosed as SessionClosed,
        SettingError as SettingError,
        StateDictError as StateDictError,
        TransportError as TransportError,
        UnsupportedError as UnsupportedError,
        UserError as UserError,
    )
    from dtorch_runtime.ir.mesh import DeviceMesh as DeviceMesh, init_device_mesh as init_device_mesh
    from dtorch_runtime.ir.placement import (
        Partial as Partial,
        Placement as Placement,
        Replicate as Replicate,
        Shard as Shard,
    )
    from dtorch_runtime.settings import Settings as Settings


def __getattr__(name: str) -> Any:
    home = f"dtorch.{name}" if name in _SUBPACKAGES else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}{_hint(name)}")
    if "torch" not in sys.modules and home not in _WITHOUT_TORCH:
        if name in _FACTORY:
            return _starting(name)
        importlib.import_module("torch")  # by itself, so that the device is registered right after it
    module = importlib.import_module(home)
    value = globals()[name] = module if name in _SUBPACKAGES else getattr(module, name)
    return value


def _hint(name: str) -> str:
    """What to write instead, for people; tools ask for names that begin with an underscore."""
    if name.startswith("_"):
        return ""
    text: str = importlib.import_module("dtorch.neighbours").hint(name, __all__)
    return text


def _starting(name: str) -> Any:
    """A factory while torch is not imported: its call starts a cluster, which loads while torch is imported here."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch" not in sys.modules:
            importlib.import_module("dtorch.cluster").start_ahead()
            importlib.import_module("torch")
        return getattr(importlib.import_module("dtorch.factory"), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"See ``dtorch.factory.{name}``; torch is not imported yet."
    return call


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))


importlib.import_module("dtorch.after_torch").register_when_imported()
