"""Finds the placement signatures of an op by trying, and compares them with what the rules claim."""
