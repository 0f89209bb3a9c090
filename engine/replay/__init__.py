"""Running one step of a training again."""
