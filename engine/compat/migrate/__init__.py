"""What ``fit migrate`` reports: where sources use Lightning and Accelerate, and what each use is here. The sources are read, never run."""
