"""What a run takes out of a checkpoint: all of it, or a chosen part."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import LINEAR_BATCHES, linear_fit
from torch import nn

from callbacks import ModelCheckpoint
from engine import Callback, Resume, TrainModule

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")


class Net(TrainModule):
    """Counts as it learns; the rate halves at each epoch's end."""

    def __init__(self, lr: float = 0.1, decay: float = 0.0, extra: bool = False, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.decay = lr, decay
        self.net = nn.Linear(4, width)
        if extra:
            self.head = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.current_epoch in (0, 2)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.decay)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Watch(Callback):
    """What holds when the training begins."""

    def on_train_start(self, run: Any, module: Any) -> None:
        (self.group,) = run.optimizers[0].param_groups
        self.group = dict(self.group)
        self.state, self.step = len(run.optimizers[0].state), run.step
        self.schedule = run.schedulers[0].scheduler.last_epoch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs of four steps; every epoch's end is kept."""
    root = tmp_path_factory.mktemp("run")
    linear_fit(root, ModelCheckpoint(monitor="val", save_top_k=-1)).run(Net(), LINEAR_BATCHES, LINEAR_BATCHES)
    return root


def resumed(root: Path, tmp_path: Path, module: TrainModule, wanted: Any, **settings: Any) -> tuple[Watch, Any]:
    watch = Watch()
    result = linear_fit(
        tmp_path,
        watch,
        ModelCheckpoint(dirpath=root / "checkpoints", every=None, save_last=False, save_top_k=1),
        **settings,
    ).run(module, LINEAR_BATCHES, LINEAR_BATCHES, resume=wanted)
    return watch, result


def path(root: Path, step: int) -> Path:
    return root / "checkpoints" / f"step={step:08d}"


def start(root: Path, module: TrainModule, wanted: Any) -> Watch:
    """Where a run begins that continues from ``wanted``; nothing is trained or saved."""
    watch = Watch()
    linear_fit(root, watch, max_epochs=0).run(module, LINEAR_BATCHES, resume=wanted)
    return watch


def test_more_epochs(root: Path, tmp_path: Path) -> None:
    one, two = Net(), Net()
    linear_fit(tmp_path, max_epochs=5).run(one, LINEAR_BATCHES)
    assert linear_fit(tmp_path, max_epochs=5).run(two, LINEAR_BATCHES, resume=path(root, 8)).step == 20
    assert torch.equal(one.net.weight, two.net.weight)


def test_best_by_the_score_of_the_manifests(root: Path) -> None:
    # val is 1, 0, 1 after the epochs.
    assert start(root, Net(), "best").step == 8
    assert start(root, Net(), "last").step == 12
    assert start(root, Net(), Resume("best")).step == 8


def test_of_equal_scores_the_first_is_the_best(tmp_path: Path) -> None:
    # val is 1, 0, 1 after the epochs.
    keep = ModelCheckpoint(monitor="val", mode="max", save_top_k=-1)
    result = linear_fit(tmp_path, keep).run(Net(), LINEAR_BATCHES, LINEAR_BATCHES)
    assert result.best_checkpoint == path(tmp_path, 4)
    assert start(tmp_path, Net(), "best").step == 4


def test_best_without_scores(tmp_path: Path) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_epochs=1).run(Net(), LINEAR_BATCHES)
    with pytest.raises(
        FileNotFoundError,
        match=r"resume='best': no complete checkpoint with a score in .*\. Give the path of a checkpoint to use that of another run$",
    ):
        start(tmp_path, Net(), "best")
    with pytest.raises(FileNotFoundError, match="checkpoint='best': no complete checkpoint with a score"):
        linear_fit(tmp_path).validate(Net(), LINEAR_BATCHES, checkpoint="best")
    with pytest.raises(FileNotFoundError, match=r"another run, or resume='auto' to start a new one$"):
        start(tmp_path / "empty", Net(), "last")


def test_a_misspelt_name(root: Path) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"resume='newest': .* holds no complete checkpoint .*; give 'last', 'auto', 'best', or the path",
    ):
        start(root, Net(), "newest")


def test_a_flag_is_not_a_checkpoint(root: Path) -> None:
    told = r"True \(bool\) is not a checkpoint: give 'last', 'auto', 'best', or the path"
    with pytest.raises(TypeError, match=told):
        start(root, Net(), True)
    with pytest.raises(TypeError, match=told):
        linear_fit(root).validate(Net(), LINEAR_BATCHES, checkpoint=True)  # type: ignore[arg-type]


def test_a_file_in_place_of_a_checkpoint(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.ckpt"
    file.write_bytes(b"of another trainer")
    told = r"other\.ckpt is a file, but a checkpoint is a directory.* fit checkpoint convert .* OUT --trust-pickle \(without"
    with pytest.raises(NotADirectoryError, match=told):
        start(root, Net(), file)
    with pytest.raises(NotADirectoryError, match=told):
        linear_fit(root).validate(Net(), LINEAR_BATCHES, checkpoint=file)
    with pytest.raises(NotADirectoryError, match=told):
        Net.load_from_checkpoint(file)


def test_weights_only(root: Path) -> None:
    module = Net()
    watch = start(root, module, Resume(path(root, 8), weights_only=True))
    assert (watch.step, watch.state, watch.schedule, watch.group["lr"]) == (0, 0, 0, 0.1)
    assert not torch.equal(module.net.weight, Net().net.weight)


def test_without_the_optimizer(root: Path) -> None:
    watch = start(root, Net(), Resume(path(root, 8), optimizer=False))
    assert (watch.step, watch.state, watch.schedule, watch.group["lr"]) == (8, 0, 0, 0.1)


def test_configured_hyperparameters_hold(root: Path) -> None:
    # Saved after two epochs: 0.1 * 0.5 ** 2. The new rate is twice as high, and has the same steps behind it.
    watch = start(root, Net(lr=0.2, decay=0.3), Resume(path(root, 8), hyperparameters="configured"))
    saved = start(root, Net(lr=0.2, decay=0.3), path(root, 8))
    assert (saved.group["lr"], saved.group["weight_decay"]) == (pytest.approx(0.025), 0.0)
    assert (watch.group["lr"], watch.group["weight_decay"]) == (pytest.approx(0.05), 0.3)
    assert (watch.step, watch.state, watch.schedule) == (saved.step, saved.state, saved.schedule) == (8, 2, 2)


@pytest.mark.parametrize(
    ("optimizer", "flag", "entry"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_a_configured_flag_whose_state_was_not_saved(tmp_path: Path, optimizer: Any, flag: dict, entry: str) -> None:
    class Flagged(Net):
        def __init__(self, **flags: Any) -> None:
            super().__init__()
            self.flags = flags

        def configure_optimizers(self) -> Any:
            chosen = optimizer(self.parameters(), lr=0.1, **self.flags)
            return [chosen], [torch.optim.lr_scheduler.ExponentialLR(chosen, 0.5)]

    linear_fit(tmp_path, ModelCheckpoint(), max_epochs=1).run(Flagged(), LINEAR_BATCHES)
    start(tmp_path, Flagged(**flag), "last")  # with the saved flags
    with pytest.raises(ValueError, match=f"and has no '{entry}', which {optimizer.__name__} needs with the configured"):
        start(tmp_path, Flagged(**flag), Resume("last", hyperparameters="configured"))


def test_hyperparameters_that_a_checkpoint_replaces_are_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(root, Net(lr=0.2, decay=0.3), path(root, 8))
    assert (
        "continues with the checkpoint's lr=0.1 (configured: 0.2), weight_decay=0 (configured: 0.3). To use"
        in caplog.text
    )
    assert f"Resume('{path(root, 8)}', hyperparameters='configured')" in caplog.text
    caplog.clear()
    start(root, Net(), path(root, 8))  # the schedule has changed the rate
    start(root, Net(lr=0.2), Resume(path(root, 8), hyperparameters="configured"))
    start(root, Net(lr=0.2), Resume(path(root, 8), optimizer=False))
    assert "continues with the checkpoint's" not in caplog.text


class Cycling(Net):
    """The schedule changes rate and momentum, under other names of their limits."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Falling(Net):
    """The schedule keeps no initial rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


@pytest.mark.parametrize("net", [Cycling, Falling])
def test_what_schedules_change_is_not_told(net: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = LINEAR_BATCHES
    linear_fit(tmp_path, ModelCheckpoint(every="6 steps"), max_epochs=3).run(net(), data, data)
    linear_fit(tmp_path, max_epochs=4).run(net(), data, data, resume="last")
    assert "continues with the checkpoint's" not in caplog.text
    linear_fit(tmp_path, max_epochs=4).run(net(lr=0.5), data, data, resume="last")
    assert ("max_lr=0.1 (configured: 0.5)" in caplog.text) == (net is Cycling)


def test_schedules_go_on_from_the_configured_rate(root: Path, tmp_path: Path) -> None:
    class Last(Callback):
        def on_train_end(self, run: Any, module: Any) -> None:
            self.lr = run.optimizers[0].param_groups[0]["lr"]

    last = Last()
    linear_fit(tmp_path, last, max_epochs=4).run(
        Net(lr=0.4), LINEAR_BATCHES, resume=Resume(path(root, 8), hyperparameters="configured")
    )
    assert last.lr == pytest.approx(0.4 * 0.5**4)


def test_parts_that_do_not_fit_are_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"does not fit Net: missing in the checkpoint: head\.bias, head\.weight"):
        start(root, Net(extra=True), Resume(path(root, 8), weights_only=True))
    with pytest.raises(ValueError, match=r"of another shape: net\.weight .*net\.bias \(\[1\] there, \[2\] here\)"):
        start(root, Net(width=2), path(root, 8))
    module = Net(extra=True)
    with caplog.at_level(logging.WARNING, "engine"):
        start(root, module, Resume(path(root, 8), weights_only=True, strict=False))
    assert "fits in part: missing in the checkpoint: head.bias, head.weight" in caplog.text
    assert not torch.equal(module.net.weight, Net().net.weight)


class Half(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.net.weight], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_other_optimizers_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"only in the checkpoint: \['net.bias'\].*Resume\(path, optimizer=False\)"):
        start(root, Half(), path(root, 8))


@pytest.mark.parametrize(("module", "kept"), [(Half(), 1), (Net(extra=True), 2), (Net(width=2), 0)])
def test_what_fits_of_an_optimizer(root: Path, tmp_path: Path, module: Net, kept: int) -> None:
    watch = start(root, module, Resume(path(root, 8), strict=False))
    assert (watch.step, watch.state, watch.schedule) == (8, kept, 2)
    linear_fit(tmp_path, max_epochs=3).run(module, LINEAR_BATCHES, resume=Resume(path(root, 8), strict=False))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="hyperparameters='mine'"):
        Resume(hyperparameters="mine")


def test_registered_objects_and_hyperparameters(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    class Counts(Callback):
        def __init__(self) -> None:
            self.counter = Counter()

        def on_fit_start(self, run: Any, module: Any) -> None: ...

        def setup(self, run: Any, module: Any, stage: str) -> None:
            run.engine.register_for_checkpointing(self.counter)

        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.counter.n += 1

    linear_fit(tmp_path, Counts(), ModelCheckpoint(), max_epochs=1).run(Net(), LINEAR_BATCHES)
    counts = Counts()
    linear_fit(tmp_path, counts, max_epochs=2).run(Net(), LINEAR_BATCHES, resume="last")
    assert counts.counter.n == 8
    with pytest.raises(ValueError, match=r"has 1 object\(s\) of register_for_checkpointing, and 0 are registered"):
        linear_fit(tmp_path, max_epochs=2).run(Net(), LINEAR_BATCHES, resume="last")
    with pytest.raises(TypeError, match="register_for_checkpointing got object"):
        linear_fit(tmp_path, Bad(), max_epochs=2).run(Net(), LINEAR_BATCHES)


class Bad(Callback):
    def setup(self, run: Any, module: Any, stage: str) -> None:
        run.engine.register_for_checkpointing(object())


def test_evaluation_takes_the_best(root: Path, tmp_path: Path) -> None:
    class Weight(Callback):
        def on_validation_start(self, run: Any, module: Any) -> None:
            self.weight = module.net.weight.detach().clone()

    weight, module = Weight(), Net()
    linear_fit(root, weight).validate(module, LINEAR_BATCHES, checkpoint="best")
    expected = Net()
    start(root, expected, path(root, 8))
    assert torch.equal(weight.weight, expected.net.weight)


def test_several_names_and_a_time(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        monitor="val", filename="epoch={epoch}-val={val:.2f}", save_top_k=-1, keep_every="2 epochs"
    )
    result = linear_fit(tmp_path, callback).run(Net(), LINEAR_BATCHES, LINEAR_BATCHES)
    names = sorted(each.name for each in (tmp_path / "checkpoints").iterdir())
    assert names == ["epoch=0-val=1.00", "epoch=1-val=0.00", "epoch=2-val=1.00"]
    assert str(result.best_checkpoint).endswith("epoch=1-val=0.00")
    assert callback.permanent == {8}


def test_one_name_for_all_and_what_is_kept_for_ever(tmp_path: Path) -> None:
    callback = ModelCheckpoint(every=1, filename="only", keep_every=5)
    linear_fit(tmp_path, callback).run(Net(), LINEAR_BATCHES)
    names = dict(callback.names)
    assert sorted(names) == [5, 10, 12]
    assert len(set(names.values())) == 3
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == sorted(names.values())


@pytest.mark.parametrize("filename", ["{", "{epoch:x.y}", "{step.a}"])
def test_wrong_names(filename: str) -> None:
    with pytest.raises(ValueError, match="is not a format"):
        ModelCheckpoint(filename=filename)


@pytest.mark.parametrize("filename", ["", "..", ".{step}", "a\x1b[31m{step}", "x" * 300])
def test_names_that_are_not_possible_are_an_error_at_once(filename: str) -> None:
    with pytest.raises(ValueError, match="names must not be empty, start with a dot"):
        ModelCheckpoint(filename=filename)


def test_too_long_a_name_is_an_error_each_time(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, run: Any, *arguments: Any) -> None:
            with pytest.raises(OSError, match="File name too long"):
                run.save_checkpoint("x" * 300)

    assert linear_fit(tmp_path, Saves()).run(Net(), LINEAR_BATCHES).step == 12


def test_an_unknown_metric_in_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'vla' is not known here; available: epoch, step"):
        linear_fit(tmp_path, ModelCheckpoint(filename="{vla:.2f}")).run(Net(), LINEAR_BATCHES, LINEAR_BATCHES)


class Unfreeze(Callback):
    """Trains ``head`` from the second epoch on, as a parameter group of its own."""

    def __init__(self, by_state: bool) -> None:
        self.by_state, self.done = by_state, False

    def unfreeze(self, run: Any, module: Any) -> None:
        self.done = True
        module.head.requires_grad_(True)
        run.optimizers[0].add_param_group({"params": list(module.head.parameters()), "lr": 0.01})

    def on_train_epoch_start(self, run: Any, module: Any) -> None:
        if run.epoch >= 1 and not self.done:
            self.unfreeze(run, module)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.by_state:
            self.restored = state["done"]

    def on_load_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.restored if self.by_state else run.epoch >= 1:
            self.unfreeze(run, module)


class Gradual(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = nn.Linear(4, 1), nn.Linear(1, 1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.net(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("step", [4, 6, 8])
@pytest.mark.parametrize("by_state", [False, True])
def test_parameter_groups_that_were_added_in_training(tmp_path: Path, by_state: bool, step: int) -> None:
    linear_fit(tmp_path, Unfreeze(by_state), ModelCheckpoint(every=2, save_top_k=-1)).run(Gradual(), LINEAR_BATCHES)
    module = Gradual()
    linear_fit(tmp_path / "again", Unfreeze(by_state)).run(module, LINEAR_BATCHES, resume=path(tmp_path, step))
    bare = Gradual()
    optimizer = bare.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            bare.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(bare.head.parameters()), "lr": 0.01})
        for index, batch in enumerate(LINEAR_BATCHES):
            optimizer.zero_grad()
            bare.training_step(batch, index).backward()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), bare.parameters(), strict=True))


def test_added_groups_that_are_not_added_again_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    linear_fit(tmp_path, Unfreeze(False), ModelCheckpoint()).run(Gradual(), LINEAR_BATCHES)
    with pytest.raises(
        ValueError,
        match=r"2 group\(s\) of \[2, 2\], the optimizer has 1 of \[2\].*in on_load_checkpoint of the callback or module",
    ):
        linear_fit(tmp_path).run(Gradual(), LINEAR_BATCHES, resume="last")
