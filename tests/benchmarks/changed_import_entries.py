"""Short trainings of published packages whose imports are changed as they are loaded: entries of ``published_modules.py``.

Packages on Lightning and on Accelerate. Their data is made up here; nothing is downloaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from entry import QUIET, Entries
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

ENTRIES = Entries()
GROUP = "changed imports"
PICKLES = "with ModelCheckpoint.pickles = True"
INSTEAD = "engine.interop.lightning"


def entry(package: str, *modules: str, note: str = "") -> Any:
    return ENTRIES.add(package, *modules, group=GROUP, note=note)


def library(name: str = "lightning.pytorch") -> Any:
    """The library that the script itself imports: its own import is changed, too, once the doors are imported."""
    return import_module(INSTEAD if INSTEAD in sys.modules else name)


def fit(module: Any, *data: Any, name: str = "lightning.pytorch", **options: Any) -> nn.Module:
    library(name).Trainer(**QUIET | {"max_epochs": 3} | options).fit(module, *data)
    return module


def table(count: int = 32) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def pickles() -> None:
    """The line that a program adds whose package opens checkpoints with ``torch.load``."""
    library().callbacks.ModelCheckpoint.pickles = True


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


# -- on Lightning --------------------------------------------------------------------------------------------------------------------


@entry("optuna-integration", "optuna_integration", "optuna")
def optuna_pruning_callback() -> nn.Module:
    import optuna
    from optuna_integration import PyTorchLightningPruningCallback

    class Net(library().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    nets, loader = nn.ModuleList(), DataLoader(table(), batch_size=8)

    def objective(trial: Any) -> float:
        torch.manual_seed(trial.number)
        nets.append(Net())
        callback = PyTorchLightningPruningCallback(trial, monitor="val_loss")
        trainer = library().Trainer(**QUIET, max_epochs=4, callbacks=[callback])
        trainer.fit(nets[-1], loader, loader)
        return float(trainer.callback_metrics["val_loss"])

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    optuna.create_study(pruner=pruner).optimize(objective, n_trials=3)
    return nets


def graphs() -> list[Any]:
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    return [
        Data(x=torch.randn(5, 4, generator=generator), edge_index=edges, y=torch.tensor([i % 2])) for i in range(12)
    ]


@entry("torch-geometric", "torch_geometric")
def torch_geometric_lightning_dataset() -> nn.Module:
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GCN, global_add_pool

    class Net(library().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = GCN(4, 8, 2, 1)

        def training_step(self, data: Any, batch_idx: int) -> Any:
            output = global_add_pool(self.layers(data.x, data.edge_index), data.batch)[:, 0]
            return ((output - data.y) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return fit(Net(), LightningDataset(graphs(), batch_size=5))


@entry("torch-geometric", "torch_geometric", "yacs")
def torch_geometric_graphgym() -> nn.Module:
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.loader import DataLoader as Loader

    set_cfg(cfg)
    cfg.dataset.task, cfg.dataset.task_type, cfg.accelerator = "graph", "classification", "cpu"
    cfg.dataset.node_encoder = cfg.dataset.edge_encoder = False
    cfg.share.dim_in, cfg.share.dim_out, cfg.share.num_splits = 4, 2, 1
    cfg.model.type, cfg.gnn.head, cfg.gnn.dim_inner, cfg.optim.max_epoch = "gnn", "graph", 8, 3
    return fit(create_model(), Loader(graphs(), 4))


@entry("disent", "disent")
def disent_beta_vae() -> nn.Module:
    from disent.dataset import DisentDataset
    from disent.dataset.data import XYObjectData
    from disent.dataset.sampling import SingleSampler
    from disent.dataset.transform import ToImgTensorF32
    from disent.frameworks.vae import BetaVae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderConv64, EncoderConv64

    data = XYObjectData()
    images = DisentDataset(dataset=data, sampler=SingleSampler(), transform=ToImgTensorF32())
    model = AutoEncoder(
        encoder=EncoderConv64(x_shape=data.x_shape, z_size=4, z_multiplier=2),
        decoder=DecoderConv64(x_shape=data.x_shape, z_size=4),
    )
    module = BetaVae(model=model, cfg=BetaVae.cfg(optimizer="adam", optimizer_kwargs={"lr": 1e-3}, beta=4))
    loader = DataLoader(torch.utils.data.Subset(images, range(20)), batch_size=4)
    return fit(module, loader, max_epochs=None, max_steps=5)


def contextualized(name: str, *targets: Any) -> nn.Module:
    import contextualized.easy
    import numpy

    pickles()
    generator = numpy.random.default_rng(0)
    contexts, x = generator.normal(size=(60, 3)), generator.normal(size=(60, 4))
    y = [(x * contexts[:, :1]).sum(1, keepdims=True)] if targets else []
    model = getattr(contextualized.easy, name)()
    model.fit(contexts, x, *y, max_epochs=2, n_bootstraps=1)
    return nn.ModuleList(model.models)


@entry("contextualized-ml", "contextualized", note=PICKLES)
def contextualized_regressor() -> nn.Module:
    return contextualized("ContextualizedRegressor", "y")


@entry("contextualized-ml", "contextualized", note=PICKLES)
def contextualized_correlation_networks() -> nn.Module:
    return contextualized("ContextualizedCorrelationNetworks")


@entry("rul-adapt", "rul_adapt", "rul_datasets", note="calls LightningModule._set_hparams, which is private there")
def rul_adapt_supervised() -> nn.Module:
    from rul_adapt.approach import SupervisedApproach
    from rul_adapt.model import CnnExtractor, FullyConnectedHead

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 2, 10, generator=generator), torch.rand(24, generator=generator))
    approach = SupervisedApproach(lr=0.01, loss_type="mse", optim_type="adam")
    approach.set_model(CnnExtractor(2, [4], 10, fc_units=8), FullyConnectedHead(8, [1], act_func_on_last_layer=False))
    loader = DataLoader(data, batch_size=6)
    return fit(approach, loader, loader, name="pytorch_lightning")


@entry("rul-adapt", "rul_adapt", "rul_datasets", note="calls LightningModule._set_hparams, which is private there")
def rul_adapt_dann() -> nn.Module:
    from rul_adapt.approach import DannApproach
    from rul_adapt.model import CnnExtractor, FullyConnectedHead

    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 24, 2, 10, generator=generator)
    y = torch.rand(24, generator=generator)
    heads = [FullyConnectedHead(8, [1], act_func_on_last_layer=False) for _ in range(2)]
    approach = DannApproach(1.0, lr=0.01)
    approach.set_model(CnnExtractor(2, [4], 10, fc_units=8), *heads)
    labelled = DataLoader(TensorDataset(x, y), batch_size=6)
    loader = DataLoader(TensorDataset(x, y, other), batch_size=6)
    return fit(approach, loader, [labelled, labelled], name="pytorch_lightning")


def rectools(name: str) -> nn.Module:
    import numpy
    import pandas
    import rectools.models
    from rectools.dataset import Dataset as Interactions

    frame = pandas.DataFrame(
        {
            "user_id": numpy.repeat(numpy.arange(12), 8),
            "item_id": numpy.random.default_rng(0).integers(0, 15, 96),
            "weight": 1.0,
            "datetime": pandas.date_range("2020-01-01", periods=96),
        }
    )
    sizes = {"n_factors": 8, "n_blocks": 1, "n_heads": 1, "session_max_len": 6, "epochs": 2, "batch_size": 4}
    model = getattr(rectools.models, name)(**sizes, deterministic=True, dataloader_num_workers=0)
    return model.fit(Interactions.construct(frame)).lightning_model


@entry("rectools", "rectools", note="needs pandas 2; draws its first weights in on_train_start")
def rectools_sasrec() -> nn.Module:
    return rectools("SASRecModel")


@entry("rectools", "rectools", note="needs pandas 2; draws its first weights in on_train_start")
def rectools_bert4rec() -> nn.Module:
    return rectools("BERT4RecModel")


# -- on Accelerate -------------------------------------------------------------------------------------------------------------------


@entry("pytorch-accelerated", "pytorch_accelerated")
def pytorch_accelerated_trainer() -> nn.Module:
    from pytorch_accelerated import Trainer

    model, data = network(), table(30)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.01))
    options = {"num_epochs": 3, "per_device_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer.train(train_dataset=data, eval_dataset=data, **options)
    return trainer._accelerator.unwrap_model(trainer.model)


@entry("pytorch-accelerated", "pytorch_accelerated")
def pytorch_accelerated_average() -> nn.Module:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import ModelEmaCallback
    from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

    model, data = network(), table()
    callbacks = (*DEFAULT_CALLBACKS, ModelEmaCallback(decay=0.9))
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks)
    trainer.train(train_dataset=data, eval_dataset=data, num_epochs=2, per_device_batch_size=8)
    return trainer._accelerator.unwrap_model(trainer.model)


@entry("denoising-diffusion-pytorch", "denoising_diffusion_pytorch")
def denoising_diffusion_sequences() -> nn.Module:
    from denoising_diffusion_pytorch import Dataset1D, GaussianDiffusion1D, Trainer1D, Unet1D

    unet = Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    diffusion = GaussianDiffusion1D(unet, seq_length=16, timesteps=10, objective="pred_v")
    data = Dataset1D(torch.rand(12, 2, 16, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer1D(
        diffusion,
        dataset=data,
        train_batch_size=4,
        train_lr=1e-3,
        train_num_steps=6,
        gradient_accumulate_every=2,
        save_and_sample_every=3,
        num_samples=4,
        results_folder="results",
    )
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


@entry("denoising-diffusion-pytorch", "denoising_diffusion_pytorch")
def denoising_diffusion_images() -> nn.Module:
    import numpy
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
    from PIL import Image

    Path("images").mkdir()
    generator = numpy.random.default_rng(0)
    for i in range(104):
        Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype="uint8")).save(f"images/{i}.png")
    diffusion = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=6)
    trainer = Trainer(
        diffusion,
        "images",
        train_batch_size=8,
        train_lr=1e-3,
        train_num_steps=4,
        gradient_accumulate_every=2,
        save_and_sample_every=100,
        num_samples=4,
        calculate_fid=False,
        augment_horizontal_flip=False,
        results_folder="results",
    )
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


class Velocity(nn.Module):
    """A network for a flow of images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.time = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(1, 3)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return self.layer(images) + self.time(times.reshape(-1, 1))[:, :, None, None]


class Noise(Dataset[torch.Tensor]):
    """Twelve images."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))


@entry("rectified-flow-pytorch", "rectified_flow_pytorch")
def rectified_flow() -> nn.Module:
    from rectified_flow_pytorch import RectifiedFlow, Trainer

    trainer = Trainer(
        RectifiedFlow(Velocity(), data_shape=(3, 8, 8)),
        dataset=Noise(),
        num_train_steps=6,
        batch_size=4,
        save_results_every=3,
        checkpoint_every=3,
        num_samples=4,
        results_folder="results",
        checkpoints_folder="checkpoints",
    )
    trainer()
    return trainer.accelerator.unwrap_model(trainer.model)
