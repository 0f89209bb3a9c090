"""What a module may override of a run: the events, the parts of a step, its loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.utils.tree import move


class ModuleHooks(nn.Module):
    """Lightning's hooks, each optional; called in the order of engine/README.md. Overridden or not is found out once, before a run."""

    def setup(self, stage: str) -> None:
        """Before a run; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """After a run, also after an error."""

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, loss: Any) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Gradients are whole and unscaled, not yet clipped."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    # -- the step, with Lightning's meaning; what a strategy cannot call is an error before the first step ----------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of one micro-batch; ``loss`` is weighted (and scaled under fp16) already: ``loss.backward()`` is exact."""
        loss.backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        """One optimizer's step at a window's end.

        Args:
            optimizer_closure: runs the (last micro-batch's) ``training_step`` and backward pass, and gives the window's mean loss over all
                ranks; called again, it zeroes the gradients and evaluates the whole window. Call it, or give it to ``optimizer.step``.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear an optimizer's gradients. Overridden, it is called before a window's first backward pass, as in Lightning."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip one optimizer's gradients, which are whole and unscaled, before its step; the values are ``Fit``'s."""
        clip: Any = self.clip_gradients
        clip(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """One step of one scheduler; ``metric``: what a ``ReduceLROnPlateau`` follows."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- data and callbacks -------------------------------------------------------------------------------------------------------

    prepare_data_per_node: bool = True
    """Whether :meth:`prepare_data` runs on one process of each machine, or on rank 0 alone."""

    def prepare_data(self) -> None:
        """Download or convert data on disk, before :meth:`setup`; must not set state, since not every process runs it."""

    def configure_callbacks(self) -> Any:
        """A callback or several of the module's own; they take the place of ``Fit``'s of the same classes."""
        return []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device, for batches of one's own types. A data module's transfer hooks win over the module's."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, on the device (augmentation on the GPU)."""
        return batch

    def on_validation_model_zero_grad(self) -> None:
        """Before validation inside of a training: gradients that are left are given up."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Before validation: put the module into eval mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """After validation, only if overridden: by default each submodule's own mode comes back."""
        self.train()

    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None:
        """Before testing: put the module into eval mode."""
        self.eval()

    def on_test_model_train(self) -> None:
        """After testing, only if overridden: by default each submodule's own mode comes back."""
        self.train()

    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None:
        """Before prediction: put the module into eval mode."""
        self.eval()

    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries (trees of tensors and JSON values) to what is saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read them back."""

    # -- loaders of the module's own, used when ``Fit`` is given none ---------------------------------------------------------------

    def train_dataloader(self) -> Any: ...
    def val_dataloader(self) -> Any: ...
    def test_dataloader(self) -> Any: ...
    def predict_dataloader(self) -> Any: ...

