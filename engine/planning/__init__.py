"""Plans of a run of N ranks before it is started: memory, communication and time, traced on one machine with no data in memory."""
