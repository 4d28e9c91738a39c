"""How devices exchange pieces of tensors: among threads of one agent, and between agents."""
