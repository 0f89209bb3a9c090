"""Monitoring of a run: hangs, ranks that differ, garbage collection."""
