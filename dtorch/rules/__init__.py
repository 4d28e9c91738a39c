"""Placement rules: what each op may be given, and what it gives, on every mesh. See ``docs/adding_an_op.md``."""
