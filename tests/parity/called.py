"""A module that notes every hook and what it gets, on any base class; ``python called.py`` trains it with Lightning and reports the notes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SETTINGS: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
TRAINING = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval", "on_validation_model_train",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "configure_optimizers",
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients", "backward", "lr_scheduler_step",
    "training_step", "validation_step", "prepare_data", "configure_model",
)  # fmt: skip


def data() -> list[Tensor]:
    return [torch.full((2, 1), float(number)) for number in range(1, 4)]


def shown(value: Any) -> Any:
    """An argument, in a form that is the same for both trainers."""
    if isinstance(value, Tensor):
        return [round(float(v), 6) for v in value.detach().flatten()]
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, (int, float, str, type(None))):
        return value
    return "optimizer" if hasattr(value, "param_groups") else "scheduler" if hasattr(value, "get_last_lr") else "object"


def module(base: type) -> Any:
    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.called: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 1:
                return None
            return {"loss": (self.w * batch).mean(), "number": batch_idx}

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val", (self.w * batch).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    def noted(name: str) -> Any:
        inner = getattr(Net, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = [shown(value) for value in (*args, *kwargs.values())]
            self.called.append([name, *given])
            return inner(self, *args, **kwargs)

        return hook

    for name in TRAINING:
        setattr(Net, name, noted(name))
    return Net()


if __name__ == "__main__":
    import json
    import os
    import sys
    import warnings

    warnings.simplefilter("ignore")
    import lightning

    net = module(lightning.LightningModule)
    trainer = lightning.Trainer(
        accelerator="cpu", num_sanity_val_steps=0, default_root_dir=sys.argv[1], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **SETTINGS,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(net, loader, loader)
    with open(os.environ["TEST_REPORT"], "w") as file:
        json.dump({"called": net.called, "w": net.w.item()}, file)
