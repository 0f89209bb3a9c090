"""What every other folder may use: errors, log, nested batches, seeds, devices."""
