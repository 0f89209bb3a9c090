"""The loops of a run, and everything around them: setup, callbacks, stopping, checkpoints."""
