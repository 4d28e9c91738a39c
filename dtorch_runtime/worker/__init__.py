"""What runs kernels: one thread a device, its values, its streams, and the exchanges among devices. Uses torch."""
