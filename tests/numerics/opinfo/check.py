"""One check: a call on distributed arguments, compared with what the same call gave in plain torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import dtorch
from dtorch import random as dtorch_random
from dtorch.future import TensorFuture
from dtorch.spec import intern_spec
from dtorch_runtime.errors import ClusterTimeout, InfrastructureError, PlacementError, RemoteOpError
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placements, Replicate, Shard
from tests.numerics.opinfo.entries import Sample
from tests.numerics.opinfo.op_stream import OpStream
from tests.numerics.opinfo.rounding import Exact, is_rounding, widened, widened_tensor

EQUAL = "equal"
#: Not close, but as near to what float64 gives as plain torch is.
ROUNDING = "rounding"
REFUSED = "PlacementError"
#: Every argument is replicated: there is no ``redistribute()`` that would help.
REFUSED_WHOLE = "PlacementError on replicated"

_CALL_SEED = 1234
#: With other seeds the plain result of a random entry is another.
_OTHER_SEEDS = (4321, 54321, 654321)
_WEIGHT_SEED = 7
#: Their contents are whatever was in memory.
_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
#: Torch leaves conjugating their results to whoever reads them; DTorch's are resolved.
_RESOLVED = frozenset({"linalg.solve", "linalg.solve_ex", "linalg.lu_solve"})
_MESSAGE_LENGTH = 300


@dataclass(frozen=True)
class Reference:
    """What a call must give."""

    #: CPU tensors and constants.
    leaves: list[Any]
    #: For each leaf that gradients flow from, what it is multiplied with; None for the others.
    weights: list[torch.Tensor | None]
    #: For each input that requires grad; None when no gradient is compared.
    grads: list[torch.Tensor | None] | None
    #: Whether torch's generator was used or set: the result may depend on the seed.
    may_be_random: bool = False
    #: The same in float64, worked out when it is asked for; None where there is no such thing.
    exact: Callable[[], Exact | None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """What became of a check. ``grad_category`` is None when no gradient was compared."""

    category: str
    message: str = ""
    grad_category: str | None = None
    grad_message: str = ""
    #: Whether a device sent something to another one during the call.
    has_communicated: bool = False

    @property
    def ends_session(self) -> bool:
        """Whether the cluster cannot be trusted to go on."""
        return {"hang", "crash"} & {self.category, self.grad_category} != set()


class _Differs(Exception):
    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


# ---- plain torch ----


def reference_of(entry: Any, sample: Sample, with_grad: bool) -> tuple[Sample, Reference] | None:
    """The sample that is checked and what it gives; None when plain torch refuses it."""
    try:
        return sample, _plain(entry, sample, with_grad)
    except Exception:  # noqa: BLE001  some calls refuse inputs that require grad, some samples are errors
        sample = sample.without_grad()
    try:
        return sample, _plain(entry, sample, with_grad)
    except Exception:  # noqa: BLE001  then there is nothing to compare with
        return None


def _plain(entry: Any, sample: Sample, with_grad: bool) -> Reference:
    tensors = sample.fresh_tensors()
    with mock.patch.object(torch, "manual_seed", wraps=torch.manual_seed) as seeding:
        leaves = _call(entry, sample, tensors, _CALL_SEED)
    after = torch.default_generator.get_state()
    seed_everything(_CALL_SEED)
    has_drawn = not torch.equal(torch.default_generator.get_state(), after)
    needed = [t for t in tensors if t.requires_grad]
    generator = torch.Generator().manual_seed(_WEIGHT_SEED)
    weights = [_weight(leaf, generator) for leaf in leaves]
    grads = None
    if with_grad and needed and any(w is not None for w in weights):
        try:
            grads = _gradients(leaves, weights, needed, lambda weight, _: weight)
        except Exception:  # noqa: BLE001  it has no derivative: only values are compared
            grads = None
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for plain, leaf in zip(detached, leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            plain.requires_grad_()
    may_be_random = entry.name not in _EMPTY and (has_drawn or seeding.called or sample.has_generator)
    exact = cache(lambda: _exact(entry, sample, weights, grads is not None))
    return Reference(detached, weights, grads, may_be_random, exact)


def _exact(
    entry: Any, sample: Sample, weights: Sequence[torch.Tensor | None], with_grad: bool
) -> Exact | None:
    """The call in float64; None when plain torch refuses that."""
    tensors = widened(sample).fresh_tensors()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # what integers are divided in
    try:
        leaves = _call(entry, widened(sample), tensors, _CALL_SEED)
        grads = None
        if with_grad:
            needed = [t for t in tensors if t.requires_grad]
            wide = [None if w is None else widened_tensor(w) for w in weights]
            grads = _gradients(leaves, wide, needed, lambda weight, leaf: weight.to(leaf.dtype))
    except Exception:  # noqa: BLE001  not every op takes float64
        return None
    finally:
        torch.set_default_dtype(before)
    return Exact(leaves, grads)


def is_random(entry: Any, sample: Sample, reference: Reference) -> bool:
    """Whether the plain result depends on the seed."""
    return reference.may_be_random and any(
        not _same(_call_seeded_always(entry, sample, seed), reference.leaves) for seed in _OTHER_SEEDS
    )


def _call_seeded_always(entry: Any, sample: Sample, seed: int) -> list[Any]:
    """The entries of random ops seed torch themselves, with a constant."""
    original = torch.manual_seed
    with mock.patch.object(torch, "manual_seed", side_effect=lambda _: original(seed)):
        return _call(entry, sample, sample.fresh_tensors(), seed)


def seed_everything(seed: int) -> None:
    """As ``torch.manual_seed`` does for the CPU and for DTorch, without its ten milliseconds for other devices."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    dtorch_random.set_seed(seed)


def _same(leaves: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(leaves) == len(expected) and all(
        not isinstance(y, torch.Tensor) or (x.shape == y.shape and bool(_close(x, y).all()))
        for x, y in zip(leaves, expected)
    )


def _close(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.isclose(x.detach().to_dense(), y.detach().to_dense(), equal_nan=True)


def _call(entry: Any, sample: Sample, tensors: Sequence[torch.Tensor], seed: int) -> list[Any]:
    args, kwargs = sample.arguments(tensors)
    seed_everything(seed)
    leaves: list[Any] = pytree.tree_leaves(entry.op(*args, **kwargs))
    return leaves


def _weight(leaf: Any, generator: torch.Generator) -> torch.Tensor | None:
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or leaf.layout is not torch.strided:
        return None
    dtype = torch.complex64 if leaf.is_complex() else torch.float32
    return torch.randn(leaf.shape, generator=generator, dtype=dtype).to(leaf.dtype)


def _gradients(
    leaves: Sequence[Any],
    weights: Sequence[torch.Tensor | None],
    needed: Sequence[torch.Tensor],
    place: Callable[[torch.Tensor, Any], torch.Tensor],
) -> list[torch.Tensor | None]:
    """Of the sum of leaf times weight: that of a leaf is its weight."""
    pairs = [(leaf, place(weight, leaf)) for leaf, weight in zip(leaves, weights) if weight is not None]
    outputs, given = [leaf for leaf, _ in pairs], [weight for _, weight in pairs]
    return list(torch.autograd.grad(outputs, needed, given, allow_unused=True))


# ---- on the cluster ----


class Checker:
    """Runs checks on one session.

    Args:
        mesh: where arguments are put.
        scope: what every call and every backward pass runs in.
    """

    def __init__(
        self, op_stream: OpStream, mesh: DeviceMesh, scope: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._op_stream = op_stream
        self._mesh = mesh
        self._alone = DeviceMesh("cpu", [mesh.devices[0]])
        self._scope = scope

    def alone(self, entry: Any, sample: Sample, plain: Reference) -> Reference:
        """What a random entry gives on a mesh of one device, whose numbers are DTorch's own.

        Raises:
            Exception: what the call raises there.
        """
        placements = [(Replicate(),)] * len(sample.tensors)
        with self._scope():
            leaves, inputs = self._distributed(entry, sample, self._alone, placements)
            _compare(entry, leaves, plain, values=False)
            fetched = [_fetch(leaf)[0] if isinstance(leaf, dtorch.Tensor) else leaf for leaf in leaves]
            fetched = [x.conj_physical().conj() if _is_conj(y) else x for x, y in zip(fetched, leaves)]
            for leaf, given in zip(fetched, leaves):
                if isinstance(given, dtorch.Tensor) and given.requires_grad:
                    leaf.requires_grad_()
            grads = None
            if plain.grads is not None:
                found = self._gradients(leaves, plain.weights, inputs)
                grads = [None if g is None else _fetch(g)[0] for g in found]
        return Reference(fetched, plain.weights, grads)

    def check(
        self, entry: Any, sample: Sample, reference: Reference, placements: Sequence[Placements]
    ) -> Outcome:
        """One combination: ``placements`` has one item for each tensor of the sample."""
        is_whole = not any(isinstance(p, Shard) for each in placements for p in each)
        self._op_stream.take()
        has_communicated = False
        try:
            with self._scope():
                leaves, inputs = self._distributed(entry, sample, self._mesh, placements)
            _flush(leaves)
            has_communicated = self._op_stream.take() > 0
            values = _compare(entry, leaves, reference)
        except Exception as error:  # noqa: BLE001  every error is an outcome
            return Outcome(*describe_error(error, is_whole), has_communicated=has_communicated)
        is_empty = any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in leaves)
        if reference.grads is None or is_empty:
            return Outcome(*values, has_communicated=has_communicated)
        try:
            with self._scope():
                found = self._gradients(leaves, reference.weights, inputs)
            gradients = _compare_gradients(found, reference)
        except Exception as error:  # noqa: BLE001  every error is an outcome
            gradients = describe_error(error, is_whole)
        return Outcome(*values, *gradients, has_communicated)

    def _distributed(
        self, entry: Any, sample: Sample, mesh: DeviceMesh, placements: Sequence[Placements]
    ) -> tuple[list[Any], list[Any]]:
        inputs = []
        for tensor, each in zip(sample.fresh_tensors(), placements, strict=True):
            made: Any = dtorch.from_torch(
                tensor, device_mesh=mesh, placements=each, requires_grad=tensor.requires_grad
            )
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            inputs.append(made)
        return _call(entry, sample, inputs, _CALL_SEED), inputs

    def _gradients(
        self, leaves: Sequence[Any], weights: Sequence[torch.Tensor | None], inputs: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        whole = [_without_partial(leaf) for leaf in leaves]
        return _gradients(whole, weights, [x for x in inputs if x.requires_grad], _placed_like)


def _is_conj(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_conj()


def _flush(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, dtorch.Tensor):
            leaf.graph.flush()


def _without_partial(leaf: Any) -> Any:
    """A partial leaf is summed first, as a user would before a loss."""
    if not isinstance(leaf, dtorch.Tensor) or not leaf._spec.layout.is_partial:
        return leaf
    return leaf.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in leaf.placements]
    )


def _placed_like(weight: torch.Tensor, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, dtorch.Tensor):
        return weight
    return dtorch.from_torch(weight, device_mesh=leaf.device_mesh, placements=leaf.placements)


@lru_cache(maxsize=4096)
def _replicas(layout: Layout) -> tuple[Layout, ...]:
    """Layouts on parts of the mesh, each of which holds the whole value once."""
    ids = torch.tensor(layout.mesh.devices).view(layout.mesh.shape)
    rest = tuple(p for p in layout.placements if not isinstance(p, Replicate)) or (Replicate(),)
    indices: list[Any] = [
        range(size) if isinstance(p, Replicate) else [slice(None)]
        for p, size in zip(layout.placements, layout.mesh.shape)
    ]
    parts: list[Any] = [ids[index].tolist() for index in itertools.product(*indices)]
    return tuple(
        Layout(DeviceMesh("cpu", part if isinstance(part, list) else [part]), rest) for part in parts
    )


def _ask(tensor: Any) -> list[TensorFuture]:
    spec, session = tensor._spec, tensor.graph.session
    return [
        session.fetch(tensor._handle, intern_spec(spec.shape, spec.dtype, layout))
        for layout in _replicas(spec.layout)
    ]


def _fetch(tensor: Any) -> list[torch.Tensor]:
    return [future.get() for future in _ask(tensor)]


#: What a comparison without a fault gives: EQUAL, or ROUNDING and the first difference.
_Verdict: TypeAlias = tuple[str, str]


def _compare(entry: Any, leaves: Sequence[Any], reference: Reference, values: bool = True) -> _Verdict:
    if len(leaves) != len(reference.leaves):
        raise _Differs("structure", f"{len(leaves)} leaves instead of {len(reference.leaves)}")
    for leaf, expected in zip(leaves, reference.leaves):
        _compare_kind(entry, leaf, expected, values)
    if not values or any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in leaves):
        return EQUAL, ""
    asked = [_ask(leaf) if isinstance(leaf, dtorch.Tensor) else None for leaf in leaves]
    verdict = EQUAL, ""
    for index, (leaf, futures, expected) in enumerate(zip(leaves, asked, reference.leaves)):
        if not isinstance(expected, torch.Tensor):
            continue
        for value in [leaf.detach()] if futures is None else [future.get() for future in futures]:
            if entry.name not in _EMPTY:
                found = _judge(value, expected.detach(), lambda i=index: _exact_leaf(reference, i))
                verdict = verdict if verdict[0] == ROUNDING else found
    return verdict


def _exact_leaf(reference: Reference, index: int) -> Any:
    exact = reference.exact()
    return None if exact is None or len(exact.leaves) != len(reference.leaves) else exact.leaves[index]


def _compare_kind(entry: Any, leaf: Any, expected: Any, values: bool) -> None:
    """All but the elements."""
    if not isinstance(expected, torch.Tensor):
        is_number = isinstance(expected, bool | int | float | complex)
        same = not isinstance(leaf, torch.Tensor) and (
            leaf == expected or (leaf != leaf and expected != expected)
        )
        if is_number and values and not same:
            raise _Differs("value", f"{leaf!r} instead of {expected!r}")
        return
    if not isinstance(leaf, torch.Tensor):
        raise _Differs("structure", f"a {type(leaf).__name__} instead of a tensor")
    for name in ("shape", "dtype", "requires_grad", "is_conj", "is_neg"):
        given, wanted = (_asked_for(name, tensor) for tensor in (leaf, expected))
        if given != wanted and not (name == "is_conj" and entry.name in _RESOLVED):
            raise _Differs(name, f"{name} is {given} instead of {wanted}")


def _asked_for(name: str, tensor: torch.Tensor) -> Any:
    found = getattr(tensor, name)
    return found() if callable(found) else found


def _compare_gradients(found: Sequence[Any], reference: Reference) -> _Verdict:
    assert reference.grads is not None
    asked = [None if gradient is None else _ask(gradient) for gradient in found]
    verdict = EQUAL, ""
    for index, (futures, wanted) in enumerate(zip(asked, reference.grads, strict=True)):
        values = [None] if futures is None else [future.get() for future in futures]
        for value in values:
            if value is not None and wanted is not None:
                given = _judge(
                    value, wanted, lambda i=index: _exact_gradient(reference, i), rtol=1e-4, atol=1e-5
                )
                verdict = verdict if verdict[0] == ROUNDING else given
            elif value is not wanted and bool((value if value is not None else wanted).any()):  # type: ignore[union-attr]
                raise _Differs("missing", "None instead of a tensor" if value is None else "not None")
    return verdict


def _exact_gradient(reference: Reference, index: int) -> Any:
    exact = reference.exact()
    return None if exact is None or exact.grads is None else exact.grads[index]


def _judge(
    value: torch.Tensor, expected: torch.Tensor, exact: Callable[[], Any], **tolerances: float
) -> _Verdict:
    if value.dtype != expected.dtype or value.shape != expected.shape:
        raise _Differs(
            "shape", f"fetched {value.dtype}{list(value.shape)} for {expected.dtype}{list(expected.shape)}"
        )
    difference = _difference(value, expected, **tolerances)
    if difference is None:
        return EQUAL, ""
    if is_rounding(value, expected, exact()):
        return ROUNDING, " ".join(difference.split())[:_MESSAGE_LENGTH]
    raise _Differs("value", difference)


def _difference(value: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> str | None:
    try:
        torch.testing.assert_close(value, expected, equal_nan=True, check_stride=False, **tolerances)
    except AssertionError as error:
        return str(error)
    return None


def describe_error(error: Exception, is_whole: bool) -> tuple[str, str]:
    """Category and message of what a check ended in."""
    if isinstance(error, _Differs):
        category = error.category
    elif isinstance(error, PlacementError):
        category = REFUSED_WHOLE if is_whole else REFUSED
    elif isinstance(error, ClusterTimeout) or "ClusterTimeout" in str(error):
        category = "hang"
    elif isinstance(error, InfrastructureError):
        category = "crash"
    else:
        category = type(error).__name__
    message = error.failure.message if isinstance(error, RemoteOpError) else str(error)
    if isinstance(error, RemoteOpError):
        message = f"{error.failure.op}: {error.failure.error_type}: {message}"
    return category, " ".join(message.split())[:_MESSAGE_LENGTH]
