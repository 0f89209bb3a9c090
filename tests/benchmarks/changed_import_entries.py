"""Short trainings of published packages whose imports are changed as they are loaded: entries of ``published_modules.py``.

Packages on Lightning and on Accelerate. Their data is made up here; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import changed_imports
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
    return changed_imports.library(name)


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


DIFFUSION: dict[str, Any] = {
    "train_lr": 1e-3,
    "gradient_accumulate_every": 2,
    "num_samples": 4,
    "results_folder": "results",
}
"""Options of both trainers of denoising-diffusion-pytorch."""


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
        train_num_steps=6,
        save_and_sample_every=3,
        **DIFFUSION,
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
        train_num_steps=4,
        save_and_sample_every=100,
        calculate_fid=False,
        augment_horizontal_flip=False,
        **DIFFUSION,
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


# -- chosen later, and run without a change of the doors for them -----------------------------------------------------------------------


def numbers(rows: int = 48) -> Any:
    """A table of four numbers, a category and a label."""
    import numpy
    import pandas

    generator = numpy.random.default_rng(0)
    frame = pandas.DataFrame(generator.normal(size=(rows, 4)).round(4), columns=list("abcd"))
    return frame.assign(kind=generator.integers(0, 3, rows), label=(frame["a"] > 0).astype(int))


@entry("ts3l", "ts3l", note="its data sets draw from the global generator; here from one of each row")
def ts3l_vime() -> nn.Module:
    from ts3l.pl_modules import VIMELightning
    from ts3l.utils import TS3LDataModule
    from ts3l.utils.backbone_utils import MLPBackboneConfig
    from ts3l.utils.embedding_utils import IdentityEmbeddingConfig
    from ts3l.utils.vime_utils import VIMEConfig, VIMEDataset, VIMESecondPhaseCollateFN

    frame = numbers()
    config = VIMEConfig(
        task="classification",
        loss_fn="CrossEntropyLoss",
        metric="accuracy_score",
        scheduler="StepLR",
        scheduler_hparams={"step_size": 3},
        embedding_config=IdentityEmbeddingConfig(input_dim=5),
        backbone_config=MLPBackboneConfig(input_dim=5, hidden_dims=8, output_dim=8),
        output_dim=2,
        predictor_dim=8,
        cat_cardinality=[3],
        num_continuous=4,
    )

    class Data(VIMEDataset):  # type: ignore[misc]
        """The same, with the random numbers of a row drawn from its index."""

        def __getitem__(self, index: int) -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(index)
                return super().__getitem__(index)

    columns = {"continuous_cols": list("abcd"), "category_cols": ["kind"]}
    module = VIMELightning(config)
    first = Data(X=frame[:32], unlabeled_data=frame[32:], config=config, **columns)
    fit(module, TS3LDataModule(first, first, 8, "random", n_jobs=0), name="pytorch_lightning")
    module.set_second_phase(freeze_encoder=False)
    second = Data(
        X=frame[:32],
        Y=frame["label"][:32].values,
        unlabeled_data=frame[32:],
        config=config,
        is_second_phase=True,
        **columns,
    )
    last = Data(X=frame[32:], Y=frame["label"][32:].values, config=config, is_second_phase=True, **columns)
    data = TS3LDataModule(second, last, 8, "random", VIMESecondPhaseCollateFN(), n_jobs=0)
    return fit(module, data, name="pytorch_lightning")


@entry("torch-choice", "torch_choice", "termcolor")
def torch_choice_conditional_logit() -> nn.Module:
    from torch_choice.data import ChoiceDataset
    from torch_choice.model import ConditionalLogitModel

    generator = torch.Generator().manual_seed(0)
    data = ChoiceDataset(
        item_index=torch.randint(0, 4, (40,), generator=generator),
        session_index=torch.arange(40),
        itemsession_price=torch.rand(40, 4, 2, generator=generator),
        num_items=4,
    )
    model = ConditionalLogitModel(formula="(itemsession_price|constant)", dataset=data, num_items=4)
    quiet = {name: value for name, value in QUIET.items() if name not in ("accelerator", "devices")}
    options = {"batch_size": 10, "learning_rate": 0.03, "num_epochs": 3, "device": "cpu", "print_summary": False}
    model.fit(data, data, data, backend="lightning", **options, **quiet)
    return model


@entry("lightning-kfold", "lightning_kfold")
def lightning_kfold_folds() -> nn.Module:
    from lightning_kfold import KFoldDataModule, KFoldTrainer

    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(36, 8, generator=generator), torch.arange(36) % 2)

    class Data(KFoldDataModule):  # type: ignore[misc]
        def setup_datasets(self) -> Any:
            return samples, samples, samples.tensors[1].numpy()

    data = Data(num_folds=3, batch_size=6)
    data.setup()
    module = Classifier.made()
    KFoldTrainer(num_folds=3, max_epochs=2, **QUIET).fit(module, data)
    return module


class Classifier:
    """A module of two classes, for the library that a script imports."""

    @staticmethod
    def made(name: str = "lightning") -> Any:
        class Net(library(name).LightningModule):  # type: ignore[misc]
            def __init__(self, width: int = 6) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layers(x)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return nn.functional.cross_entropy(self(batch[0]), batch[1])

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        return Net()


@entry("cph-regression", "cph_regression")
def cph_regression_table() -> nn.Module:
    from cph_regression.regression.datamodule import DataModuleRGS
    from cph_regression.regression.modelfactory import RegressionModel
    from cph_regression.regression.modelmodule import ModelModuleRGS

    numbers().rename(columns={"label": "target"}).to_csv("table.csv", index=False)
    data = DataModuleRGS("table.csv", batch_size=8, categorical_cols=["kind"], numeric_cols=list("abcd"))
    data.setup()
    module = ModelModuleRGS(RegressionModel(data.get_input_dim(), [8], [0.1]), lr=0.01)
    return fit(module, data, name="lightning")


@entry("timeseries-agent", "timeseries_agent")
def timeseries_agent_reinforce() -> nn.Module:
    from timeseries_agent.agents.reinforce_agent import ReinforceAgent
    from timeseries_agent.envs.csv_env import CsvEnv

    agent = ReinforceAgent(CsvEnv(numbers(), list("abc"), "d", lookback=3), hidden_layers=[8], epsilon_start=0.5)
    steps = DataLoader(range(3, 35), batch_size=8)  # type: ignore[arg-type]
    return fit(agent, steps, DataLoader(range(3, 8), batch_size=5), name="lightning")  # type: ignore[arg-type]


@entry("pytorch-lightning-spells", "pytorch_lightning_spells")
def lightning_spells_mixup() -> nn.Module:
    import random

    import numpy
    from pytorch_lightning_spells.callbacks import LookaheadCallback, MixUpCallback, RandomAugmentationChoiceCallback
    from pytorch_lightning_spells.losses import MixupSoftmaxLoss
    from pytorch_lightning_spells.lr_schedulers import LinearLR, MultiStageScheduler
    from pytorch_lightning_spells.optimizers import Lookahead

    loss = MixupSoftmaxLoss()

    class Net(type(Classifier.made("pytorch_lightning"))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = Lookahead(torch.optim.Adam(self.parameters(), lr=0.01), alpha=0.5, k=3)
            stages = [LinearLR(optimizer, 0.01, 4), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]
            scheduler = MultiStageScheduler(stages, start_at_epochs=[0, 4])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    generator = torch.Generator().manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(32, 8, generator=generator), torch.arange(32) % 2), batch_size=8)
    random.seed(0)  # after the imports, some of which draw a number
    numpy.random.seed(0)
    mixing = RandomAugmentationChoiceCallback([MixUpCallback(a, softmax_target=True) for a in (0.4, 0.8)], [0.5, 0.5])
    return fit(Net(), data, data, callbacks=[mixing, LookaheadCallback()], name="pytorch_lightning")


@entry("tensorneko", "tensorneko")
def tensorneko_model() -> nn.Module:
    from tensorneko import NekoModel, NekoTrainer

    class Net(NekoModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("net")
            self.layers = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": nn.functional.mse_loss(self(batch[0]), batch[1])}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": nn.functional.mse_loss(self(batch[0]), batch[1])}

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module, data = Net(), DataLoader(table(), batch_size=8)
    options = {name: value for name, value in QUIET.items() if name not in ("logger", "enable_checkpointing")}
    NekoTrainer("neko", log_every_n_steps=2, max_epochs=2, **options).fit(module, data, data)
    return module


@entry("lightning-action", "lightning_action", "jaxtyping")
def lightning_action_segmenter() -> nn.Module:
    from lightning_action.models.segmenter import Segmenter

    model = {
        "input_size": 8,
        "output_size": 3,
        "head": "dtcn",
        "num_hid_units": 8,
        "num_layers": 2,
        "num_lags": 1,
        "seed": 1,
    }
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input": torch.randn(40, 8, generator=generator), "labels": torch.randint(0, 3, (40,), generator=generator)}
        for _ in range(12)
    ]
    settings = {"type": "Adam", "lr": 0.01, "wd": 0, "scheduler": "cosine"}
    module = Segmenter(
        {"model": {**model, "sequence_length": 40}, "optimizer": settings, "training": {"num_epochs": 3}}
    )
    data = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    return fit(module, data, data, name="lightning")


@entry("byol-pytorch", "byol_pytorch")
def byol_trainer() -> nn.Module:
    from byol_pytorch.trainer import BYOLTrainer

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
    trainer = BYOLTrainer(
        net,
        image_size=8,
        hidden_layer="3",
        learning_rate=1e-3,
        dataset=Noise(),
        num_train_steps=6,
        batch_size=4,
        checkpoint_every=3,
        byol_kwargs={"projection_size": 8, "projection_hidden_size": 8},
    )
    trainer()
    return trainer.accelerator.unwrap_model(trainer.byol)


@entry("autoregressive-diffusion-pytorch", "autoregressive_diffusion_pytorch")
def autoregressive_diffusion() -> nn.Module:
    from autoregressive_diffusion_pytorch import ImageAutoregressiveDiffusion, ImageTrainer

    sizes = {"dim": 16, "depth": 1, "heads": 2, "mlp_depth": 1, "decoder_kwargs": {"rotary_pos_emb": True}}
    model = ImageAutoregressiveDiffusion(model=sizes, image_size=8, patch_size=4)
    trainer = ImageTrainer(
        model, dataset=Noise(), num_train_steps=6, batch_size=4, save_results_every=100, checkpoint_every=3
    )
    trainer()
    return trainer.accelerator.unwrap_model(trainer.model)
