"""Failure records: what a worker says about an op that could not run."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from dtorch_runtime.wire.records import FailureRecord


class SessionEnded(Exception):
    """Ends what a worker does for a session that is over. Never leaves the worker."""


class InternalFailure(Exception):
    """Something that the client and the controller should have made impossible."""


class PeerLost(Exception):
    """A device that should have taken part in an exchange is gone with its node."""


@dataclass(frozen=True, slots=True)
class OpSite:
    """Where an op record stands: enough to name its failure the same way on every device."""

    session: int
    seq: int
    op: str
    location_id: int
    #: The words of the record.
    record: Sequence[int]

    @property
    def failure_id(self) -> str:
        return f"{self.session}:{self.seq}:{'.'.join(map(str, self.record))}"


def failure_of(error: BaseException, site: OpSite, device: int, node: str) -> FailureRecord:
    """The record of an exception that an op raised."""
    kind = "op"
    if isinstance(error, InternalFailure):
        kind = "internal"
    elif isinstance(error, PeerLost):
        kind = "node"
    return FailureRecord(
        kind=kind,
        failure_id=site.failure_id,
        op=site.op,
        location_id=site.location_id,
        device=device,
        node=node,
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
