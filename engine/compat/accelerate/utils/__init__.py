"""The modules of ``accelerate.utils``; ``engine.interop.accelerate.utils`` has all their names."""
