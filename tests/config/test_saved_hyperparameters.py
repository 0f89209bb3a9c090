"""``save_hyperparameters`` of modules and data modules: objects of all kinds, at any moment, and back from a checkpoint."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import nn
from torch.utils.data import TensorDataset

from engine import Callback, DataModule


@dataclass
class Inner:
    depth: int = 2
    widths: tuple[int, ...] = (1, 2)


@dataclass
class Config:
    rate: float = 0.5
    inner: Inner = field(default_factory=Inner)


class Early(Weight):
    """Saves before ``super().__init__()``, as published models do."""

    def __init__(self, lr: float, width: int = 2) -> None:
        self.save_hyperparameters()
        super().__init__()


class Whole(Weight):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.save_hyperparameters(args)
        self.rate = args.rate


class FromNamespace(Weight):
    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.save_hyperparameters(args)
        self.rate, self.all = args.rate, vars(args)


class Nested(Weight):
    def __init__(self, config: Config, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config, self.extra = config, extra


class Saves(Callback):
    def on_train_end(self, run: Any, module: Any) -> None:
        run.save_checkpoint()


def saved(module: Any, root: Path, **run: Any) -> Path:
    """The folder of a checkpoint of this module."""
    fit(root, callbacks=Saves()).run(module, **(run or {"train_loader": ones(1)}))
    return root


def test_before_the_constructor_of_the_base() -> None:
    module = Early(0.1)
    assert module.hparams == {"lr": 0.1, "width": 2}
    module.hparams.lr = 9.0
    assert (module.hparams_initial.lr, module.hparams.lr) == (0.1, 9.0)


def test_the_initial_ones_do_not_change() -> None:
    module = Weight()
    module.save_hyperparameters({"sizes": [1, 2]})
    module.hparams.sizes.append(3)
    module.hparams_initial["sizes"].append(4)
    assert module.hparams_initial == {"sizes": [1, 2]}
    assert Weight().hparams_initial == {}


@pytest.mark.parametrize("given", [Namespace(rate=0.5, n=1), {"rate": 0.5, "n": 1}])
def test_one_object_with_all_of_them(given: Any, tmp_path: Path) -> None:
    if isinstance(given, Namespace):
        module: Any = Whole(given)
        assert module.hparams == {"rate": 0.5, "n": 1}
        assert module.hparams_name == "args"
        loaded = Whole.load_from_checkpoint(saved(module, tmp_path))
        assert (loaded.rate, loaded.hparams) == (0.5, {"rate": 0.5, "n": 1})
        again = FromNamespace.load_from_checkpoint(tmp_path)
        assert (again.rate, again.all) == (0.5, {"rate": 0.5, "n": 1})
    else:
        weight = Weight()
        weight.save_hyperparameters(given)
        assert weight.hparams == given


def test_dataclasses_come_back_as_their_annotation_says(tmp_path: Path) -> None:
    config = Config(0.25, Inner(depth=7, widths=(3, 4)))
    loaded = Nested.load_from_checkpoint(saved(Nested(config, extra={"a": {"b": 1}}), tmp_path))
    assert loaded.config == config
    assert loaded.extra == {"a": {"b": 1}}
    module = Weight()
    module.save_hyperparameters(config)
    assert module.hparams == {"rate": 0.25, "inner": config.inner}


def test_what_else_is_given_is_an_error() -> None:
    module = Weight()
    with pytest.raises(TypeError, match="save_hyperparameters got int: give names of arguments, or a dict"):
        module.save_hyperparameters(3)
    with pytest.raises(TypeError, match="got 2 arguments: give names, or one object"):
        module.save_hyperparameters("a", {"b": 1})
    module.save_hyperparameters({})
    assert module.hparams == {}


def test_what_a_subclass_ignores_is_not_kept_though_its_base_saved_it() -> None:
    class Base(Weight):
        def __init__(self, net: Any = None, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, net: Any, width: int = 3) -> None:
            super().__init__(net, width)
            self.save_hyperparameters(ignore=["net"])

    assert Derived(nn.Linear(1, 1)).hparams == {"width": 3}


def decorated(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        constructor(*args, **kwargs)

    return wrapper


def test_a_decorator_or_a_method_between(tmp_path: Path) -> None:
    class Base(Weight):
        @decorated
        def __init__(self, width: int, **rest: Any) -> None:
            super().__init__()
            self.keep()

        def keep(self) -> None:
            self.save_hyperparameters(frame=inspect.currentframe())

    class Derived(Base):
        def __init__(self, lr: float) -> None:
            super().__init__(4, bias=True)

    assert Derived(0.1).hparams == {"width": 4, "bias": True, "lr": 0.1}


# -- data modules ---------------------------------------------------------------------------------------------------------------


class Data(DataModule):
    def __init__(self, batch_size: int, shift: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 1) + self.hparams.shift, batch_size=self.hparams.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def test_a_data_module_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    folder = saved(Weight(), tmp_path, datamodule=Data(2, shift=1.0))
    data = Data.load_from_checkpoint(folder)
    assert (data.hparams, data.epochs) == ({"batch_size": 2, "shift": 1.0}, 1)
    assert Data.load_from_checkpoint(folder, batch_size=4).hparams == {"batch_size": 4, "shift": 1.0}
    with pytest.raises(TypeError, match=r"Data.__init__ has no argument 'batch_sise'; did you mean 'batch_size'"):
        Data.load_from_checkpoint(folder, batch_sise=4)


def test_a_data_module_of_datasets(tmp_path: Path) -> None:
    numbers = torch.arange(6.0)[:, None]
    data = DataModule.from_datasets(numbers, [TensorDataset(numbers)] * 2, batch_size=3)
    train, val = data.train_dataloader(), data.val_dataloader()
    assert sorted(torch.cat(list(train)).flatten().tolist()) == numbers.flatten().tolist()
    assert (train.batch_size, len(train), len(val), [len(each) for each in val]) == (3, 2, 2, [2, 2])
    assert data.test_dataloader() is None
    assert isinstance(train.sampler, torch.utils.data.RandomSampler)
    assert isinstance(val[0].sampler, torch.utils.data.SequentialSampler)

    class Own(DataModule):
        def __init__(self, name: str, batch_size: int = 7) -> None:
            super().__init__()
            self.said = (name, batch_size)

    assert Own.from_datasets(numbers, batch_size=2, name="x").said == ("x", 2)
    assert fit(tmp_path).run(Weight(), datamodule=DataModule.from_datasets(numbers, batch_size=2)).step == 3
