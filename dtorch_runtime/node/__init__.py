"""The node agent: one machine's sub-controller. Hands work to an executor and reports what comes back."""
