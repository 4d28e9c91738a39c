"""The kinds of calls that a captured function has seen, and how many of them are kept.

A recording holds on to the tensors and objects that it depends on, also to those on the cluster: what a program does
not use any more must go.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

from dtorch.graph import Graph
from dtorch.replay.plan import Plan

#: Recordings of one signature that are kept, for a model that goes back and forth between train and eval.
_MAX_PLANS: Final = 4
#: Different objects among the arguments, such as the key/value caches of one answer after the other.
_MAX_OBJECTS: Final = 4
_MAX_SIGNATURES: Final = 256

_count = itertools.count(1).__next__


@dataclass(slots=True)
class Signature:
    """Calls of one kind.

    Attributes:
        text: the arguments, for people.
        objects: the identities of those that are no tensors, constants or containers.
        reasons: why calls were not replayed, oldest first.
        last_use: a number that rises with every use.
    """

    text: str
    graph: Graph
    objects: tuple[int, ...]
    plans: list[Plan] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_replays: int = 0
    num_recordings: int = 0
    num_unsettled: int = 0
    num_eager: int = 0
    is_given_up: bool = False
    last_use: int = 0

    def use(self) -> None:
        """It was called."""
        self.last_use = _count()

    def keep(self, plan: Plan) -> None:
        """Keep a recording, and the latest of those before it."""
        self.num_unsettled = 0
        self.num_recordings += 1
        self.plans = [*self.plans[1 - _MAX_PLANS :], plan]


class Signatures(dict[Any, Signature]):
    """Signatures by key."""

    def add(self, key: Any, signature: Signature) -> Signature:
        """A new one. Those of closed sessions go, and the ones that were not used for longest."""
        for old in [old for old, found in self.items() if not found.graph.session.is_open]:
            del self[old]
        last_use: dict[tuple[int, ...], int] = {}
        for found in self.values():
            last_use[found.objects] = max(found.last_use, last_use.get(found.objects, 0))
        if signature.objects and signature.objects not in last_use:
            known = sorted((use, objects) for objects, use in last_use.items() if objects)
            gone = (
                {objects for _, objects in known[: 1 - _MAX_OBJECTS]} if len(known) >= _MAX_OBJECTS else set()
            )
            for old in [old for old, found in self.items() if found.objects in gone]:
                del self[old]
        while len(self) >= _MAX_SIGNATURES:
            del self[min(self, key=lambda old: self[old].last_use)]
        self[key] = signature
        return signature
