"""The optimizer step: how losses are weighted, when an accumulation window ends, how gradients are finished and applied."""
