"""Lightning's names implemented with this library, and adapters for its objects, files and settings. Users import ``engine.interop.lightning``."""
