"""Runs a program line by line on both sides, and compares every variable at its end."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

import dtorch
from dtorch_runtime.errors import PlacementError, RemoteOpError
from dtorch_runtime.ir.mesh import DeviceMesh
from tests.numerics.programs.sides import dtorch_side, plain_side

Mode = Literal["strict", "auto"]
_WAIT_S = 60.0
_OVERLAP = "refer to a single memory location"
_VARIABLE = re.compile(r"v\d+")


@dataclass(frozen=True)
class Program:
    """Lines of Python, and the mesh that they run on."""

    mesh_shape: tuple[int, ...]
    mode: Mode
    lines: tuple[str, ...]

    def __str__(self) -> str:
        lines = "\n".join(f"        {line!r}," for line in self.lines)
        return (
            "from tests.numerics.programs.execute import Program, run\n\n"
            f"run(\n    Program(\n        {self.mesh_shape},\n        {self.mode!r},\n        (\n"
            + "\n".join(f"    {line}" for line in lines.splitlines())
            + "\n        ),\n    )\n)"
        )


class Difference(Exception):
    """The sides differ.

    Attributes:
        kind: what differs, in a word or two; the same for the same fault.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Ended(Exception):
    """Nothing can be compared any more: both sides have refused a write, DTorch's when it was under way."""


class Run:
    """A program under way.

    Attributes:
        plain, remote: the variables of the sides.
    """

    def __init__(self, mesh_shape: tuple[int, ...], mode: Mode) -> None:
        self._mesh = DeviceMesh.from_flat("cpu", mesh_shape, range(math.prod(mesh_shape)))
        self._mode = mode
        self._has_short_floats = False
        list(unread_failures())  # of the program before this one, which has differed
        self.plain = plain_side()
        self.remote = dtorch_side(self._mesh)

    def step(self, line: str) -> bool:
        """Run one line on both sides; False when it is refused, by both or, in strict mode, by DTorch.

        Raises:
            Difference: only one of the sides takes it.
        Ended: DTorch refuses it later than torch does.
        """
        code = compile(line, "<program>", "exec")
        refused = _error_of(code, self.remote, self._scope())
        if self._mode == "strict" and isinstance(refused, PlacementError):
            if line.startswith("backward"):
                for tensor in _tensors(self.remote).values():
                    tensor.grad = None
            self._look_at_history()
            return False
        expected = _error_of(code, self.plain, nullcontext())
        if refused is not None and expected is None:
            raise Difference(f"raises {type(refused).__name__}", f"{line}\n{refused}") from refused
        if refused is None and expected is not None:
            self._check_late_refusal(line, expected)
            raise Ended
        self._has_short_floats |= any(value.dtype is torch.float32 for value in _tensors(self.plain).values())
        return refused is None

    def _look_at_history(self) -> None:
        """Torch refuses a write through a view of what has a history since, unless somebody has looked at that.

        A line that was refused on the way has, on one side.
        """
        for side in (self.plain, self.remote):
            for tensor in _tensors(side).values():
                is_leaf(tensor)

    def _check_late_refusal(self, line: str, expected: Exception) -> None:
        """A kernel may refuse what the client let through; the error is in the values then."""
        if _OVERLAP in str(expected) and self._mode == "auto":
            return  # DTorch has computed with a converted copy of what overlaps
        try:
            for tensor in _tensors(self.remote).values():
                if isinstance(tensor, dtorch.Tensor):
                    tensor.to_torch(_WAIT_S)
        except RemoteOpError:
            list(unread_failures())
            return
        raise Difference("does not raise", f"{line}\n{type(expected).__name__}: {expected}") from expected

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Where DTorch's side runs: what names no mesh is made on the program's."""
        auto = dtorch.auto_redistribute() if self._mode == "auto" else nullcontext()
        with auto, dtorch.Graph.default_graph().device_mesh_guard(self._mesh):
            yield

    def compare(self) -> None:
        """Compare all variables and gradients, and look for failures that none of them shows.

        Raises:
            Difference: they are not the same, or an op has failed.
        """
        with self._scope():
            pairs = list(self._pairs())
            futures = [found.value() for _, _, found in pairs]
        for (name, expected, _), future in zip(pairs, futures, strict=True):
            try:
                found = future.get(_WAIT_S)
            except dtorch.DTorchError as error:
                raise Difference(f"{type(error).__name__} at its end", f"{name}: {error}") from error
            rough = 1e-3 if self._has_short_floats else 1e-7
            is_exact = not (expected.is_floating_point() or expected.is_complex())
            tolerance = 0.0 if is_exact else rough
            try:
                torch.testing.assert_close(
                    found, expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
                )
            except AssertionError as error:
                raise Difference(
                    "another value", f"{name}: {error}\nfound {found}\nexpected {expected}"
                ) from error
        for unread in unread_failures():
            raise Difference("a failure that no value shows", str(unread)) from unread

    def _pairs(self) -> Iterable[tuple[str, torch.Tensor, Any]]:
        remote = _tensors(self.remote)
        for name, expected in _tensors(self.plain).items():
            found: Any = remote[name]
            for what in ("shape", "dtype", "requires_grad"):
                if getattr(found, what) != getattr(expected, what):
                    raise Difference(
                        f"another {what}", f"{name}: {getattr(found, what)} for {getattr(expected, what)}"
                    )
            bits, wanted = ((x.is_conj(), x.is_neg()) for x in (found, expected))
            if bits != wanted:
                raise Difference("another bit", f"{name}: is_conj and is_neg are {bits} for {wanted}")
            yield name, expected, found
            if is_leaf(expected):
                if (found.grad is None) != (expected.grad is None):
                    raise Difference("a gradient", f"{name}: {found.grad} for {expected.grad}")
                if expected.grad is not None:
                    yield f"{name}.grad", expected.grad, found.grad


def run(program: Program) -> tuple[str, ...]:
    """Run a program, and return the lines that both sides took.

    Raises:
        Difference: the sides differ.
    """
    started = Run(program.mesh_shape, program.mode)
    taken = []
    try:
        for line in program.lines:
            if started.step(line):
                taken.append(line)
    except Ended:
        return tuple(taken)
    started.compare()
    return tuple(taken)


def unread_failures() -> Iterator[RemoteOpError]:
    """Wait for every op, and give the failures that no fetched value has shown; they are not told again."""
    while True:
        try:
            dtorch.Graph.default_graph().sync(_WAIT_S)
        except RemoteOpError as error:
            yield error
        else:
            return


def shrink(program: Program, kind: str) -> tuple[Program, Difference]:
    """The shortest program that is found by leaving out lines one after the other and still differs in this way."""
    best = program
    lines = list(program.lines)
    for index in itertools.chain(*(reversed(range(len(lines))) for _ in range(2))):
        if index >= len(lines):
            continue
        shorter = Program(program.mesh_shape, program.mode, (*lines[:index], *lines[index + 1 :]))
        if _difference(shorter, kind) is not None:
            best, lines = shorter, list(shorter.lines)
    for index, line in enumerate(lines):
        simpler = re.sub(r"\[(Shard|Partial)\([^]]*\](?=, (True|False)\))", _replicated, line)
        changed = Program(program.mesh_shape, program.mode, (*lines[:index], simpler, *lines[index + 1 :]))
        if simpler != line and _difference(changed, kind) is not None:
            best, lines = changed, list(changed.lines)
    found = _difference(best, kind)
    return best, found if found is not None else Difference(kind, "it does not come again")


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor's gradient is kept. To ask so of a view that a write has made invalid is an error in torch."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _replicated(placements: re.Match[str]) -> str:
    return f"[{', '.join(['Replicate()'] * (placements.group().count('), ') + 1))}]"


def _difference(program: Program, kind: str) -> Difference | None:
    try:
        run(program)
    except Difference as difference:
        return difference if difference.kind == kind else None
    return None


def _error_of(code: Any, names: dict[str, Any], scope: AbstractContextManager[object]) -> Exception | None:
    try:
        with scope:
            exec(code, names)  # the program's own lines
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared
        return error
    return None


def _tensors(names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in names.items()
        if _VARIABLE.fullmatch(name) and isinstance(value, torch.Tensor)
    }
