"""Writes that torch refuses on a piece, and not on the whole.

Aliases of the very same elements may have other strides along dims of size one, which torch takes for a partial
overlap. A piece has such dims where the whole has none; and the client has looked at the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blobs

#: What torch says when a tensor that is written to overlaps another one.
_OVERLAP = "refer to a single memory location"
#: Ids of copies go down from here: no value has a negative id.
_FIRST_COPY = -1


def is_overlap(record: TemplateRecord, error: Exception) -> bool:
    """Whether an op that writes was refused because it reads what it writes to, before it wrote anything.

    One on lists may have written to the first ones.
    """
    return len(record.mutates) == 1 and _OVERLAP in str(error)


def run_on_copies(
    runners: Mapping[int, Runner], blobs: Blobs, record: TemplateRecord, words: list[int]
) -> bool:
    """Run an op again, with copies of what it only reads; False when it raises again.

    Args:
        words: its record alone; changed.
    """
    copies = {}
    for index in set(range(record.num_inputs)) - set(record.mutates):
        blob = blobs.get(words[2 + index])
        if isinstance(blob, torch.Tensor):
            copies[_FIRST_COPY - index] = blob.clone()
            words[2 + index] = _FIRST_COPY - index
    blobs.update(copies)
    try:
        runners[record.template_id](words, 0)
    except Exception:  # noqa: BLE001  the first error is the one to tell
        return False
    finally:
        for number in copies:
            blobs.pop(number, None)
    return True
