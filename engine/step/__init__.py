"""A step: what losses weigh, when a window ends, how gradients are finished and optimizers step."""
