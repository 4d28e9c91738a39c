"""The ATen calls that PyTorch's operator database reaches, forward and backward, as samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.rule_checks import Sample, tensors_of

#: Larger tensors take long and show nothing more.
_MAX_ELEMENTS = 4096


class _Recorder(TorchDispatchMode):
    """Notes each call with copies of its arguments from before it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and tensors_of((list(args), kwargs)):
            self.calls.append((func, tree_map(_copy, args), tree_map(_copy, kwargs)))
        return func(*args, **kwargs)


def _copy(value: Any) -> Any:
    """A tensor of its own with the same strides."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.utils._python_dispatch._disable_current_modes():
        return value.detach().clone()


def entries(names: Iterable[str] = ()) -> list[str]:
    """The names of the database's entries that take float32; all, or those of these ops."""
    wanted = set(names)
    return [
        name_of(info)
        for info in op_db
        if torch.float32 in info.supported_dtypes("cpu")
        and (not wanted or {info.name, name_of(info)} & wanted)
    ]


def name_of(info: Any) -> str:
    """The name of an entry with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def captured_calls(entry: str, num_samples: int) -> Iterator[Sample]:
    """Each overload that an entry reaches, once for each combination of ranks, dtypes and constants."""
    info = next(info for info in op_db if name_of(info) == entry)
    seen: set[Any] = set()
    for func, args, kwargs in _record(info, num_samples):
        tensors = tensors_of((list(args), kwargs))
        key = (func, tuple((t.ndim, t.dtype) for t in tensors), repr(_constants((args, kwargs))))
        if key not in seen and all(map(_is_plain, tensors)):
            seen.add(key)
            yield Sample(func, _maker(args), kwargs)


def _record(info: Any, num_samples: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    recorder = _Recorder()
    for sample in itertools.islice(_samples(info), num_samples):
        torch.manual_seed(0)
        try:
            with recorder:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                total = [
                    t.sum() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
                ]
                if total:
                    sum(total).abs().backward()
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue  # the plain op refuses the sample, or has no derivative
    return recorder.calls


def _samples(info: Any) -> Iterator[Any]:
    try:
        yield from info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    except (RuntimeError, NotImplementedError, ImportError):
        return  # needs what this build of torch lacks


def _is_plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized and not t.is_conj() and t.numel() <= _MAX_ELEMENTS


def _constants(value: Any) -> Any:
    return tree_map(lambda v: "T" if isinstance(v, torch.Tensor) else v, value)


def _maker(args: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(tree_map(_copy, args))
