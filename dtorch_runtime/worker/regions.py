"""Regions: elementwise ops of a captured call as one kernel, which is compiled while it already runs op by op.

A region runs op by op until a thread in the background has compiled it for tensors of these shapes and strides; then
it runs compiled. Where compiling fails, regions of this process stay as they are, and its log says so once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import torch

from dtorch_runtime.wire.records import RegionArg, TemplateRecord
from dtorch_runtime.worker.arguments import BoundRegion, Expressions
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.kernels import find_kernel, kernel

#: What a region computes: tensors to a tuple of tensors.
Function: TypeAlias = Callable[..., Sequence[torch.Tensor]]

#: A region whose inputs are all smaller is not compiled: the compiled one's call costs more than it saves.
MIN_ELEMENTS: Final = 16 * 1024
_MAX_KNOWN: Final = 1024

_log = logging.getLogger(__name__)


class Compiler(Protocol):
    """Makes a quicker function that gives the same, but for rounding."""

    def compile(self, function: Function, inputs: Sequence[torch.Tensor]) -> Function:
        """The function for tensors of the shapes, strides, dtypes and devices of ``inputs``. May take long.

        Raises:
            Exception: it cannot be compiled here, for whatever reason.
        """


class EagerCompiler:
    """Compiles nothing."""

    def compile(self, function: Function, inputs: Sequence[torch.Tensor]) -> Function:
        return function


class InductorCompiler:
    """TorchInductor, in the calling thread and without processes of its own. Needs a C++ compiler, or Triton."""

    def compile(self, function: Function, inputs: Sequence[torch.Tensor]) -> Function:
        # Imported here, because it takes seconds and few sessions compile.
        from torch import _inductor
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(function)(*inputs)
        # The number of threads is that of the worker that calls, not of the thread that compiles.
        options = {"compile_threads": 1, "cpp.dynamic_threads": True}
        compiled: Function = _inductor.compile(graph, list(inputs), options=options)
        return compiled


class Compilation:
    """What becomes of a function; ``result`` is there when it is compiled."""

    __slots__ = ("result",)

    def __init__(self) -> None:
        self.result: Function | None = None


class Background:
    """Compiles one function after the other, on a thread that lives while there is one.

    Args:
        compiler: how.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._changed = threading.Condition()
        #: By what is compiled. What is equal is compiled once, for all devices of a kind.
        self._known: dict[Hashable, Compilation] = {}
        self._waiting: deque[tuple[Compilation, Function, list[torch.Tensor]]] = deque()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def ask(self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor]) -> Compilation:
        """Have a function compiled for tensors like ``inputs``, unless an equal one was."""
        with self._changed:
            found = self._known.get(key)
            if found is not None:
                return found
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = Compilation()
            with torch.inference_mode(False):
                examples = [
                    torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
                ]
            self._waiting.append((found, function, examples))
            if self._thread is None:
                # A daemon: nobody waits for a compiler when the process ends.
                self._thread = threading.Thread(target=self._run, name="dtorch-compile", daemon=True)
                self._thread.start()
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to compile and the thread has ended; whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                compilation, function, examples = self._waiting.popleft()
            try:
                compilation.result = self._compiler.compile(function, examples)
            except Exception as error:  # noqa: BLE001  the function runs as it is
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "captured ops are not compiled on this node, and run one by one: %s: %s. Compiling needs a C++ "
                "compiler for CPU devices and Triton for CUDA devices; DTORCH_COMPILE=0 asks for none",
                type(error).__name__,
                str(error).partition("\n")[0],
            )


#: Of this process, as the compiler is. Tests put another one here.
background = Background(InductorCompiler())


class Region:
    """A region on one device."""

    def __init__(
        self, arg: RegionArg, steps: Sequence[Callable[..., torch.Tensor]], function: Function
    ) -> None:
        self._arg = arg
        self._steps = steps
        self._function = function
        self._key = msgspec.msgpack.encode(arg)
        #: For inputs of which shapes and strides it is, or is to be, compiled.
        self._kind: Hashable = None
        self._compilation: Compilation | None = None

    def __call__(self, *inputs: Any) -> Any:
        """The results, or the one; a result that depends on a poison is that."""
        if any(isinstance(value, Poison) for value in inputs):
            results: Sequence[Any] = self._around_poison(inputs)
        else:
            results = self._choose(inputs)(*inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _choose(self, inputs: Sequence[torch.Tensor]) -> Function:
        kind = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
        if kind != self._kind:
            self._kind, self._compilation = kind, None
            if max((x.numel() for x in inputs), default=0) >= MIN_ELEMENTS:
                key = (self._key, kind, inputs[0].device)
                self._compilation = background.ask(key, self._function, inputs)
        compilation = self._compilation
        return self._function if compilation is None or compilation.result is None else compilation.result

    def _around_poison(self, inputs: Sequence[Any]) -> list[Any]:
        values = list(inputs)
        for step, run in zip(self._arg.steps, self._steps, strict=True):
            given = [values[place] for place in step.inputs]
            poison = next((value for value in given if isinstance(value, Poison)), None)
            values.append(run(*given) if poison is None else poison)
        return [values[place] for place in self._arg.outputs]


def make_region(bound: BoundRegion) -> Region:
    """The region of a template on one device.

    Raises:
        InternalFailure: an op is unknown or its arguments contradict themselves.
    """
    arg = bound.arg
    steps = [_step(bound, place) for place in range(len(arg.steps))]

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for step, run in zip(arg.steps, steps, strict=True):
            values.append(run(*[values[place] for place in step.inputs]))
        return tuple(values[place] for place in arg.outputs)

    return Region(arg, steps, function)


def _step(bound: BoundRegion, place: int) -> Callable[..., torch.Tensor]:
    step = bound.arg.steps[place]
    record = TemplateRecord(0, step.op, step.args, step.kwargs, len(step.inputs), 1, 0, [])
    names = [f"x{index}" for index in range(len(step.inputs))]
    expressions = Expressions(record, names, [], bound.meshes, bound.device, bound.torch_device, [])
    text = expressions.arguments()
    constants = {f"c{index}": value for index, value in enumerate(expressions.constants)}
    namespace: dict[str, Any] = {"fn": find_kernel(step.op).function, **constants}
    found: Callable[..., torch.Tensor] = eval(f"lambda {', '.join(names)}: fn({text})", namespace)
    return found


@kernel("region")
def region(bound: BoundRegion, *inputs: Any) -> Any:
    """Run a region."""
    run = bound.run
    if run is None:
        run = bound.run = make_region(bound)
    return run(*inputs)
