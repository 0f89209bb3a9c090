"""Settings: durations, their schema, and where each value comes from. Imports no torch."""
