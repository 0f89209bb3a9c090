"""transformers and peft: their models, and the arguments of their trainer. ``engine.huggingface`` is what users import."""
