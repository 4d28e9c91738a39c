"""What crosses a process: one frozen tagged struct a message, msgpack, no pickle. Bytes only, no torch."""
