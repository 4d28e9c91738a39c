"""What the engine does, shown: traces, counters, graphs."""
