"""Accelerate: its names over this library, and its files and settings. ``engine.interop.accelerate`` is what users import."""
