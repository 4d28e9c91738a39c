"""``Tensor``: a symbol for a distributed value. It has a shape, a dtype, a mesh and placements, and no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal

import torch

from dtorch import printing, redistribute
from dtorch.dispatch import dispatch, fetched
from dtorch.future import TensorFuture
from dtorch.graph import Graph, Handle
from dtorch.issue import make_symbol, set_bits
from dtorch.keywords import teaches_keywords
from dtorch.resize import adopt
from dtorch.spec import Spec
from dtorch_runtime.errors import MixedTensorError, UnsupportedError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Placements


class Tensor(torch.Tensor):
    """A distributed tensor. Shapes, values and gradients are global; every operator of PyTorch works on it.

    Made by ``dtorch.rand`` and its like, by ``dtorch.from_torch``, by ``t.to("dtorch")``, and by operators.
    """

    #: ``_mirror`` is that of a linked view (``dtorch.linked``); a tensor may become one, so all have room for it.
    __slots__ = ("_handle", "_mirror", "_spec")

    _spec: Spec
    _handle: Handle
    _mirror: Any
    #: What results of ops are, whatever their inputs: set below.
    _symbol_class: ClassVar[type[Tensor]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch says to
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]  # torch declares an instance method

    @staticmethod
    def __new__(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        raise UnsupportedError(
            "dtorch.Tensor(...) is not called; write dtorch.tensor(data), dtorch.from_torch(t) or t.to('dtorch')"
        )

    # ---- where it lives ----

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that holds it."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> Placements:
        """One placement for each axis of the mesh."""
        return self._spec.layout.placements

    @property
    def graph(self) -> Graph:
        """The graph that it was made by."""
        return self._handle.graph

    # ---- its value ----

    def value(self) -> TensorFuture:
        """The value, to be awaited (or ``.get()``): a CPU tensor of global shape. Waits only for its holders."""
        return self._handle.graph.session.fetch(self._handle, self._spec)

    def to_torch_async(self) -> TensorFuture:
        """The same as ``value()``."""
        return self.value()

    def to_torch(self, timeout_s: float | None = None) -> torch.Tensor:
        """The value as a CPU tensor of global shape. Autograd does not see it; ``.cpu()`` is differentiable.

        Raises:
            RemoteOpError: an op that it depends on failed.
            NodeLost, ControllerLost, ClusterTimeout, SessionClosed: as ``TensorFuture.get``.
        """
        return self.value().get(timeout_s)

    def item_async(self) -> TensorFuture:
        """The value of a tensor with one element, as a Python number: ``n = await x.item_async()``.

        Raises:
            RuntimeError: it has more elements, or none.
        """
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        return self._handle.graph.session.fetch(self._handle, self._spec, convert=torch.Tensor.item)

    def tolist_async(self) -> TensorFuture:
        """As ``tolist``, to be awaited (or ``.get()``)."""
        return self._handle.graph.session.fetch(self._handle, self._spec, convert=torch.Tensor.tolist)

    def tolist(self) -> Any:
        """Nested lists of Python numbers, or a number for a 0-dim tensor."""
        return fetched(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a NumPy array. As in PyTorch, a tensor that requires grad needs ``force`` or ``detach()``.

        Raises:
            RuntimeError: it requires grad, or is a lazy conjugate or negative, which NumPy knows as little.
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead; NumPy knows no "
                "gradients: write x.detach().numpy(), or x.numpy(force=True)"
            )
        for bit, is_set, name in (("conjugate", self.is_conj(), "conj"), ("negative", self.is_neg(), "neg")):
            if is_set and not force:
                raise RuntimeError(
                    f"Can't call numpy() on Tensor that has {bit} bit set. Use tensor.resolve_{name}().numpy() "
                    f"instead; or write x.numpy(force=True)"
                )
        return (self.detach() if force else self).cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    # ---- communication ----

    @teaches_keywords
    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> Tensor:
        """The same value, held in another way or by other devices. Differentiable.

        Args:
            device_mesh: its own when None.
            placements: one for each axis; its own when None, which needs a mesh with as many axes.

        Raises:
            PlacementError: placements that do not fit the mesh or the tensor.
            MeshError: devices that the cluster does not have.
        """
        result: Tensor = redistribute.redistribute(self, device_mesh, placements)
        return result

    def redistribute_like(self, other: Tensor) -> Tensor:
        """The same value on the mesh and with the placements of ``other``. Differentiable.

        Raises:
            MixedTensorError: ``other`` is a plain tensor.
        """
        if not isinstance(other, Tensor):
            raise MixedTensorError(
                f"redistribute_like takes a dtorch tensor, got {type(other).__name__}, which has no mesh; write "
                f"x.redistribute(device_mesh=, placements=), or x.cpu() to bring it here"
            )
        return self.redistribute(other.device_mesh, other.placements)

    @teaches_keywords
    def redistribute_by_dict(
        self,
        placements: Mapping[str, Placement],
        device_mesh: DeviceMesh | None = None,
        default: Literal["keep", "replicate", "error"] = "keep",
    ) -> Tensor:
        """``redistribute`` with placements by axis name, e.g. ``{"tp": Shard(0)}`` (or number). Differentiable.

        Args:
            default: for axes that are not named: ``"keep"`` the placement, ``"replicate"``, or raise an error.

        Raises:
            PlacementError: an axis without a placement under ``"error"``, or one that ``"keep"`` cannot find.
            MeshError: no axis has that name.
        """
        result: Tensor = redistribute.redistribute_by_dict(self, placements, device_mesh, default)
        return result

    # ---- Python's protocols ----

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub is garbled
        return printing.format_tensor(self)

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0 and format_spec:
            return format(self.item(), format_spec)
        if format_spec:
            raise TypeError(
                f"unsupported format string passed to Tensor.__format__: {format_spec!r} is for one number, and the "
                f"tensor has shape {list(self.shape)}; write x.item() of one element, or x.tolist()"
            )
        return str(self)

    def __copy__(self) -> torch.Tensor:
        """Another tensor for the same value, as in torch."""
        return self.detach().requires_grad_(self.requires_grad)

    # ---- its memory, which is on the workers ----

    def storage_offset(self) -> int:
        """Elements before its first one in the memory that it shares, of the global tensor."""
        return self._handle.offset_bytes // self._spec.dtype.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        """The same object for all tensors that share memory. It has a size, and no data here."""
        root = self._handle.root
        if not hasattr(root, "storage"):
            root.storage = torch.Tensor.untyped_storage(self if self._base is None else self._base)
        storage: torch.UntypedStorage = root.storage
        return storage

    def data_ptr(self) -> int:
        """There is none.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a dtorch tensor has no address here, its memory is on the workers. To see whether two tensors share "
            "memory, write x.untyped_storage()._cdata == y.untyped_storage()._cdata; for its value, x.cpu()"
        )

    def share_memory_(self) -> Tensor:
        """There is none here.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a dtorch tensor has no memory here to share with other processes; write x.cpu().share_memory_(), or let "
            "the other process join the cluster: dtorch.init(address)"
        )

    def is_shared(self) -> bool:
        """Whether other processes share its memory: what is on the workers, nobody does."""
        return False

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("a dtorch tensor has no memory here to share; write x.cpu().__dlpack__()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy with gradient and attributes, without hooks; copies of tensors that share memory share it too."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]  # what the lines below put there
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment; write x.detach() to copy its value, or x.clone() to copy it within the graph"
            )
        is_resolved = self._spec.is_resolved  # torch gives lazy conjugates and negatives copies of their own
        with torch.no_grad():
            is_kept_view = self._is_view() and is_resolved
            copy: Any = self._copied_view(memo) if is_kept_view else self.detach().clone()
        if is_resolved:
            memo.setdefault(id(self._handle.root), copy)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        vars(copy).update(deepcopy(vars(self), memo))
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        return copy  # type: ignore[no-any-return]  # clone() of a Tensor

    def _copied_view(self, memo: dict[int, Any]) -> Any:
        """The same view of a copy of the base, which is the same copy for all its views."""
        base = memo.get(id(self._handle.root))
        if base is None:
            base = memo[id(self._handle.root)] = self._base.detach().clone()  # type: ignore[union-attr]  # a view has one
        return self._view_func_unsafe(base.detach())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by value: what comes back is a CPU tensor, which ``.to("dtorch")`` or a state dict takes."""
        local = fetched(self)
        if self.is_conj():
            local = local.conj_physical().conj()
        if self.is_neg():
            local = local.neg()._neg_view()
        local.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(local, self.requires_grad).__reduce_ex__(protocol)
        return local.__reduce_ex__(protocol)

    def _become(self, source: Tensor) -> None:
        """Stand for the value of another tensor, with its shape and strides, linked when it is.

        Torch's own side of it, history, hooks and version, stays as it is.
        """
        for tensor in (self, source):  # torch takes tensors that differ in them for incompatible
            set_bits(tensor, False, False)
        try:
            torch.Tensor.data.__set__(self, source)  # type: ignore[attr-defined]  # a C descriptor
            self._spec = source._spec
        finally:
            for tensor in (self, source):
                set_bits(tensor, tensor._spec.is_conj, tensor._spec.is_neg)
        self.__class__ = type(source)
        HANDLE.__set__(self, HANDLE.__get__(source))
        self._mirror = getattr(source, "_mirror", None)

    def _view_of_mine(self, view: Tensor) -> Tensor:
        """A view of this tensor's value, made below dispatch, as what it is to users."""
        return view

    @property
    def data(self) -> torch.Tensor:
        """The same value without its history, with a version of its own. Assigned to, this tensor becomes another."""
        with torch.inference_mode(self.is_inference()):
            return make_symbol(self._symbol_class, self._spec, self._handle)  # type: ignore[no-any-return]  # of a Tensor

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, Tensor):
            raise MixedTensorError(
                f"x.data takes another dtorch tensor, got one on {other.device}; write x.data = t.to('dtorch')"
            )
        adopt(self, other)


Tensor._symbol_class = Tensor
#: Where a tensor keeps its handle; a linked view looks whether it is up to date before it gives it.
HANDLE: Any = Tensor.__dict__["_handle"]
