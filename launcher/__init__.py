"""Brings clusters up: the command dtorch-launch."""
