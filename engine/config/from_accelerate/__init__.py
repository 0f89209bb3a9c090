"""Accelerate's configuration file as one of this library."""
