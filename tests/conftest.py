"""Shared by all tests; its place makes the helpers beside it (``processes``, ``models``) importable."""
