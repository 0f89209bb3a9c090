"""Transforms of a model. Their only valid order:

fp8 conversion (``float8``) -> tensor parallel (the strategy shards modules) -> activation checkpointing (``checkpointing``)
-> ``compile`` -> shard or wrap (the strategy) -> optimizer -> load a checkpoint. ``order`` has the two in the middle, which strategies call as one.
"""
