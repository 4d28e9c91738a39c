"""Plain descriptions of meshes, placements, templates and transfers. No torch, no I/O."""
