"""Converts checkpoints of other libraries to checkpoints of this one."""
