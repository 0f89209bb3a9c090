"""Modules with overrides that users of Lightning write, on any base class; ``python hooked.py`` trains them with Lightning and reports weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS: dict[str, dict[str, Any]] = {
    "WarmUp": {},
    "EveryOther": {},
    "OwnBackward": {"accumulate_grad_batches": 2},
    "Clips": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "ClipsByItself": {},
    "Keeps": {},
    "Schedules": {},
    "Sharp": {},
    "Quasi": {},
    "QuasiWolfe": {},
    "QuasiWarmUp": {"gradient_clip_val": 0.5},
    "Transfers": {},
    "Modes": {},
}
"""Of ``Fit`` and ``Trainer`` alike, by the module's name."""


def data() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [
        (torch.randn(4, 3, generator=made, dtype=torch.float64), torch.randn(4, 1, generator=made, dtype=torch.float64))
        for _ in range(6)
    ]


def modules(base: type) -> dict[str, Callable[[], Any]]:
    """The classes by their names."""

    class Plain(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1)).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class WarmUp(Plain):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            if self.global_step < 8:
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, (self.global_step + 1) / 8) * 0.2

    class EveryOther(Plain):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2 == 0:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            else:
                optimizer_closure()

    class OwnBackward(Plain):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss * 1.5, retain_graph=True)
            loss.backward()

    class Clips(Plain):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )

    class ClipsByItself(Plain):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert gradient_clip_val is None
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)

    class Keeps(Plain):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if (epoch + batch_idx) % 3 == 0:
                optimizer.zero_grad()

    class Schedules(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                    "interval": "step",
                },
            }

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.current_epoch == 1:
                super().lr_scheduler_step(scheduler, metric)
            scheduler.step()

    class Sharp(Plain):
        """Sharpness-aware, by hand: the gradient at the weights that are a little uphill."""

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            with torch.no_grad():
                moves = [0.05 * p.grad for p in self.parameters()]
                for p, by in zip(self.parameters(), moves, strict=True):
                    p.add_(by)
            optimizer_closure()
            with torch.no_grad():
                for p, by in zip(self.parameters(), moves, strict=True):
                    p.sub_(by)
            optimizer.step()

    class Quasi(Plain):
        search: str | None = None

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4, line_search_fn=self.search)

    class QuasiWolfe(Quasi):
        search = "strong_wolfe"

    class QuasiWarmUp(WarmUp):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4)

    class Transfers(Plain):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 1, batch[1]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return x * 2, y

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] - 1, batch[1]

    class Modes(Plain):
        """Drops out in validation, and no more in training after it."""

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.net[2].train()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()
            self.net[2].eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.manual_seed(batch_idx)

    found = {name: value for name, value in locals().items() if name in SETTINGS}
    for name, each in found.items():
        if name != "Modes":
            each.on_fit_start = lambda self: (
                [setattr(m, "p", 0.0) for m in self.modules() if isinstance(m, nn.Dropout)] and None
            )
    return found


def weights(module: nn.Module) -> list[float]:
    return [v for p in module.parameters() for v in p.detach().flatten().tolist()]


if __name__ == "__main__":
    import json
    import os
    import sys
    import warnings

    warnings.simplefilter("ignore")
    import lightning

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    result = {}
    for name, make in modules(lightning.LightningModule).items():
        module = make()
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            num_sanity_val_steps=0,
            default_root_dir=sys.argv[1],
            **quiet,
            **SETTINGS[name],
        )
        batches = torch.utils.data.DataLoader(data(), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, batches, batches if name == "Modes" else None)
        result[name] = weights(module)
    with open(os.environ["TEST_REPORT"], "w") as file:
        json.dump(result, file)
