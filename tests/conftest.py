"""Shared by all tests; its place makes the helpers beside it (``processes``, ``models``) importable."""

import gc


def pytest_collection_finish() -> None:
    """What a worker has imported is left out of every later collection of garbage: with all test files' libraries one takes a second."""
    gc.collect()
    gc.freeze()
