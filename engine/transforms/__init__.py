"""Transforms of a model. Their only valid order:

fp8 conversion (``float8``) -> tensor parallel (the strategy shards modules) -> activation checkpointing (``recompute``)
-> ``compile`` -> shard or wrap (the strategy) -> optimizer -> load a checkpoint.

``compile.Transforms`` has the two in the middle, which strategies call as one.
"""
