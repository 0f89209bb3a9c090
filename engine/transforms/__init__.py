"""Transforms of a model. They only work in this order:

fp8 conversion (``float8``) -> tensor parallelism (the strategy shards modules) -> activation checkpointing (``recompute``)
-> ``compile`` -> shard or wrap (the strategy) -> activation offload (``offload``) -> optimizer -> load a checkpoint.

``compile.Transforms`` combines ``recompute`` and ``compile``, which strategies apply as one.
"""
