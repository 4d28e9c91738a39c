"""Passes: from the ops of a captured call to fewer ops that do the same. Pure; one file each."""
