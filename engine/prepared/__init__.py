"""Objects that ``Engine.prepare`` has prepared, and their checkpoints."""
