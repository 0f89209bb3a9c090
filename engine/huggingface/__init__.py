"""transformers' and peft's models in ``Fit`` and ``Engine``: see from_transformers.md in this folder."""

try:
    from engine.huggingface.files import Publication
    from engine.huggingface.loss import CountedLoss
    from engine.huggingface.module import HFModule
    from engine.huggingface.optimizers import parameter_groups
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ModuleNotFoundError(
        'engine.huggingface needs transformers: pip install "fit-trainer[huggingface]"', name=error.name
    ) from error

__all__ = ["CountedLoss", "HFModule", "Publication", "parameter_groups"]
