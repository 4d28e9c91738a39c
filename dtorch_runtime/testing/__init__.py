"""Tools to test a program that runs on DTorch: clusters, scripted faults, waits with a name. Public."""
