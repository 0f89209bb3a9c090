"""Modules with the names of ``accelerate.utils``; ``engine.interop.accelerate.utils`` re-exports their contents."""
