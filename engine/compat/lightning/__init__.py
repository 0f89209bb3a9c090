"""Lightning: its names over this library, and its objects, files and settings. ``engine.interop.lightning`` is what users import."""
