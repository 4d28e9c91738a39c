"""Where the work of a device runs in order, and how streams wait for one another."""
