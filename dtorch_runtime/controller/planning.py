"""Which node gets which records of a batch. Decisions only."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from dtorch_runtime.ir.graph import GraphError, Route, RouteTable, Segment
from dtorch_runtime.wire.records import MeshRecord, TemplateRecord


def route_of_template(
    record: TemplateRecord,
    meshes: Mapping[int, MeshRecord],
    node_of_device: Mapping[int, int],
    routes: RouteTable,
) -> Route:
    """The nodes of all devices of the template's meshes. Devices that no live node has are left out.

    Raises:
        GraphError: the template names no mesh, or one that was not defined.
    """
    if not record.mesh_ids:
        raise GraphError(f"template {record.template_id} ({record.op}) names no mesh")
    nodes: set[int] = set()
    for mesh_id in record.mesh_ids:
        mesh = meshes.get(mesh_id)
        if mesh is None:
            raise GraphError(f"template {record.template_id} ({record.op}) names mesh {mesh_id}, not defined")
        nodes.update(node_of_device[device] for device in mesh.devices if device in node_of_device)
    return routes.to(nodes)


def plan_batch(
    segments: Sequence[Segment], frame: Any, live: Container[int]
) -> list[tuple[tuple[int, ...], Any]]:
    """Groups of live nodes and the payload that each node of the group gets, in program order.

    Records that all go the same way, which is the rule, are sent on in the frame that they came in.
    """
    if len(segments) == 1:
        nodes = tuple(node for node in segments[0].route.nodes if node in live)
        return [(nodes, frame)] if nodes else []
    indices_of_node: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        for node in segment.route.nodes:
            indices_of_node.setdefault(node, []).append(index)
    groups: dict[tuple[int, ...], list[int]] = {}
    for node, indices in indices_of_node.items():
        if node in live:
            groups.setdefault(tuple(indices), []).append(node)
    return [(tuple(nodes), _join(segments, indices, frame)) for indices, nodes in groups.items()]


def _join(segments: Sequence[Segment], indices: Sequence[int], frame: Any) -> Any:
    if len(indices) == len(segments):
        return frame
    return b"".join([segments[index].payload() for index in indices])
