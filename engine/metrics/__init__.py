"""Logged values and torchmetrics objects, over micro-batches, loaders and ranks."""
