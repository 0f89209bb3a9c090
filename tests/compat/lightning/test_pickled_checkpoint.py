"""One-file checkpoints: ours and Lightning's, each read by both."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, weights


@pytest.mark.parametrize("writer", [THEIRS, OURS], ids=["theirs", "ours"])
def test_a_training_resumes_from_one_file(writer: Any, tmp_path: Path) -> None:
    expected, net = module(OURS), module(writer)
    trainer(OURS, tmp_path, max_epochs=4).fit(expected, data(), data())
    first = trainer(writer, tmp_path, max_epochs=2)
    quietly(first.fit, net, data(), data())
    quietly(first.save_checkpoint, tmp_path / "x.ckpt")
    loaded = type(module(OURS)).load_from_checkpoint(tmp_path / "x.ckpt", map_location="cpu", lr=0.3)
    torch.testing.assert_close(weights(loaded), weights(net))
    assert dict(loaded.hparams) == {"width": 5, "lr": 0.3}
    second, resumed = trainer(OURS, tmp_path, max_epochs=4), module(OURS)
    second.fit(resumed, data(), data(), ckpt_path=tmp_path / "x.ckpt")
    assert (second.current_epoch, second.global_step) == (4, 40)
    torch.testing.assert_close(weights(resumed), weights(expected), rtol=0, atol=1e-6)


def test_the_file_is_a_zip_without_a_pickle(tmp_path: Path) -> None:
    fitted = trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(module(OURS), data())
    fitted.save_checkpoint(tmp_path / "x.ckpt")
    fitted.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with zipfile.ZipFile(tmp_path / "x.ckpt") as archive:
        names = archive.namelist()
    assert "manifest.json" in names
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ""}
    with pytest.raises(ValueError, match="0 optimizer"):
        trainer(OURS, tmp_path, max_epochs=2).fit(module(OURS), data(), ckpt_path=tmp_path / "weights.ckpt")
    assert sorted(path.name for path in tmp_path.glob("*.ckpt*")) == ["weights.ckpt", "x.ckpt"]


def test_lightning_reads_the_pickle_that_was_asked_for(tmp_path: Path) -> None:
    net, fitted = module(OURS), trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(net, data())
    fitted.save_checkpoint(tmp_path / "x.ckpt", pickle=True)
    theirs = quietly(type(module(THEIRS)).load_from_checkpoint, tmp_path / "x.ckpt")
    torch.testing.assert_close(weights(theirs), weights(net))
    assert dict(theirs.hparams) == {"width": 5, "lr": 0.05}
    metrics = trainer(OURS, tmp_path).validate(module(OURS), data(), ckpt_path=tmp_path / "x.ckpt")
    assert metrics == fitted.validate(net, data())


def test_the_averages_of_lightnings_callback_are_not_the_trained_weights(tmp_path: Path) -> None:
    """Its files have the averages as ``state_dict``: tests get these, a training continues from the others, to the bit."""

    class Saves(THEIRS.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    average = THEIRS.callbacks.EMAWeightAveraging(decay=0.9)
    quietly(trainer(THEIRS, tmp_path, max_epochs=2, callbacks=[average, Saves()]).fit, module(THEIRS), data(), data())
    expected = torch.load(tmp_path / "x.ckpt", weights_only=True)
    loaded = type(module(OURS)).load_from_checkpoint(tmp_path / "x.ckpt")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(expected["state_dict"]), rtol=0, atol=0)

    class Look(OURS.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.found = {name: value.clone() for name, value in pl_module.state_dict().items()}

    look = Look()
    trainer(OURS, tmp_path, max_epochs=3, callbacks=[look]).fit(module(OURS), data(), ckpt_path=tmp_path / "x.ckpt")
    torch.testing.assert_close(look.found, dict(expected["current_model_state"]), rtol=0, atol=0)


def test_the_best_is_tested_with_the_weights_that_were_scored(tmp_path: Path) -> None:
    best = OURS.callbacks.ModelCheckpoint(monitor="val")
    fitted = trainer(
        OURS,
        tmp_path,
        max_epochs=2,
        callbacks=[OURS.callbacks.EMAWeightAveraging(decay=0.9), best],
        enable_checkpointing=True,
    )
    fitted.fit(module(OURS), data(), data())
    (found,) = fitted.validate(module(OURS), data(), ckpt_path="best")
    assert found["val"] == pytest.approx(best.best_model_score.item())
    (tested,) = fitted.test(module(OURS), data(), ckpt_path="best")
    assert tested["test"] == pytest.approx(best.best_model_score.item())


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "run": print}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="print"):
        type(module(OURS)).load_from_checkpoint(tmp_path / "x.ckpt")


def test_there_must_be_a_training(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has not trained"):
        trainer(OURS, tmp_path).save_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("writer", [THEIRS, OURS], ids=["theirs", "ours"])
def test_a_file_is_read_as_the_dict_that_it_holds(writer: Any, tmp_path: Path) -> None:
    net, fitted = module(writer), trainer(writer, tmp_path, max_epochs=1)
    quietly(fitted.fit, net, data())
    quietly(fitted.save_checkpoint, tmp_path / "x.ckpt")
    found = OURS.utilities._load(tmp_path / "x.ckpt", map_location="cpu")
    assert (found["global_step"], dict(found["hyper_parameters"])) == (10, {"width": 5, "lr": 0.05})
    torch.testing.assert_close(dict(found["state_dict"]), dict(net.state_dict()))


def test_checkpoints_are_files_beside_their_folders_where_pickles_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OURS.callbacks.ModelCheckpoint, "pickles", True)
    saved = OURS.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val", save_top_k=2, save_last=True)
    net, fitted = module(OURS), trainer(OURS, tmp_path, max_epochs=3, callbacks=[saved], enable_checkpointing=True)
    fitted.fit(net, data(), data())
    files = sorted(map(str, (tmp_path / "best").glob("*.pt")))
    assert sorted({*saved.best_k_models, saved.last_model_path}) == files
    last = torch.load(saved.last_model_path, weights_only=True)
    assert (last["epoch"], last["global_step"]) == (2, 30)
    torch.testing.assert_close(dict(last["state_dict"]), dict(net.state_dict()))
    theirs = quietly(type(module(THEIRS)).load_from_checkpoint, saved.last_model_path)
    torch.testing.assert_close(weights(theirs), weights(net))
    assert len(fitted.test(ckpt_path="best", dataloaders=data())) == 1
    folder = saved.last_model_path.removesuffix(".pt")
    with pytest.raises(ValueError, match=rf"no optimizers; give the whole checkpoint, {re.escape(folder)}"):
        trainer(OURS, tmp_path, max_epochs=4).fit(module(OURS), data(), ckpt_path=saved.last_model_path)
    longer = trainer(OURS, tmp_path, max_epochs=4)  # the folders are still what a training goes on from
    longer.fit(module(OURS), data(), data(), ckpt_path=folder)
    assert longer.global_step == 40


def test_a_file_of_an_earlier_training_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OURS.callbacks.ModelCheckpoint, "pickles", True)
    (tmp_path / "best").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "best" / "epoch=0-step=10.ckpt.pt")
    saved = OURS.callbacks.ModelCheckpoint(tmp_path / "best")
    net, fitted = module(OURS), trainer(OURS, tmp_path, max_epochs=1, callbacks=[saved], enable_checkpointing=True)
    fitted.fit(net, data())
    found = torch.load(tmp_path / "best" / "epoch=0-step=10.ckpt.pt", weights_only=True)
    torch.testing.assert_close(dict(found["state_dict"]), dict(net.state_dict()))


def test_a_class_that_overrides_load_from_checkpoint_loads_through_the_function(tmp_path: Path) -> None:
    class Own(type(module(OURS))):  # type: ignore[misc]
        @classmethod
        def load_from_checkpoint(cls, path: Path, **kwargs: Any) -> Any:
            return OURS.core._load_from_checkpoint(cls, path, None, None, True, **kwargs)

    net, fitted = module(OURS), trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(net, data())
    fitted.save_checkpoint(tmp_path / "x.ckpt")
    loaded = Own.load_from_checkpoint(tmp_path / "x.ckpt", lr=0.3)
    assert (type(loaded), loaded.hparams["lr"]) == (Own, 0.3)
    torch.testing.assert_close(weights(loaded), weights(net))
