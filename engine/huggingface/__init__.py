"""Training of transformers' and peft's models with ``Fit`` and ``Engine``; see compat/transformers/from_transformers.md."""

from engine.interop import moved

try:
    from engine.compat.transformers.files import Publication
    from engine.compat.transformers.loss import CountedLoss
    from engine.compat.transformers.module import HFModule
    from engine.compat.transformers.optimizers import parameter_groups
    from engine.compat.transformers.varlen import varlen_arguments
    from engine.compat.transformers.without_logits import without_logits
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ModuleNotFoundError(
        'engine.huggingface needs transformers: pip install "fit-trainer[huggingface]"', name=error.name
    ) from error

moved(__name__, "engine.compat.transformers")
__all__ = ["CountedLoss", "HFModule", "Publication", "parameter_groups", "varlen_arguments", "without_logits"]
