"""What a user writes with: plain PyTorch, run on a cluster."""
