"""Carries opaque frames between processes. What the frames mean is the business of ``wire``."""
