"""Data order, its division among ranks and micro-batches, and the loaders that follow it."""
