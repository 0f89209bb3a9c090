"""What Lightning's documentation shows how to do, each in a small module: entries of ``published_modules.py``."""

from __future__ import annotations

from typing import Any

import torch
from entry import QUIET, Entries
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENTRIES = Entries()
recipe = ENTRIES.add("lightning", "lightning", group="demos")


def regression(count: int = 32, features: int = 8, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def loader(count: int = 32, batch_size: int = 4, seed: int = 1) -> Any:
    return DataLoader(regression(count, seed=seed), batch_size=batch_size)


def base() -> Any:
    """A small regressor: each recipe changes some of it."""
    import lightning.pytorch as pl

    class Regressor(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def loss(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch), prog_bar=True)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Regressor


def fit(module: Any, train: Any = None, val: Any = None, **options: Any) -> nn.Module:
    import lightning.pytorch as pl

    pl.Trainer(**QUIET | {"max_epochs": 3} | options).fit(module, loader() if train is None else train, val)
    return module


@recipe
def steps_and_validation() -> nn.Module:
    return fit(base()(), val=loader(12, seed=2), log_every_n_steps=2)


@recipe
def lazy_first_module() -> nn.Module:
    """``forward`` for inference, ``training_step`` with submodules, ``**kwargs`` in the constructor."""

    class AutoEncoder(base()):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.encoder, self.decoder = nn.Linear(8, self.hparams.width), nn.Linear(self.hparams["width"], 8)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
            self.log_dict({"loss": loss, "x": x.mean()}, prog_bar=True, on_epoch=True, logger=True, sync_dist=True)
            return {"loss": loss, "x": x}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["x"].shape == batch[0].shape

    return fit(AutoEncoder(width=3))


@recipe
def manual_optimization_gan() -> nn.Module:
    class Gan(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = nn.Linear(4, 8), nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = batch[0]
            one, two = self.optimizers()
            z = torch.ones(len(real), 4) / (1 + batch_idx)
            with self.toggled_optimizer(one):
                loss = -self.discriminator(self.generator(z)).mean()
                one.zero_grad()
                self.manual_backward(loss)
                one.step()
            self.toggle_optimizer(two)
            loss = self.discriminator(self.generator(z).detach()).mean() - torch.tanh(self.discriminator(real)).mean()
            two.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(two, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            two.step()
            self.untoggle_optimizer(two)
            self.log_dict({"loss": loss}, prog_bar=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.generator.parameters(), 1e-2), torch.optim.SGD(
                self.discriminator.parameters(), 1e-2
            )

    return fit(Gan())


@recipe
def manual_accumulation_and_schedulers() -> nn.Module:
    class Manual(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.manual_backward(self.loss(batch) / 2)
            if (batch_idx + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if self.trainer.is_last_batch and (self.trainer.current_epoch + 1) % 2 == 0:
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    return fit(Manual())


@recipe
def manual_lbfgs() -> nn.Module:
    class Manual(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Any:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    return fit(Manual())


@recipe
def automatic_lbfgs() -> nn.Module:
    class Automatic(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    return fit(Automatic())


@recipe
def optimizer_step_with_warm_up() -> nn.Module:
    class WarmUp(base()):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            if self.trainer.global_step < 10:
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, float(self.trainer.global_step + 1) / 10) * 0.01

    return fit(WarmUp())


@recipe
def optimizer_of_its_own_step() -> nn.Module:
    class Own(base()):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=True)

        def backward(self, loss: Any) -> None:
            loss.backward()

    return fit(Own())


@recipe
def custom_gradient_clipping() -> nn.Module:
    class Clipped(base()):  # type: ignore[misc]
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert gradient_clip_val is None
            value = 0.2 if self.current_epoch > 0 else 0.4
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")

    return fit(Clipped())


@recipe
def one_cycle_with_estimated_steps() -> nn.Module:
    class OneCycle(base()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return fit(OneCycle(), accumulate_grad_batches=2)


@recipe
def plateau_scheduler() -> nn.Module:
    class Plateau(base()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "frequency": 1},
            }

    return fit(Plateau(), val=loader(8, seed=2), max_epochs=5)


@recipe
def scheduler_of_another_library() -> nn.Module:
    class Halving:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, epoch: int) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.05 / 2**epoch

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Timm(base()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            return [optimizer], [{"scheduler": Halving(optimizer), "interval": "epoch"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch)

    return fit(Timm())


@recipe
def several_training_loaders() -> nn.Module:
    class Both(base()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    return fit(Both(), {"a": loader(32), "b": loader(16, seed=3)})


@recipe
def combined_loader() -> nn.Module:
    from lightning.pytorch.utilities import CombinedLoader

    class Both(base()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    return fit(Both(), CombinedLoader({"a": loader(32), "b": loader(16, seed=3)}, mode="max_size_cycle"))


@recipe
def several_validation_loaders_and_epoch_end() -> nn.Module:
    class Several(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss(batch)
            self.log("val_loss", loss, add_dataloader_idx=True)
            self.outputs.append(loss)

        def on_validation_epoch_end(self) -> None:
            self.log("mean", torch.stack(self.outputs).mean())
            self.outputs.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "mean"}

    return fit(Several(), val=[loader(8, seed=2), loader(12, seed=3)])


@recipe
def early_stopping_and_checkpoint() -> nn.Module:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

    stop = EarlyStopping(monitor="val_loss", min_delta=100.0, patience=2, mode="min")
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.2f}")
    options = {"enable_checkpointing": True, "logger": True, "log_every_n_steps": 1}
    return fit(base()(), val=loader(8, seed=2), callbacks=[stop, best, LearningRateMonitor()], max_epochs=8, **options)


@recipe
def save_and_load_from_checkpoint() -> nn.Module:
    import lightning.pytorch as pl

    class Saved(base()):  # type: ignore[misc]
        def __init__(self, width: int, loss_fn: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["loss_fn"], logger=False)
            self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = 3

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["extra"] == 3

    trainer = pl.Trainer(**QUIET | {"max_epochs": 2})
    trainer.fit(Saved(5, nn.MSELoss()), loader())
    trainer.save_checkpoint("model.ckpt")
    module = Saved.load_from_checkpoint("model.ckpt")
    assert module.hparams.width == 5
    pl.Trainer(**QUIET | {"max_epochs": 4}).fit(module, loader(), ckpt_path="model.ckpt")
    return module


@recipe
def finetuning_callback() -> nn.Module:
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Tuned(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.net = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            return self.net(self.backbone(x).relu())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)

    return fit(Tuned(), callbacks=[BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)])


@ENTRIES.add(
    "lightning",
    "lightning",
    group="demos",
    note="the mean of the weights at the ends of epochs here, at their starts there",
)
def stochastic_weight_averaging() -> nn.Module:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return fit(base()(), callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)], max_epochs=5)


@recipe
def accumulation_scheduler() -> nn.Module:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return fit(base()(), callbacks=[GradientAccumulationScheduler(scheduling={0: 4, 1: 2})])


@recipe
def torchmetrics_objects() -> nn.Module:
    from torchmetrics import MeanSquaredError, MetricCollection

    class Measured(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.train_error = MeanSquaredError()
            self.val_errors = MetricCollection({"mse": MeanSquaredError()}, prefix="val_")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            self.train_error(out, batch[1])
            self.log("train_error", self.train_error, on_step=True, on_epoch=False)
            return nn.functional.mse_loss(out, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_errors.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.val_errors.compute())
            self.val_errors.reset()

    return fit(Measured(), val=loader(8, seed=2))


@recipe
def datamodule_and_batch_hooks() -> nn.Module:
    import lightning.pytorch as pl

    class Data(pl.LightningDataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def prepare_data(self) -> None:
            torch.save(regression().tensors, "data.pt")

        def setup(self, stage: str) -> None:
            self.data = TensorDataset(*torch.load("data.pt"))

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=self.hparams.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=8)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0], batch[1] * 2] if self.trainer.training else batch

    module = base()()
    pl.Trainer(**QUIET | {"max_epochs": 2}).fit(module, datamodule=Data())
    return module


@recipe
def own_callbacks() -> nn.Module:
    import lightning.pytorch as pl

    class Shrink(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            assert stage == "fit"

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
            if trainer.current_epoch == 1 and batch_idx == 4:
                return -1  # of a callback it means nothing
            return None

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert "train_loss" in trainer.callback_metrics
            with torch.no_grad():
                pl_module.net[0].weight.mul_(0.9)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.net[0].weight.grad.mul_(0.5)

    return fit(base()(), callbacks=Shrink())


@recipe
def rest_of_an_epoch_left_out() -> nn.Module:
    class Leaves(base()):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 1 and batch_idx == 4 else None

    return fit(Leaves())


@recipe
def intervals_and_limits() -> nn.Module:
    options = {
        "val_check_interval": 0.5,
        "limit_train_batches": 6,
        "limit_val_batches": 0.5,
        "check_val_every_n_epoch": 1,
    }
    return fit(base()(), val=loader(16, seed=2), gradient_clip_val=0.5, max_steps=11, max_epochs=None, **options)


@recipe
def configure_model_and_bf16() -> nn.Module:
    class Late(base()):  # type: ignore[misc]
        def configure_model(self) -> None:
            if isinstance(self.net, nn.Sequential):
                torch.manual_seed(5)
                self.net = nn.Linear(8, 1)

    return fit(Late(), precision="bf16-mixed")


@recipe
def callbacks_of_the_module() -> nn.Module:
    class Own(base()):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            from lightning.pytorch.callbacks import EarlyStopping

            return [EarlyStopping("val_loss", min_delta=100.0, patience=0)]

        def train_dataloader(self) -> Any:
            return loader()

        def on_train_start(self) -> None:
            assert (self.trainer.max_epochs, self.trainer.num_training_batches, self.logger) == (4, 8, None)

    return fit(Own(), val=loader(8, seed=2), max_epochs=4)


@recipe
def exponential_average_of_weights() -> nn.Module:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return fit(base()(), callbacks=EMAWeightAveraging(decay=0.9), val=loader(8, seed=2))
