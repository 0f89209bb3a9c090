"""Loggers: callbacks that record the published metrics, one back end a file."""
