"""Random programs under ``dtorch.capture``: replays give the same bits as eager calls, whatever passes are chosen.

So do eager calls on a graph that finds what repeats by itself.

Many: ``python -m tests.numerics.programs.captured --count 200``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

import dtorch
from dtorch_runtime.errors import RemoteOpError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate, Shard
from dtorch_runtime.local import LocalCluster, start_local_cluster
from dtorch_runtime.settings import PASS_NAMES, Settings
from tests.numerics.programs.execute import Difference, Program, run
from tests.numerics.programs.generate import MAX_DEVICES, write_and_run
from tests.numerics.programs.sides import dtorch_side

#: Every subset of the passes, as the setting has it.
SUBSETS = (
    "none",
    *(
        ",".join(names)
        for size in range(1, len(PASS_NAMES) + 1)
        for names in itertools.combinations(PASS_NAMES, size)
    ),
)
#: So many of them are tried on each program of many, and all passes together.
NUM_SUBSETS = 8
_COUNTED = re.compile(r"(\w+) (?:removed|joined|moved|changed) (\d+)")
_INPUT = re.compile(r"v\d+ = make\(")
_ASSIGNED = re.compile(r"v(\d+) = (.*)")
_NAME = re.compile(r"\b[vwr]\d+\b")
_TARGETS = re.compile(r"[vwr]\d+(, [vwr]\d+)* = ")
_REFUSED = re.compile(r"<string>:(\d+) in function")
_WAIT_S = 60.0


@dataclass(frozen=True)
class Function:
    """A program as a function of the tensors that it makes at its beginning.

    Attributes:
        inputs: the lines that make them.
        body: the other lines; some of them are there twice, and values go to other placements and back.
        results: the variables that it returns.
    """

    mesh_shape: tuple[int, ...]
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, rng: random.Random) -> Function:
        """Of the lines that both sides take, and more."""
        lines = run(program)
        inputs = tuple(line for line in lines if _INPUT.match(line))
        body: list[str] = []
        for line in lines[len(inputs) :]:
            body.append(line)
            made = _ASSIGNED.match(line)
            if made is not None and rng.random() < 0.5:
                body.append(f"w{made[1]} = {made[2]}")
            if made is not None and rng.random() < 0.5:
                body.append(f"r{made[1]} = there_and_back(v{made[1]}, {rng.random() < 0.5})")
        names = dict.fromkeys(match[0] for line in body if (match := _NAME.match(line)))
        return cls(program.mesh_shape, inputs, tuple(body), tuple(n for n in names if rng.random() < 0.7))

    def without(self, number: int) -> Function:
        """Without a line of the body, from 0, and without those that need what it makes."""
        body = []
        known = {_NAME.match(line)[0] for line in self.inputs}  # type: ignore[index]  # it matches
        for index, line in enumerate(self.body):
            made = _TARGETS.match(line)
            needed = _NAME.findall(line[made.end() :] if made is not None else line)
            if index != number and known.issuperset(needed):
                body.append(line)
                known.update(_NAME.findall(made[0]) if made is not None else ())
        return replace(self, body=tuple(body), results=tuple(name for name in self.results if name in known))

    @property
    def source(self) -> str:
        names = [line.partition(" ")[0] for line in self.inputs]
        kept = [name for name in self.results if f"del {name}" not in self.body]
        results = f"return {{{', '.join(f'{name!r}: {name}' for name in kept)}}}"
        return "\n    ".join((f"def function({', '.join(names)}):", *self.body, results))

    def call(self, *, captured: bool) -> tuple[list[dict[str, torch.Tensor]], str]:
        """What each of three calls with new inputs gives, and what ``explain`` says."""
        mesh, names = self._names()
        function = names["function"]
        if captured:
            function = dtorch.capture(fallback=True)(function)
        with dtorch.Graph.default_graph().device_mesh_guard(mesh):
            results = [self._results(function, names) for _ in range(3 if captured else 1)]
        return results, dtorch.capture.explain(function) if captured else ""

    def call_again(self) -> tuple[list[dict[str, torch.Tensor]], int]:
        """What each of six eager calls gives on a graph that looks for repeats, and how many runs it replayed."""
        mesh, names = self._names()
        with dtorch.Graph(auto_capture=True) as graph, graph.device_mesh_guard(mesh):
            results = [self._results(names["function"], names) for _ in range(6)]
            assert graph.replayer is not None
            graph.replayer.validate()
            return results, graph.replayer.num_replays

    def _names(self) -> tuple[DeviceMesh, dict[str, Any]]:
        """The mesh, and the function with everything that it uses."""
        shape = self.mesh_shape
        mesh = DeviceMesh.from_flat("cpu", shape, range(math.prod(shape)))
        names = dtorch_side(mesh)
        names["drawn"] = lambda seed, draw, x: draw(x.clone())  # seeds are set outside
        names["there_and_back"] = _there_and_back
        exec(self.source, names)
        return mesh, names

    def _results(self, function: Any, names: dict[str, Any]) -> dict[str, torch.Tensor]:
        exec("\n".join(self.inputs), names)
        given = {name: names[name] for name in (line.partition(" ")[0] for line in self.inputs)}
        dtorch.manual_seed(5)
        found = {**given, **function(*given.values())}
        gradients = {f"{name}.grad": x.grad for name, x in given.items() if x.grad is not None}
        return {
            name: value.to_torch(_WAIT_S)
            for name, value in (found | gradients).items()
            if isinstance(value, dtorch.Tensor)
        }


def _there_and_back(x: Any, twice: bool) -> Any:
    if not x.ndim:
        return x
    mesh = x.device_mesh
    for placements in ([Replicate()], [Shard(0)], [Replicate()], x.placements)[2 * (not twice) :]:
        x = x.redistribute(placements=placements if len(placements) == mesh.ndim else placements * mesh.ndim)
    return x


def capturable(function: Function) -> Function:
    """The function without what cannot be captured."""
    for _ in range(len(function.body)):
        _, text = function.call(captured=True)
        refused = _REFUSED.search(text)
        if refused is None:
            break
        function = function.without(int(refused[1]) - 2)
    return function


@contextmanager
def session(cluster: LocalCluster, passes: str) -> Iterator[None]:
    """A client that wants these passes, and has the controller check the bodies."""
    settings = Settings(passes=passes)
    with dtorch.connect(cluster.address, session_key=cluster.session_key, settings=settings):
        yield


class _NoProgram(Exception):
    """Drawn with other seeds than in the program, what is not zero is of another number than a line relies on."""


def _write(cluster: LocalCluster, rng: random.Random) -> tuple[Function, dict[str, torch.Tensor]]:
    """A function, and what it gives without being captured."""
    with session(cluster, "none"):
        program, difference = write_and_run(rng, "strict")
        if difference is not None:
            raise difference
        function = Function.of(program, rng)
        try:
            function.call(captured=False)
        except RemoteOpError:
            raise _NoProgram from None
        function = capturable(function)
        [expected], _ = function.call(captured=False)
        return function, expected


def check(cluster: LocalCluster, rng: random.Random, subsets: Sequence[str] = SUBSETS) -> Counter[str]:
    """Write a program, and compare its replays with eager calls; how many were replayed, and what passes removed.

    Args:
        subsets: of the passes; the last one is counted.

    Raises:
        Difference: a replay differs.
    """
    try:
        function, expected = _write(cluster, rng)
    except _NoProgram:
        return Counter(no_program=1)
    counts: Counter[str] = Counter()
    for passes in subsets:
        with session(cluster, passes):
            results, text = function.call(captured=True)
        for number, found in enumerate(results):
            _compare(found, expected, f"call {number} with passes {passes} of\n{function.source}\n{text}")
    with session(cluster, "all"):
        again, num_replays = function.call_again()
    for number, found in enumerate(again):
        _compare(
            found, expected, f"eager call {number} on a graph that looks for repeats, of\n{function.source}"
        )
    counts["found"] = int(num_replays > 0)
    counts["replayed"] = int("1 recording, 2 replays" in text)
    counts.update(
        {
            name: int(count)
            for name, count in re.findall(r"(\w+) (?:removed|joined|moved|changed) (\d+)", text)
        }
    )
    return counts


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    if found.keys() != expected.keys():
        raise Difference("other results", f"{sorted(found)} for {sorted(expected)} in {what}")
    for name, value in expected.items():
        try:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise Difference("another value", f"{name}: {error}\nin {what}") from error


def main(arguments: list[str]) -> int:
    """Check many programs; 1 when one of them differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.programs.captured", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    cluster = start_local_cluster(2, MAX_DEVICES // 2, Settings(check=True))
    try:
        cluster.wait_ready()
        for number in tqdm(range(options.count), unit="program", dynamic_ncols=True):
            try:
                rng = random.Random(f"{options.seed} {number}")
                counts += check(cluster, rng, (*rng.sample(SUBSETS, NUM_SUBSETS), "all"))
            except Difference as difference:
                counts["differences"] += 1
                print(f"program {number}: {difference}")
    finally:
        cluster.stop()
    print(dict(counts))
    return int(bool(counts["differences"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
