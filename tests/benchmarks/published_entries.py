"""Modules of published packages, each with a short training on synthetic data: entries of ``published_modules.py``."""

from __future__ import annotations

from typing import Any

import changed_imports
import torch
from entry import QUIET, Entries, definitions
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENTRIES = Entries()
LIGHTLY = "lightly/examples/pytorch_lightning"
SEGMENTATION = "segmentation_models.pytorch/examples"


def fit(module: Any, *data: Any, library: str = "lightning.pytorch", **options: Any) -> nn.Module:
    """Train with the ``Trainer`` of the Lightning that the package imports."""
    changed_imports.library(library).Trainer(**QUIET | {"max_epochs": 2} | options).fit(module, *data)
    return module


def table(count: int = 32, features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, features, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


# -- lightly -------------------------------------------------------------------------------------------------------------------------


def views(count: int, size: int = 32) -> Any:
    """Batches of lightly's loaders: views of the images, labels, file names."""
    images = [torch.randn(3, size, size) for _ in range(2 * count)]
    return DataLoader([((images[2 * i], images[2 * i + 1]), 0, f"{i}.png") for i in range(count)], batch_size=4)


def lightly_example(name: str, loader: Any, *arguments: Any) -> nn.Module:
    module = definitions(f"{LIGHTLY}/{name.lower()}.py")[name](*arguments)
    return fit(module, loader, library="pytorch_lightning")


def lightly(name: str) -> Any:
    return ENTRIES.add("lightly", "lightly", source=f"{LIGHTLY}/{name}.py")


@lightly("simclr")
def lightly_simclr() -> nn.Module:
    return lightly_example("SimCLR", views(8))


@lightly("byol")
def lightly_byol() -> nn.Module:
    return lightly_example("BYOL", views(8))


@lightly("moco")
def lightly_moco() -> nn.Module:
    return lightly_example("MoCo", views(8))


@lightly("simsiam")
def lightly_simsiam() -> nn.Module:
    return lightly_example("SimSiam", views(8))


@lightly("barlowtwins")
def lightly_barlowtwins() -> nn.Module:
    return lightly_example("BarlowTwins", views(8))


@lightly("vicreg")
def lightly_vicreg() -> nn.Module:
    return lightly_example("VICReg", views(8))


@lightly("dino")
def lightly_dino() -> nn.Module:
    return lightly_example("DINO", views(8, 64))


@ENTRIES.add("lightly", "lightly")
def lightly_linear_classifier() -> nn.Module:
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16))
    data = [(torch.randn(3, 8, 8), i % 10) for i in range(32)]
    loader = DataLoader(data, batch_size=4)
    module = LinearClassifier(backbone, 4, lr=0.1, feature_dim=16, num_classes=10, topk=(1,))
    return fit(module, loader, loader, library="pytorch_lightning")


# -- segmentation_models_pytorch -----------------------------------------------------------------------------------------------------


@ENTRIES.add(
    "segmentation-models-pytorch",
    "segmentation_models_pytorch",
    source=f"{SEGMENTATION}/binary_segmentation_intro.ipynb",
)
def segmentation_pet_model() -> nn.Module:
    names = definitions(f"{SEGMENTATION}/binary_segmentation_intro.ipynb")
    names["T_MAX"] = 8
    data = [{"image": torch.rand(3, 64, 64), "mask": (torch.rand(1, 64, 64) > 0.5).float()} for _ in range(8)]
    loader = DataLoader(data, batch_size=2)
    module = names["PetModel"]("Unet", "tu-resnet18", in_channels=3, out_classes=1, encoder_weights=None)
    return fit(module, loader, loader, library="pytorch_lightning")


# -- images --------------------------------------------------------------------------------------------------------------------------


@ENTRIES.add("torch-uncertainty", "torch_uncertainty")
def torch_uncertainty_classification() -> nn.Module:
    from torch_uncertainty.routines import ClassificationRoutine

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = table()
    loader = DataLoader(TensorDataset(x, torch.arange(len(y)) % 3), batch_size=4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    module = ClassificationRoutine(model=net, num_classes=3, loss=nn.CrossEntropyLoss(), optim_recipe=optimizer)
    return fit(module, loader, loader)


@ENTRIES.add("torch-uncertainty", "torch_uncertainty")
def torch_uncertainty_regression() -> nn.Module:
    from torch_uncertainty.routines import RegressionRoutine

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    loader = DataLoader(TensorDataset(table()[0], table()[1].squeeze(1)), batch_size=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    module = RegressionRoutine(model=net, output_dim=1, loss=nn.MSELoss(), optim_recipe=optimizer)
    return fit(module, loader, loader)


def pictures(task: str) -> Any:
    """Batches of torchgeo's loaders."""
    targets = {"label": torch.tensor(1), "mask": torch.randint(0, 3, (32, 32))}
    data = [{"image": torch.rand(3, 32, 32), task: targets[task]} for _ in range(8)]
    return DataLoader(data, batch_size=4)


@ENTRIES.add("torchgeo", "torchgeo")
def torchgeo_classification() -> nn.Module:
    from torchgeo.trainers import ClassificationTask

    module = ClassificationTask(model="resnet18", weights=None, in_channels=3, task="multiclass", num_classes=3)
    return fit(module, pictures("label"), pictures("label"))


@ENTRIES.add("torchgeo", "torchgeo")
def torchgeo_segmentation() -> nn.Module:
    from torchgeo.trainers import SemanticSegmentationTask

    module = SemanticSegmentationTask(
        model="unet", backbone="resnet18", weights=None, in_channels=3, task="multiclass", num_classes=3
    )
    return fit(module, pictures("mask"), pictures("mask"))


@ENTRIES.add("anomalib", "anomalib")
def anomalib_ganomaly() -> nn.Module:
    from anomalib.data import ImageBatch
    from anomalib.models import Ganomaly

    def batch(items: list[Any]) -> Any:
        return ImageBatch(image=torch.stack(items), gt_label=torch.zeros(len(items), dtype=torch.bool))

    loader = DataLoader([torch.rand(3, 64, 64) for _ in range(8)], batch_size=4, collate_fn=batch)
    module = Ganomaly(
        batch_size=4,
        n_features=8,
        latent_vec_size=8,
        pre_processor=Ganomaly.configure_pre_processor((64, 64)),
        post_processor=False,
        evaluator=False,
        visualizer=False,
    )
    return fit(module, loader)


# -- series --------------------------------------------------------------------------------------------------------------------------


def series(length: int = 120) -> Any:
    import numpy

    return numpy.sin(numpy.arange(length) / 5).astype("float32") + 2


@ENTRIES.add("pytorch-forecasting", "pytorch_forecasting")
def pytorch_forecasting_tft() -> nn.Module:
    from pytorch_forecasting import TemporalFusionTransformer

    data, loader = forecasting_data()
    module = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, learning_rate=0.01
    )
    return fit(module, loader, loader)


@ENTRIES.add("pytorch-forecasting", "pytorch_forecasting")
def pytorch_forecasting_nbeats() -> nn.Module:
    from pytorch_forecasting import NBeats

    data, loader = forecasting_data(covariates=False)
    return fit(NBeats.from_dataset(data, widths=[8, 8], num_blocks=[1, 1], learning_rate=0.01), loader, loader)


def forecasting_data(covariates: bool = True) -> Any:
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    frame = pandas.DataFrame({"time": range(120), "value": series(), "series": "a"})
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        min_encoder_length=12,
        max_encoder_length=12,
        min_prediction_length=4,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **{"time_varying_known_reals": ["time"], "add_relative_time_idx": True} if covariates else {},
    )
    return data, data.to_dataloader(train=False, batch_size=16)


def pickles() -> None:
    """The line that a program adds whose package reads checkpoints with ``torch.load``. Lightning's class does nothing with it."""
    changed_imports.library("lightning.pytorch").callbacks.ModelCheckpoint.pickles = True


PICKLES = "and with ModelCheckpoint.pickles = True"
GLUONTS: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "max_epochs": 2}


def gluonts(name: str, **arguments: Any) -> nn.Module:
    import gluonts.torch
    import pandas
    from gluonts.dataset.common import ListDataset

    pickles()
    data = ListDataset([{"start": pandas.Period("2020-01-01", freq="D"), "target": series()}], freq="D")
    estimator = getattr(gluonts.torch, name)(
        prediction_length=4, batch_size=4, num_batches_per_epoch=4, trainer_kwargs=GLUONTS, **arguments
    )
    return estimator.train(data).prediction_net


@ENTRIES.add("gluonts", "gluonts", "lightning", note=PICKLES)
def gluonts_simple_feed_forward() -> nn.Module:
    return gluonts("SimpleFeedForwardEstimator", context_length=12)


@ENTRIES.add("gluonts", "gluonts", "lightning", note=PICKLES)
def gluonts_deep_ar() -> nn.Module:
    return gluonts("DeepAREstimator", context_length=12, freq="D", hidden_size=8)


@ENTRIES.add("gluonts", "gluonts", "lightning", note=PICKLES)
def gluonts_patch_tst() -> nn.Module:
    return gluonts("PatchTSTEstimator", context_length=12, patch_len=4)


def neuralforecast(name: str, **arguments: Any) -> nn.Module:
    import pandas
    from neuralforecast import NeuralForecast, models

    days = pandas.date_range("2020-01-01", periods=120)
    frame = pandas.concat([pandas.DataFrame({"unique_id": one, "ds": days, "y": series()}) for one in ("a", "b")])
    model = getattr(models, name)(
        h=4, input_size=12, max_steps=10, val_check_steps=5, batch_size=2, windows_batch_size=16, **QUIET, **arguments
    )
    NeuralForecast(models=[model], freq="D").fit(frame, val_size=8)
    return model


@ENTRIES.add("neuralforecast", "neuralforecast")
def neuralforecast_nhits() -> nn.Module:
    return neuralforecast("NHITS", mlp_units=3 * [[16, 16]])


@ENTRIES.add("neuralforecast", "neuralforecast")
def neuralforecast_mlp() -> nn.Module:
    return neuralforecast("MLP", hidden_size=16)


def darts(name: str, **arguments: Any) -> nn.Module:
    import darts.models
    from darts import TimeSeries

    model = getattr(darts.models, name)(
        input_chunk_length=12, n_epochs=2, batch_size=16, random_state=0, pl_trainer_kwargs=QUIET, **arguments
    )
    model.fit(TimeSeries.from_values(series()))
    return model.model


@ENTRIES.add("darts", "darts", "pytorch_lightning")
def darts_nbeats() -> nn.Module:
    return darts("NBEATSModel", output_chunk_length=4, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=16)


@ENTRIES.add("darts", "darts", "pytorch_lightning")
def darts_tcn() -> nn.Module:
    return darts("TCNModel", output_chunk_length=4, num_filters=2)


# -- tables --------------------------------------------------------------------------------------------------------------------------


def frame() -> Any:
    import pandas

    x, y = table(64, 4)
    return pandas.DataFrame(x.numpy(), columns=list("abcd")).assign(target=y.numpy())


@ENTRIES.add("pytorch-tabular", "pytorch_tabular", note=PICKLES)
def pytorch_tabular_category_embedding() -> nn.Module:
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    pickles()
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=list("abcd")),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-8"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            max_epochs=2, batch_size=16, accelerator="cpu", progress_bar="none", load_best=True
        ),
    )
    model.fit(train=frame(), validation=frame().iloc[:16])
    return model.model


@ENTRIES.add("deeptab", "deeptab", note=PICKLES)
def deeptab_mlp_regressor() -> nn.Module:
    from deeptab.configs import MLPConfig
    from deeptab.models import MLPRegressor

    pickles()
    data = frame()
    model = MLPRegressor(model_config=MLPConfig(layer_sizes=[16, 8]))
    options = {**QUIET, "enable_checkpointing": True}
    model.fit(data[list("abcd")], data["target"].to_numpy(), max_epochs=2, batch_size=16, **options)
    return model.task_model


# -- molecules, cells, physics, graphs -----------------------------------------------------------------------------------------------


@ENTRIES.add("chemprop", "chemprop")
def chemprop_mpnn() -> nn.Module:
    from chemprop import data, models
    from chemprop import nn as layers

    points = [data.MoleculeDatapoint.from_smi("C" * (1 + i % 7) + "O", [float(i % 7)]) for i in range(16)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False)
    module = models.MPNN(
        layers.BondMessagePassing(d_h=16), layers.MeanAggregation(), layers.RegressionFFN(input_dim=16)
    )
    return fit(module, loader, loader)


@ENTRIES.add("mlcolvar", "mlcolvar")
def mlcolvar_regression() -> nn.Module:
    from mlcolvar.cvs import RegressionCV
    from mlcolvar.data import DictDataset, DictModule

    x, y = table(64)
    data = DictModule(
        DictDataset({"data": x, "target": y}), lengths=[0.8, 0.2], batch_size=16, random_split=False, shuffle=False
    )
    return fit(RegressionCV([8, 16, 1]), data)


@ENTRIES.add("mlcolvar", "mlcolvar")
def mlcolvar_autoencoder() -> nn.Module:
    from mlcolvar.cvs import AutoEncoderCV
    from mlcolvar.data import DictDataset, DictModule

    data = DictModule(
        DictDataset({"data": table(64)[0]}), lengths=[0.8, 0.2], batch_size=16, random_split=False, shuffle=False
    )
    return fit(AutoEncoderCV([8, 16, 2]), data)


@ENTRIES.add("pina-mathlab", "pina")
def pina_supervised() -> nn.Module:
    from pina import Condition, LabelTensor, Trainer
    from pina.model import FeedForward
    from pina.problem import AbstractProblem
    from pina.solver import SupervisedSolver

    x, y = table()

    class Problem(AbstractProblem):  # type: ignore[misc]
        output_variables = ["u"]
        input_variables = [f"x{i}" for i in range(8)]
        conditions = {"data": Condition(input=LabelTensor(x, input_variables), target=LabelTensor(y, ["u"]))}

    solver = SupervisedSolver(Problem(), FeedForward(8, 1, inner_size=16), use_lt=True)
    Trainer(solver, max_epochs=4, batch_size=8, shuffle=False, **QUIET).train()
    return solver


def pykeen(cls: type) -> nn.Module:
    module = cls(
        dataset="nations",
        dataset_kwargs={"create_inverse_triples": True},
        model="distmult",
        model_kwargs={"embedding_dim": 8},
        batch_size=128,
    )
    return fit(module, library="pytorch_lightning")


@ENTRIES.add(
    "pykeen", "pykeen", note="constrains its embeddings in on_before_zero_grad, which comes after the step here"
)
def pykeen_lcwa() -> nn.Module:
    from pykeen.contrib.lightning import LCWALitModule

    return pykeen(LCWALitModule)


@ENTRIES.add("pykeen", "pykeen", note="the same, with its embeddings constrained in on_train_batch_end")
def pykeen_lcwa_constrained_after_the_step() -> nn.Module:
    from pykeen.contrib.lightning import LCWALitModule

    class AfterTheStep(LCWALitModule):  # type: ignore[misc]
        def on_before_zero_grad(self, optimizer: Any) -> None:
            pass

        def on_train_batch_end(self, *_: Any) -> None:
            self.model.post_parameter_update()

    return pykeen(AfterTheStep)


@ENTRIES.add("pykeen", "pykeen", note="the same, with its embeddings constrained before the backward pass")
def pykeen_lcwa_constrained_before_backward() -> nn.Module:
    from pykeen.contrib.lightning import LCWALitModule

    class BeforeBackward(LCWALitModule):  # type: ignore[misc]
        def on_before_zero_grad(self, optimizer: Any) -> None:
            pass

        def on_before_backward(self, loss: Any) -> None:
            self.model.post_parameter_update()

    return pykeen(BeforeBackward)


@ENTRIES.add("scvi-tools", "scvi")
def scvi_variational_autoencoder() -> nn.Module:
    import anndata
    import numpy
    import scvi

    counts = numpy.random.default_rng(0).poisson(2.0, (64, 20)).astype("float32")
    cells = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=8, n_latent=2)
    model.train(
        max_epochs=2, batch_size=16, accelerator="cpu", devices=1, enable_progress_bar=False, shuffle_set_split=False
    )
    return model.module
