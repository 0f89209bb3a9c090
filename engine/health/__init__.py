"""What is watched while a run computes: hangs, ranks that differ, garbage."""
