"""Support for models of transformers and peft, and for transformers' ``TrainingArguments``. Users import ``engine.huggingface``."""
