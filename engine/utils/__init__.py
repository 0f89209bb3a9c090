"""Helpers for every other folder: errors, log, nested batches, seeds, devices."""
