"""What a captured function was called with: which tensors, and which kind of call it is."""

from __future__ import annotations

from typing import Any

import torch

from dtorch import auto
from dtorch.graph import Graph
from dtorch.replay.watch import PLAIN, Part
from dtorch.tensors import Tensor
from dtorch_runtime.errors import CaptureError


class Arguments:
    """Reads arguments.

    Attributes:
        leaves: the tensors among them, in order.
        objects: what is neither a tensor, nor a constant, nor a container: its state is watched.
        key: equal for calls that may be the same recording.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a call of the function ``name``.

        Raises:
            CaptureError: a tensor of this process is among them.
        """
        self.leaves: list[Any] = []
        self.objects: list[Part] = []
        self._name = name
        self._key: list[Any] = []
        #: For people.
        self._shown: list[Any] = []
        for value in args:
            self._read(value)
        for keyword, value in kwargs.items():
            self._key.append(keyword)
            self._read(value)

    def _read(self, value: Any) -> None:
        kind, key = type(value), self._key
        if kind is Tensor:
            key.append(value._spec)
            key.append(value.requires_grad)
            self.leaves.append(value)
            self._shown.append(value._spec)
        elif isinstance(value, PLAIN):
            key.append(kind)
            # 0.0 equals -0.0 but means something else, and nan does not equal itself.
            key.append(repr(value) if isinstance(value, float | complex) else value)
            self._shown.append(repr(value))
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            for item in value:
                self._read(item)
        elif kind is dict:
            key.append((kind, *value))
            for item in value.values():
                self._read(item)
        elif isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{self._name} got a {_kind_of(value)} of shape {list(value.shape)}, whose value a replay would "
                f"not look at. Give it a tensor of the cluster: {self._name}(t.to('dtorch'))"
            )
        else:
            key.append((kind, id(value)))
            self._shown.append(f"a {kind.__qualname__}")
            self.objects.append((f"an argument of type {kind.__qualname__}", value))

    @property
    def graph(self) -> Graph:
        """The graph of the first tensor; of the thread, when there is none."""
        return self.leaves[0]._handle.graph if self.leaves else Graph.default_graph()

    def key(self, graph: Graph) -> tuple[Any, ...]:
        """What a recording depends on beside the watched state: kinds, aliases, and modes of torch and DTorch."""
        self._key += (
            id(graph),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            auto.current() is not None,
            graph.default_mesh,
        )
        if torch.is_autocast_enabled("privateuseone"):
            self._key.append(torch.get_autocast_dtype("privateuseone"))
        values = [leaf._handle.value_id for leaf in self.leaves]
        if len(set(values)) < len(values):
            self._key.append(tuple(values.index(value) for value in values))
        roots = [id(leaf._handle.root) for leaf in self.leaves]
        if len(set(roots)) < len(roots):
            offsets = [leaf._handle.offset_bytes for leaf in self.leaves]
            self._key.append((*map(roots.index, roots), *offsets))
        return tuple(self._key)

    def __str__(self) -> str:
        return ", ".join(map(str, self._shown))


def _kind_of(tensor: torch.Tensor) -> str:
    return "linked view" if hasattr(tensor, "_handle") else f"plain tensor on {tensor.device}"
