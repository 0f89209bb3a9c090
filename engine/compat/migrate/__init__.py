"""The report of ``fit migrate``: where sources use Lightning and Accelerate, and what each use is here. The sources are read, never run."""
