"""Lightning's Trainer as settings."""
