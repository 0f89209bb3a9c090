"""Checkpoints that cannot run code: JSON and safetensors, written atomically."""
