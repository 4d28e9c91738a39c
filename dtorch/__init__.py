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
    "SettingError",
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

#: Public name -> the module that has it.
_HOMES = {
    **dict.fromkeys(_CLUSTER, "dtorch.cluster"),
    **dict.fromkeys(_MESH, "dtorch_runtime.ir.mesh"),
    **dict.fromkeys(_PLACEMENT, "dtorch_runtime.ir.placement"),
    **dict.fromkeys(_ERRORS, "dtorch_runtime.errors"),
    "Settings": "dtorch_runtime.settings",
    **dict.fromkeys(_FACTORY, "dtorch.factory"),
    "manual_seed": "dtorch.random",
    "Tensor": "dtorch.tensors",
    "TensorFuture": "dtorch.future",
    "Graph": "dtorch.graph",
    "parallelize": "dtorch.parallel",
}
#: Names whose use makes tensors: the processes of an embedded cluster load while torch is imported here.
_STARTING = frozenset((*_FACTORY,))

__all__ = [*_HOMES]  # frozen by a test  # noqa: PLE0604  strings, made from the tuples above

if TYPE_CHECKING:  # `as` tells type checkers that the name is public
    from dtorch.cluster import Cluster as Cluster
    from dtorch.cluster import connect as connect
    from dtorch.cluster import init as init
    from dtorch.cluster import shutdown as shutdown
    from dtorch.factory import (
        arange as arange,
    )
    from dtorch.factory import (
        empty as empty,
    )
    from dtorch.factory import (
        empty_like as empty_like,
    )
    from dtorch.factory import (
        eye as eye,
    )
    from dtorch.factory import (
        from_torch as from_torch,
    )
    from dtorch.factory import (
        full as full,
    )
    from dtorch.factory import (
        full_like as full_like,
    )
    from dtorch.factory import (
        linspace as linspace,
    )
    from dtorch.factory import (
        ones as ones,
    )
    from dtorch.factory import (
        ones_like as ones_like,
    )
    from dtorch.factory import (
        rand as rand,
    )
    from dtorch.factory import (
        rand_like as rand_like,
    )
    from dtorch.factory import (
        randint as randint,
    )
    from dtorch.factory import (
        randn as randn,
    )
    from dtorch.factory import (
        randn_like as randn_like,
    )
    from dtorch.factory import (
        randperm as randperm,
    )
    from dtorch.factory import (
        tensor as tensor,
    )
    from dtorch.factory import (
        zeros as zeros,
    )
    from dtorch.factory import (
        zeros_like as zeros_like,
    )
    from dtorch.future import TensorFuture as TensorFuture
    from dtorch.graph import Graph as Graph
    from dtorch.parallel import parallelize as parallelize
    from dtorch.random import manual_seed as manual_seed
    from dtorch.tensors import Tensor as Tensor
    from dtorch_runtime.errors import (
        ClusterTimeout as ClusterTimeout,
    )
    from dtorch_runtime.errors import (
        ControllerLost as ControllerLost,
    )
    from dtorch_runtime.errors import (
        DTorchError as DTorchError,
    )
    from dtorch_runtime.errors import (
        ForkError as ForkError,
    )
    from dtorch_runtime.errors import (
        HandshakeError as HandshakeError,
    )
    from dtorch_runtime.errors import (
        InfrastructureError as InfrastructureError,
    )
    from dtorch_runtime.errors import (
        InternalError as InternalError,
    )
    from dtorch_runtime.errors import (
        MeshError as MeshError,
    )
    from dtorch_runtime.errors import (
        MixedTensorError as MixedTensorError,
    )
    from dtorch_runtime.errors import (
        NodeLost as NodeLost,
    )
    from dtorch_runtime.errors import (
        PlacementError as PlacementError,
    )
    from dtorch_runtime.errors import (
        RemoteOpError as RemoteOpError,
    )
    from dtorch_runtime.errors import (
        SecurityError as SecurityError,
    )
    from dtorch_runtime.errors import (
        SessionClosed as SessionClosed,
    )
    from dtorch_runtime.errors import (
        SettingError as SettingError,
    )
    from dtorch_runtime.errors import (
        TransportError as TransportError,
    )
    from dtorch_runtime.errors import (
        UnsupportedError as UnsupportedError,
    )
    from dtorch_runtime.errors import (
        UserError as UserError,
    )
    from dtorch_runtime.ir.mesh import DeviceMesh as DeviceMesh
    from dtorch_runtime.ir.mesh import init_device_mesh as init_device_mesh
    from dtorch_runtime.ir.placement import (
        Partial as Partial,
    )
    from dtorch_runtime.ir.placement import (
        Placement as Placement,
    )
    from dtorch_runtime.ir.placement import (
        Replicate as Replicate,
    )
    from dtorch_runtime.ir.placement import (
        Shard as Shard,
    )
    from dtorch_runtime.settings import Settings as Settings


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    if name in _STARTING and "torch" not in sys.modules:
        importlib.import_module("dtorch.cluster").start_ahead()
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))


importlib.import_module("dtorch.after_torch").register_when_imported()
