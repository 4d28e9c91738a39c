"""Names for the integers that travel: a value id is not a template id, and mypy knows."""

from __future__ import annotations

from typing import NewType

#: One tensor that a program computes. Unique in a session, chosen by the client, never reused, > 0.
ValueId = NewType("ValueId", int)
#: One template (an op without its value ids). Unique in a session, > 0; 0 is the FREE record.
TemplateId = NewType("TemplateId", int)
#: One device mesh as the wire knows it. Unique in a session.
MeshId = NewType("MeshId", int)
#: One device of the cluster, counted from 0 over all nodes in the order in which they joined.
DeviceId = NewType("DeviceId", int)
#: One client's connection to the controller. Unique in the life of a controller, > 0.
SessionId = NewType("SessionId", int)
#: One fetch that waits for an answer. Unique in a session.
RequestId = NewType("RequestId", int)
#: Position of a message in a session's stream, counted from 1.
Seq = NewType("Seq", int)
#: A user's source line, resolved by the client that issued the op. 0 is "unknown".
LocationId = NewType("LocationId", int)
#: A node agent, by the name that it was given at launch.
NodeName = NewType("NodeName", str)
