"""Checkpoints of other libraries as checkpoints of this one."""
