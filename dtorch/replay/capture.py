"""``dtorch.capture``: a function whose ops are recorded the first time, and issued as one record afterwards."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, overload
from weakref import WeakSet

from dtorch.graph import Graph
from dtorch.insight.drawing import dump
from dtorch.replay.arguments import Arguments
from dtorch.replay.call import NotReplayable
from dtorch.replay.found import explain_runs
from dtorch.replay.plan import Plan, Recorder, Unsettled
from dtorch.replay.signatures import Signature, Signatures
from dtorch.replay.watch import function_name
from dtorch_runtime.errors import CaptureError, UnsupportedError

if TYPE_CHECKING:  # only for types
    from dtorch.connection import Session

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Calls that may change what the next one sees: a program's first ones make state that the later ones find.
_MAX_UNSETTLED = 3


class Captured(Generic[_P, _R]):
    """A function under ``dtorch.capture``. Called like the function."""

    __wrapped__: Callable[_P, _R]

    def __init__(self, function: Callable[_P, _R], *, fallback: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self._fallback = fallback
        self._name = function_name(function)
        self._signatures = Signatures()
        _all.add(self)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        arguments = Arguments(self._name, args, kwargs)
        graph = arguments.graph
        key = arguments.key(graph)
        signature = self._signatures.get(key)
        if signature is None:
            objects = tuple(id(value) for _, value in arguments.objects)
            signature = self._signatures.add(key, Signature(str(arguments), graph, objects))
        signature.use()
        for plan in signature.plans:
            if plan.is_current(arguments.leaves):
                signature.num_replays += 1
                graph.last_call = plan.shown
                tape = graph.session.tape
                if tape is not None:
                    with tape.span(f"replay of {self._name}"):
                        return plan.replay(arguments.leaves)  # type: ignore[no-any-return]  # as below
                return plan.replay(arguments.leaves)  # type: ignore[no-any-return]  # what the function returns
        if graph.recording is not None or signature.is_given_up:
            signature.num_eager += 1
            return self.__wrapped__(*args, **kwargs)
        graph.session.check_open()
        return self._record(signature, arguments, args, kwargs)

    def _record(
        self, signature: Signature, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _R:
        if signature.plans:
            reason = signature.plans[-1].change(arguments.leaves)
            signature.reasons.append(f"recorded again: {reason}")
        recorder = Recorder(self._name, self.__wrapped__, arguments, raises=not self._fallback)
        try:
            result: _R = recorder.run(args, kwargs)
            plan = recorder.plan(result)
        except NotReplayable as reason:
            self._give_up(signature, reason)
        else:
            signature.keep(plan)
            signature.graph.last_call = plan.shown
            self._name_calls(plan, signature.graph)
        finally:
            recorder.close()
        return result

    def dump(self, path: str | os.PathLike[str] | None) -> str:
        """Draw the ops of the latest recording."""
        shown = [each.plans[-1].shown for each in self._signatures.values() if each.plans]
        if not shown:
            raise CaptureError(f"{self._name} has no recording to draw; call it first")
        return dump(list(shown[-1].shown(shown[-1].kept)), path)

    def _name_calls(self, plan: Plan, graph: Graph) -> None:
        """Under which names the calls show in a profile."""
        names = graph.session.names
        names[plan.call.template] = self._name
        if plan.backward is not None:
            names[plan.backward.call.template] = f"{self._name}, backward"

    def counts(self, session: Session) -> tuple[int, int]:
        """Calls in a session that were replayed, and that were recorded."""
        found = [each for each in list(self._signatures.values()) if each.graph.session is session]
        return sum(each.num_replays for each in found), sum(each.num_recordings for each in found)

    def _give_up(self, signature: Signature, reason: NotReplayable) -> None:
        signature.num_eager += 1
        signature.reasons.append(f"not recorded: it {reason}")
        if isinstance(reason, Unsettled):
            signature.num_unsettled += 1
            if signature.num_unsettled < _MAX_UNSETTLED:
                return
        if not self._fallback:
            signature.num_unsettled = 0
            raise CaptureError(
                f"{self._name} cannot be captured: it {reason}. Or write @dtorch.capture(fallback=True) to run such "
                f"calls as they are"
            ) from None
        signature.is_given_up = True

    def explain(self) -> str:
        """What was recorded, how often it was replayed, and why it was recorded again."""
        lines = [f"{self._name}:" if self._signatures else f"{self._name}: not called yet"]
        for signature in self._signatures.values():
            lines.append(
                f"  ({signature.text}): {_count(len(signature.plans), 'recording')}, "
                f"{_count(signature.num_replays, 'replay')}, {_count(signature.num_eager, 'call')} without"
            )
            lines += [f"    {plan}" for plan in signature.plans]
            lines += [f"    {reason}" for reason in dict.fromkeys(signature.reasons)]
        return "\n".join(lines)


#: Every captured function that is alive.
_all: WeakSet[Captured[Any, Any]] = WeakSet()


def count_calls(session: Session) -> tuple[int, int]:
    """Calls of captured functions in a session that were replayed, and that were recorded."""
    counts = [captured.counts(session) for captured in list(_all)]
    return sum(replays for replays, _ in counts), sum(recordings for _, recordings in counts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _Capture:
    """``dtorch.capture``: a decorator, and what it can tell."""

    @overload
    def __call__(self, function: Callable[_P, _R], /) -> Captured[_P, _R]: ...

    @overload
    def __call__(
        self, function: None = None, /, *, fallback: bool = False
    ) -> Callable[[Callable[_P, _R]], Captured[_P, _R]]: ...

    def __call__(self, function: Any = None, /, *, fallback: bool = False) -> Any:
        """Record what a function issues when it is called first, and issue it as one record afterwards.

        A decorator, ``@dtorch.capture`` or ``@dtorch.capture(fallback=True)``; also ``capture(model)``. A later call
        with arguments of the same kind runs no Python of the function: it sends one message and returns symbols at
        once. Works for forward passes (their derivatives are captured too), for whole training steps, and in one
        another. Random ops draw fresh numbers each time, the same as if nothing had been captured.

        A call is recorded anew when a replay would not do the same: other shapes, dtypes, placements, numbers or
        strings among the arguments, other modes of torch, or other values in what the function reaches: closures,
        globals, modules and their attributes (``training`` among them), containers, optimizers.
        ``capture.explain(function)`` says so.

        Args:
            function: takes and returns tensors, numbers, strings, and lists, tuples and dicts of them; may take
                modules and other objects. It must not depend on anything else that changes: files, clocks, Python's
                random numbers.
            fallback: run calls that cannot be replayed as they are, instead of raising.

        Raises:
            CaptureError: at a call that reads a value, sends a tensor of this process, keeps what it makes for later,
                or uses tensors that cannot be found again.
            UnsupportedError: the function is a coroutine or a generator.
        """
        if function is None:
            return functools.partial(self, fallback=fallback)
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise UnsupportedError(
                f"dtorch.capture takes a plain function, {function_name(function)} is a coroutine or a generator. "
                f"Capture what lies between two awaits as a function of its own"
            )
        if not callable(function):
            raise CaptureError(
                f"dtorch.capture takes a function, got {function!r}. Write @dtorch.capture above a def"
            )
        return Captured(function, fallback=fallback)

    def explain(self, function: Any) -> str:
        """What was recorded of a captured function, how often it was replayed, and why it was recorded again.

        Of a ``Graph``: the runs of ops that ``auto_capture`` has found in it, how often each was replayed, and why it
        was broken off.

        Raises:
            CaptureError: the function is not captured.
        """
        if isinstance(function, Graph):
            return explain_runs(function)
        return _captured(function).explain()

    def dump(self, function: Any, path: str | os.PathLike[str] | None = None) -> str:
        """Draw what the latest recording of a captured function issues; see ``Graph.dump`` for paths.

        Raises:
            CaptureError: the function is not captured, or was not recorded yet.
            SettingError: as ``Graph.dump``.
        """
        return _captured(function).dump(path)


def _captured(function: Any) -> Captured[Any, Any]:
    found = getattr(function, "__func__", function)
    if not isinstance(found, Captured):
        raise CaptureError(f"{function_name(function)} is not captured. Write @dtorch.capture above it")
    return found


capture: Final = _Capture()
