"""The report of ``fit migrate``: where a project uses Lightning and Accelerate, and what to use here. Its sources are parsed, never run."""
