"""Models that were written for one device, on a mesh."""
