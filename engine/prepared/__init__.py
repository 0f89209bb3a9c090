"""What ``Engine.prepare`` has made ready, and its checkpoints."""
