"""Lightning's demos and examples, trained as they are: entries of ``published_modules.py``.

The demos are those of the installed package (``lightning.pytorch.demos``). The examples are read from a checkout of its repository. What
its documentation shows in fragments is in ``lightning_recipes.py``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_recipes
import torch
from entry import QUIET, Entries, definitions
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

ENTRIES = Entries(lightning_recipes.ENTRIES)
DEMOS = "lightning.pytorch.demos"
EXAMPLES = "pytorch-lightning/examples/pytorch"
TEXT = "the cat sat on the mat and the dog lay by the door while rain fell on the roof \n"


def demo(**options: Any) -> Any:
    return ENTRIES.add("lightning", "lightning", group="demos", **options)


def example(path: str, *modules: str, note: str = "") -> Any:
    return ENTRIES.add("lightning", "lightning", *modules, group="demos", source=f"{EXAMPLES}/{path}", note=note)


def fit(module: Any, *data: Any, then: tuple[str, ...] = (), **options: Any) -> nn.Module:
    """Train ``module``, then call other methods of the same trainer."""
    import lightning.pytorch as pl

    trainer = pl.Trainer(**QUIET | {"max_epochs": 2} | options)
    trainer.fit(module, *data)
    for method in then:
        getattr(trainer, method)(module, *data[-1:])
    return module


def mnist_files(folder: str) -> None:
    """Pictures and labels in the files that MNIST's readers (the demos' own, and torchvision's) look for, so that nothing is downloaded."""
    root = Path(folder) / "MNIST"
    (root / "complete").mkdir(parents=True)
    (root / "raw").mkdir()
    for name, raw, count in (("training.pt", "train", 600), ("test.pt", "t10k", 100)):
        pictures = torch.randint(0, 255, (count, 28, 28), dtype=torch.uint8)
        labels = torch.arange(count) % 10
        torch.save((pictures, labels), root / "complete" / name)
        for part, magic, values in (("images-idx3", 2051, pictures), ("labels-idx1", 2049, labels.to(torch.uint8))):
            header = b"".join(number.to_bytes(4, "big") for number in (magic, *values.shape))
            (root / "raw" / f"{raw}-{part}-ubyte").write_bytes(header + values.numpy().tobytes())


def images(count: int, size: int, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, size, size), torch.arange(count) % classes)


def image_folder(root: str) -> None:
    """Two classes of small pictures under ``root/train`` and ``root/val``."""
    from torchvision.utils import save_image

    for part in ("train", "val"):
        for label in ("cats", "dogs"):
            place = Path(root) / part / label
            place.mkdir(parents=True)
            for i in range(4):
                save_image(torch.rand(3, 64, 64), place / f"{i}.png")


def wikitext() -> None:
    """The file that the demos' ``WikiText2`` reads, so that it downloads nothing."""
    Path("data").mkdir(exist_ok=True)
    words = [f"{word}{i % 7}" for i in range(200) for word in TEXT.split()]
    lines = [" ".join(words[i : i + 12]) + " \n" for i in range(0, len(words), 12)]
    Path("data/wikitext-2.txt").write_text("".join(lines))


# -- lightning.pytorch.demos ---------------------------------------------------------------------------------------------------------


@demo()
def boring_model() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")
    return fit(demos.BoringModel(), then=("validate", "test", "predict"))


@demo()
def boring_model_with_datamodule() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")
    return fit(demos.BoringModel(), demos.BoringDataModule(), then=("validate", "test", "predict"))


@demo(note="its data set draws each sample from the global generator")
def boring_datamodule_no_len() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")
    return fit(
        demos.BoringModel(), demos.BoringDataModuleNoLen(), limit_train_batches=8, limit_val_batches=2, max_epochs=1
    )


@demo()
def iterable_datasets_side_by_side() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")

    class Both(demos.BoringModel):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.step(batch[0]) + self.step(torch.ones_like(batch[1]))}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val", self.step(batch))

    return fit(Both(), demos.IterableBoringDataModule())


@demo()
def manual_optim_boring_model() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")
    return fit(demos.ManualOptimBoringModel())


@demo()
def demo_model() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")
    return fit(demos.DemoModel(), DataLoader(demos.RandomDataset(32, 64), batch_size=4))


@demo()
def random_dict_dataset() -> nn.Module:
    demos = import_module(f"{DEMOS}.boring_classes")

    class Dicts(demos.BoringModel):  # type: ignore[name-defined, misc]
        def step(self, batch: Any) -> Any:
            return self.loss(self(batch["a"]), self(batch["b"]).detach())

    return fit(Dicts(), *(DataLoader(demos.RandomDictDataset(32, 32), batch_size=4) for _ in range(2)))


@demo()
def lightning_transformer() -> nn.Module:
    wikitext()
    demos = import_module(f"{DEMOS}.transformer")
    return fit(demos.LightningTransformer(vocab_size=demos.WikiText2().vocab_size), limit_train_batches=6)


@demo()
def lightning_lstm() -> nn.Module:
    wikitext()
    demos = import_module(f"{DEMOS}.lstm")
    size = import_module(f"{DEMOS}.transformer").WikiText2().vocab_size
    return fit(demos.LightningLSTM(vocab_size=size), limit_train_batches=4, gradient_clip_val=0.25)


@demo()
def mnist_datamodule() -> nn.Module:
    import lightning.pytorch as pl

    mnist_files("data")
    demos = import_module(f"{DEMOS}.mnist_datamodule")

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    data = demos.MNISTDataModule("data", val_split=100, num_workers=0, normalize=True, batch_size=50)
    return fit(Classifier(), data, then=("test",))


# -- examples/pytorch ----------------------------------------------------------------------------------------------------------------


@example("bug_report/bug_report_model.py")
def example_bug_report() -> nn.Module:
    names = definitions(f"{EXAMPLES}/bug_report/bug_report_model.py")
    loader = [DataLoader(names["RandomDataset"](32, 64), batch_size=2) for _ in range(2)]
    return fit(names["BoringModel"](), *loader, then=("test",))


def mnist_loaders(count: int = 64) -> tuple[Any, Any]:
    data = TensorDataset(torch.rand(count, 1, 28, 28), torch.arange(count) % 10)
    return DataLoader(data, batch_size=16), DataLoader(Subset(data, range(20)), batch_size=16)


@example("basics/autoencoder.py", "torchvision")
def example_autoencoder() -> nn.Module:
    import lightning.pytorch as pl

    names = definitions(f"{EXAMPLES}/basics/autoencoder.py")

    class Data(pl.LightningDataModule):
        mnist_val = mnist_loaders()[1].dataset

        def train_dataloader(self) -> Any:
            return mnist_loaders()[0]

        def val_dataloader(self) -> Any:
            return mnist_loaders()[1]

        test_dataloader = predict_dataloader = val_dataloader

    options = {"callbacks": [names["ImageSampler"]()], "enable_checkpointing": True, "logger": True}
    return fit(names["LitAutoEncoder"](), Data(), then=("test", "predict"), **options)


@example("basics/backbone_image_classifier.py", "torchvision")
def example_backbone_image_classifier() -> nn.Module:
    names = definitions(f"{EXAMPLES}/basics/backbone_image_classifier.py")
    return fit(names["LitClassifier"](), *mnist_loaders(), then=("test", "predict"))


@example("basics/transformer.py")
def example_transformer() -> nn.Module:
    wikitext()
    names = definitions(f"{EXAMPLES}/basics/transformer.py")
    data = names["WikiText2"]()
    loaders = [DataLoader(Subset(data, range(10 * i, 10 * i + 10)), batch_size=4) for i in range(2)]
    return fit(names["LanguageModel"](data.vocab_size), *loaders, then=("test",), gradient_clip_val=0.25)


@example("domain_templates/generative_adversarial_net.py", "torchvision", "tensorboard")
def example_gan() -> nn.Module:
    names = definitions(f"{EXAMPLES}/domain_templates/generative_adversarial_net.py")
    return fit(names["GAN"](), mnist_loaders()[0], logger=True)


@example("domain_templates/semantic_segmentation.py", "torchvision", note="on tensors: its reader of pictures fails")
def example_semantic_segmentation() -> nn.Module:
    names = definitions(f"{EXAMPLES}/domain_templates/semantic_segmentation.py")
    names["_create_synth_kitti_dataset"]("kitti", image_dims=(64, 32))
    module = names["SegModel"]("kitti", batch_size=1, num_layers=2, features_start=4)
    module.learning_rate = module.lr
    data = TensorDataset(torch.rand(4, 3, 32, 64), torch.randint(0, 19, (4, 32, 64)))
    return fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))


@example("domain_templates/imagenet.py", "torchvision")
def example_imagenet() -> nn.Module:
    names = definitions(f"{EXAMPLES}/domain_templates/imagenet.py")
    image_folder("imagenet")
    names["transforms"].RandomResizedCrop = names["transforms"].Resize
    names["transforms"].RandomHorizontalFlip = lambda: lambda image: image
    module = names["ImageNetLightningModel"]("imagenet", batch_size=2, workers=0)
    return fit(module, max_epochs=1, limit_train_batches=2, limit_val_batches=1)


@example(
    "domain_templates/computer_vision_fine_tuning.py",
    "torchvision",
    note="its frozen batch norms use the batch's statistics there, their own here",
)
def example_transfer_learning() -> nn.Module:
    return transfer_learning(train_bn=False)


@example(
    "domain_templates/computer_vision_fine_tuning.py",
    "torchvision",
    note="the same, with its batch norms trained",
)
def example_transfer_learning_with_batch_norms_trained() -> nn.Module:
    return transfer_learning(train_bn=True)


def transfer_learning(train_bn: bool) -> nn.Module:
    """Its backbone starts without downloaded weights."""
    import torchvision

    names = definitions(f"{EXAMPLES}/domain_templates/computer_vision_fine_tuning.py")
    names["get_torchvision_model"] = lambda name, weights: getattr(torchvision.models, name)(weights=None)
    module = names["TransferLearningModel"](milestones=(1, 2), train_bn=train_bn)
    loader = DataLoader(images(4, 32, 2), batch_size=2)
    return fit(module, loader, loader, callbacks=[names["MilestonesFinetuning"]((1, 2), train_bn)], max_epochs=3)


@example("servable_module/production.py", "torchvision", note="its backbone starts without downloaded weights")
def example_servable_module() -> nn.Module:
    import torchvision

    names = definitions(f"{EXAMPLES}/servable_module/production.py")
    names["get_torchvision_model"] = lambda name, weights: getattr(torchvision.models, name)(weights=None)
    loader = DataLoader(images(4, 32), batch_size=2)
    return fit(names["LitModule"](), loader, loader, max_epochs=1)
