"""Loggers: callbacks that record logged metrics, one backend per file."""
