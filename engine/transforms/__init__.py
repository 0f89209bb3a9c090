"""Transforms of a module. Their one legal order: compile -> distribute (strategy) -> optimizer."""
