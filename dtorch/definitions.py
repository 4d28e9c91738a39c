"""What the cluster was told once and is then named by a number: meshes and templates."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from dtorch.meshes import mesh_id
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import mesh_to_record
from dtorch_runtime.wire.codec import encode
from dtorch_runtime.wire.messages import DefineMesh, DefineTemplates
from dtorch_runtime.wire.records import TemplateRecord

if TYPE_CHECKING:  # a session has definitions
    from dtorch.connection import Session


class Definitions:
    """Of one session; for any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Guards what follows. A number is in there once its definition was sent.
        self._lock = threading.Lock()
        self._meshes: set[int] = set()
        self._numbers: dict[bytes, int] = {}
        #: Every template by its number.
        self.templates: dict[int, TemplateRecord] = {}

    def define_mesh(self, mesh: DeviceMesh) -> int:
        """The number of a mesh; the cluster is told of it on first use.

        Raises:
            MeshError: it names devices that the cluster does not have, or of another type.
            NodeLost: one of its devices is gone.
        """
        number = mesh_id(mesh)
        if number not in self._meshes:
            with self._lock:
                if number not in self._meshes:
                    self._session.check_mesh(mesh)
                    self._session.tell(DefineMesh(mesh=mesh_to_record(mesh, number)))
                    self._meshes.add(number)
        return number

    def define_template(self, record: TemplateRecord) -> int:
        """The number of a template, whatever ``template_id`` says; equal ones have one number."""
        key = encode(DefineTemplates(templates=[record]))
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = len(self._numbers) + 1
                numbered = msgspec.structs.replace(record, template_id=number)
                self._session.tell(DefineTemplates(templates=[numbered]))
                self._numbers[key], self.templates[number] = number, numbered
        return number
