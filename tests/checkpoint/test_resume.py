"""Which checkpoint a run continues from: the newest that can be used, never silently another one, and nothing that it names elsewhere is touched."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import record_of, resummed
from support.toys import LINEAR_BATCHES, Linear, linear_fit

from callbacks import ModelCheckpoint
from engine import Callback, Resume
from engine.checkpoint.catalog import problems
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.manifest import FORMAT
from engine.checkpoint.storage_paths import storage_of
from engine.cli.main import main
from engine.compat.foreign_checkpoints.untrusted_files import DistributedFiles


def trained(root: Path, steps: int = 8, every: int = 4, **arguments: Any) -> Path:
    """The folder of a run's checkpoints, the newest of which is that of ``steps``."""
    linear_fit(root, ModelCheckpoint(every=every, save_top_k=-1, **arguments), max_steps=steps, max_epochs=None).run(
        Linear(), LINEAR_BATCHES
    )
    return max(path.parent.parent for path in root.rglob("manifest.json"))


def name(step: int) -> str:
    return f"step={step:08d}"


def rewrite(path: Path, change: Callable[[Any], Any], file: str = "manifest.json") -> None:
    """Change a JSON file of a checkpoint, with checksums that fit."""
    value = json.loads((path / file).read_text())
    text = json.dumps(value if (changed := change(value)) is None else changed)
    manifest = json.loads((path / "manifest.json").read_text()) if file != "manifest.json" else json.loads(text)
    if file != "manifest.json":
        (path / file).write_text(text)
        manifest["files"][file] = record_of(path / file)
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


# -- what a checkpoint names ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("where", ["absolute", "../other", "", ".", "..", 7, "folder/inner"])
def test_a_checkpoint_that_names_other_data_for_removal_is_refused(tmp_path: Path, where: Any) -> None:
    root = trained(tmp_path / "run")
    other = root.parent / "other"
    shutil.copytree(root / name(4), other)
    shutil.copytree(root / name(4), root / "folder" / "inner")
    shutil.copytree(
        root / name(4), other.parent / "beside"
    )  # else `other` is the only one there, and stays for that reason
    named = str(other) if where == "absolute" else where
    rewrite(root / name(8), lambda shared: {**shared, "postponed": [named]}, "state/shared.json")
    before = {**tree(other), **tree(root / "folder")}
    with pytest.raises(DamagedCheckpoint, match="no usable 'postponed"):
        linear_fit(tmp_path / "run", ModelCheckpoint(every=2), max_steps=12, max_epochs=None).run(
            Linear(), LINEAR_BATCHES, resume=root / name(8)
        )
    assert {**tree(other), **tree(root / "folder")} == before


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_newer_checkpoint_is_not_the_one_that_an_older_names_for_removal(tmp_path: Path) -> None:
    root = trained(tmp_path / "run")
    rewrite(root / name(4), lambda shared: {**shared, "postponed": [name(8)]}, "state/shared.json")
    before = tree(root / name(8))
    linear_fit(tmp_path / "run", ModelCheckpoint(every=2), max_steps=6, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume=root / name(4)
    )
    assert tree(root / name(8)) == before


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_names_in_a_checkpoint_of_another_folder_mean_nothing_here(tmp_path: Path) -> None:
    """Names of the same form stand in each folder; those that a checkpoint lists are of its own."""
    theirs, ours = trained(tmp_path / "theirs"), trained(tmp_path / "ours", steps=2, every=1)
    rewrite(theirs / name(8), lambda shared: {**shared, "postponed": [name(1)]}, "state/shared.json")

    def claim(shared: Any) -> None:
        (state,) = shared["callbacks"].values()
        state["steps"], state["names"] = [1, 8], {"$": "dict", "items": [[1, name(2)]]}

    rewrite(theirs / name(8), claim, "state/shared.json")
    before = tree(ours)
    callback = ModelCheckpoint(every=1, dirpath=ours)
    result = linear_fit(tmp_path / "new", callback, max_steps=10, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume=theirs / name(8)
    )
    after = tree(ours)
    assert {key: after.get(key) for key in before} == before
    assert Path(str(result.last_checkpoint)).name == name(10)


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("wrong", ["", "..", "../other", "a/b"])
def test_a_place_removes_only_what_lies_in_it(tmp_path: Path, wrong: str, url: bool) -> None:
    root = trained(tmp_path)
    before = tree(tmp_path)
    where = storage_of(f"file://{root}" if url else root)
    with pytest.raises(ValueError, match="is not the name of a checkpoint"):
        where.remove(wrong)
    assert tree(tmp_path) == before


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    root = trained(tmp_path / "run")
    kept = tmp_path / "kept"
    (root / name(4)).rename(kept)
    (root / name(4)).symlink_to(kept)
    before = tree(kept)
    assert storage_of(root).remove(name(4))
    assert tree(kept) == before
    assert sorted(os.listdir(root)) == [name(8)]


# -- what cannot be used ----------------------------------------------------------------------------------------------------------------


def of_format(version: int) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda manifest: {**manifest, "format": version})


def cut_short(path: Path) -> None:
    file = path / "model" / "rank=00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flipped(path: Path) -> None:
    file = path / "model" / "rank=00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def unreadable(path: Path) -> None:
    """A manifest that cannot be opened; permissions would not keep root out."""
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("manifest.json")


UNUSABLE = {
    "newer": (of_format(FORMAT + 2), "the newer version that wrote it"),
    "older": (of_format(1), "an older version"),
    "interrupted": (cut_short, "model/rank=00000.safetensors has"),
    "flipped": (flipped, "is not what was written"),
    "without a manifest": (without_manifest, "manifest.json is missing"),
    "unreadable": (unreadable, "manifest.json"),
}


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("wanted", ["auto", "last"])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_when_none_can_be_used_each_is_listed_and_nothing_is_written(tmp_path: Path, kind: str, wanted: str) -> None:
    root = trained(tmp_path)
    spoil, reason = UNUSABLE[kind]
    for step in (4, 8):
        spoil(root / name(step))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(DamagedCheckpoint) as caught:
        linear_fit(tmp_path, ModelCheckpoint(every=4)).run(Linear(), LINEAR_BATCHES, resume=wanted)
    message = str(caught.value)
    assert f"resume='{wanted}'" in message
    assert message.count(reason) == 2
    assert str(root / name(4)) in message
    assert str(root / name(8)) in message
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("kind", UNUSABLE)
def test_the_one_before_is_taken_with_a_report_and_the_other_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    root = trained(tmp_path)
    spoil, reason = UNUSABLE[kind]
    spoilt = root / name(8)
    spoil(spoilt)
    before = sorted(os.listdir(spoilt)), tree(spoilt / "model")
    with caplog.at_level(logging.ERROR):
        result = linear_fit(tmp_path, ModelCheckpoint(every=4, save_top_k=-1), max_steps=8, max_epochs=None).run(
            Linear(), LINEAR_BATCHES, resume="auto"
        )
    assert result.step == 8
    assert reason in caplog.text
    assert spoilt.name in caplog.text
    assert f"using {name(4)}" in caplog.text
    assert (sorted(os.listdir(spoilt)), tree(spoilt / "model")) == before
    assert list(storage_of(root).manifests())[-1] == Path(str(result.last_checkpoint)).name
    assert result.last_checkpoint != spoilt


def test_auto_starts_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "notes").mkdir(parents=True)
    (tmp_path / "checkpoints" / f".{name(4)}.partial" / "model").mkdir(parents=True)
    assert linear_fit(tmp_path, max_steps=2, max_epochs=None).run(Linear(), LINEAR_BATCHES, resume="auto").step == 2


class OpensAMissingFile(Callback):
    def on_load_checkpoint(self, run: Any, module: Any, checkpoint: Any) -> None:
        Path("no such file").read_text()


def test_auto_starts_nothing_where_a_hook_misses_a_file_of_its_own(tmp_path: Path) -> None:
    trained(tmp_path)
    fit = linear_fit(tmp_path, OpensAMissingFile(), max_steps=12, max_epochs=None)
    with pytest.raises(FileNotFoundError, match="no such file"):
        fit.run(Linear(), LINEAR_BATCHES, resume="auto")


# -- order ------------------------------------------------------------------------------------------------------------------------------


def test_the_newest_is_the_last_that_was_written_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained(tmp_path)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    linear_fit(tmp_path, ModelCheckpoint(every=4, save_top_k=-1), max_steps=12, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume="last"
    )
    monkeypatch.setattr(time, "time", lambda: now() - 2 * 86400)
    assert list(storage_of(root).manifests()) == [name(4), name(8), name(12)]
    result = linear_fit(tmp_path, ModelCheckpoint(every=4, save_top_k=-1), max_steps=14, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume="auto"
    )
    assert [result.step, list(storage_of(root).manifests())[-1]] == [14, name(14)]


def test_a_run_that_went_back_is_newer_than_what_it_left(tmp_path: Path) -> None:
    root = trained(tmp_path)
    linear_fit(tmp_path, ModelCheckpoint(every=2, save_top_k=-1), max_steps=6, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume=root / name(4)
    )
    assert list(storage_of(root).manifests())[-1] == name(6)


def test_a_number_beyond_all_others_does_not_stop_saving(tmp_path: Path) -> None:
    root = trained(tmp_path)
    rewrite(root / name(8), lambda manifest: {**manifest, "serial": 1 << 62})
    result = linear_fit(tmp_path, ModelCheckpoint(every=2, save_top_k=-1), max_steps=12, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume="auto"
    )
    assert [result.step, list(storage_of(root).manifests())[-1]] == [12, name(12)]


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_weights_only_reads_no_more_than_weights(tmp_path: Path) -> None:
    root, module = trained(tmp_path), Linear()
    rewrite(root / name(8), lambda shared: {**shared, "postponed": 3}, "state/shared.json")
    linear_fit(tmp_path / "new", max_epochs=0).run(
        module, LINEAR_BATCHES, resume=Resume(root / name(8), weights_only=True)
    )
    # SGD(lr=0.1, momentum=0.9) on the mean of net(ones): each weight falls by 0.1 * (1 + 1.9 + 2.71 + ...), the sum of (1 - 0.9**k) / 0.1.
    fall = sum(1 - 0.9**k for k in range(1, 9))
    assert torch.allclose(module.net.weight, Linear().net.weight - fall, atol=1e-5)


# -- what does not fit ------------------------------------------------------------------------------------------------------------------


class Other(Linear):
    """With other optimizers than the run that was saved."""

    def __init__(self, make: Any, scheduler: Any = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.make, self.scheduler = make, scheduler
        self.net.to(dtype)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [] if self.scheduler is None else [self.scheduler(optimizer)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch.to(self.net.weight.dtype)).mean()


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def decays(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (
            (adamw,),
            (sgd,),
            "the state of AdamW for optimizer 0, which is SGD: no usable dampening, momentum, nesterov is saved",
        ),
        ((sgd,), (adamw,), "the state of SGD for optimizer 0, which is AdamW: no usable betas, eps is saved"),
        ((sgd, steps), (sgd, decays), r"another scheduler \(StepLR\) for scheduler 0, which is ExponentialLR"),
        (
            (sgd, None, torch.float64),
            (sgd,),
            r"of another type: net.bias \(torch.float64 there, torch.float32 here\)|of another type: net.weight",
        ),
    ],
)
def test_what_is_of_another_kind_is_refused(tmp_path: Path, saved: Any, given: Any, message: str) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_steps=2, max_epochs=None).run(Other(*saved), LINEAR_BATCHES)
    with pytest.raises(ValueError, match=message):
        linear_fit(tmp_path, max_steps=4, max_epochs=None).run(Other(*given), LINEAR_BATCHES, resume="last")


def without_weight_decay(optimizers: Any) -> Any:
    for group in optimizers["0"]["param_groups"]:
        del group["weight_decay"]
    return optimizers


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "optim/optim.json",
            without_weight_decay,
            "of AdamW for optimizer 0, which is AdamW: no usable weight_decay is",
        ),
        ("state/rank=00000.json", lambda state: {**state, "place": []}, "no usable 'place'"),
        (
            "state/shared.json",
            lambda tree: {**tree, "state": {**tree["state"], "clock_tokens": "1"}},
            "no usable 'state.clock",
        ),
    ],
)
def test_what_a_changed_checkpoint_lacks_is_named(tmp_path: Path, file: str, change: Any, message: str) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_steps=2, max_epochs=None).run(Other(adamw), LINEAR_BATCHES)
    (checkpoint,) = (manifest.parent for manifest in tmp_path.rglob("manifest.json"))
    rewrite(checkpoint, change, file)
    with pytest.raises(ValueError, match=message):
        linear_fit(tmp_path, max_steps=4, max_epochs=None).run(Other(adamw), LINEAR_BATCHES, resume=checkpoint)


class Table(Linear):
    """With a buffer of a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    ("saved", "here"), [(torch.int8, torch.float32), (torch.float32, torch.int8), (torch.bool, torch.uint8)]
)
def test_integers_are_not_taken_for_real_numbers(tmp_path: Path, saved: torch.dtype, here: torch.dtype) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_epochs=1).run(Table(saved), LINEAR_BATCHES)
    message = rf"of another type: table \({saved} there, {here} here\)"
    with pytest.raises(ValueError, match=message):
        linear_fit(tmp_path, max_epochs=2).run(Table(here), LINEAR_BATCHES, resume="last")
    with pytest.raises(ValueError, match=message):
        Table.load_from_checkpoint(tmp_path, dtype=here)


def test_an_epoch_goes_on_with_the_data_that_it_began_with(tmp_path: Path) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_steps=6, max_epochs=None).run(
        Linear(), LINEAR_BATCHES
    )  # two steps into the second epoch of four
    with pytest.raises(ValueError, match="saved at 2 of the 4 samples or batches of an epoch, and the data now has 5"):
        linear_fit(tmp_path, max_steps=8, max_epochs=None).run(
            Linear(), [*LINEAR_BATCHES, LINEAR_BATCHES[0]], resume="last"
        )
    assert (
        linear_fit(tmp_path, max_steps=8, max_epochs=None)
        .run(Linear(), [*LINEAR_BATCHES, LINEAR_BATCHES[0]], resume=Resume("last", strict=False))
        .step
        == 8
    )


def sharding(info: Any) -> Callable[[Path], None]:
    """Where the parts of tensors lie, as an attacker says it."""

    def change(path: Path) -> None:
        file = path / "model" / "rank=00000.safetensors"
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
        rewrite(
            path,
            lambda manifest: {
                **manifest,
                "files": manifest["files"] | {"model/rank=00000.safetensors": record_of(file)},
            },
        )

    return change


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize(
    "spoil",
    [
        *(
            sharding({name: {"saved_offsets": value} for name in ("net.weight", "net.bias")})
            for value in (None, [2**70], [1e308], ["a"])
        ),
        lambda path: rewrite(path, lambda shared: {**shared, "state": {"step": 10**400}}, "state/shared.json"),
        lambda path: rewrite(
            path,
            lambda shared: {key: value for key, value in shared.items() if key != "state"} | {"seed": "a"},
            "state/shared.json",
        ),
        lambda path: rewrite(path, lambda optim: {"1": optim["0"]}, "optim/optim.json"),
        lambda path: rewrite(path, lambda own: {**own, "rng": 3}, "state/rank=00000.json"),
    ],
)
def test_values_that_cannot_be_are_damage_and_the_one_before_is_taken(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    root = trained(tmp_path)
    spoil(root / name(8))
    with pytest.raises(DamagedCheckpoint, match=name(8)):
        linear_fit(tmp_path, max_steps=9, max_epochs=None).run(Linear(), LINEAR_BATCHES, resume=root / name(8))
    result = linear_fit(tmp_path, ModelCheckpoint(), max_steps=6, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume="auto"
    )
    assert result.step == 6  # from step 4


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_pipe_in_a_file_s_place_is_damage(tmp_path: Path) -> None:
    root = trained(tmp_path)
    for step, file in ((4, "manifest.json"), (8, "state/shared.json")):
        (root / name(step) / file).unlink()
        os.mkfifo(root / name(step) / file)
        found = problems(root / name(step)) if step == 8 else problems(root)
        assert any("is not a file" in line or "is missing" in line for lines in found.values() for line in lines)


def test_an_index_that_asks_for_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x02]r\xff\xff\xff\x7f."
    )  # an empty list, to be remembered under the number 2**31 - 1
    with pytest.raises(DamagedCheckpoint, match="LONG_BINPUT 2147483647 in 9 bytes"):
        DistributedFiles(tmp_path)


def test_no_escape_sequence_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = trained(tmp_path)
    rewrite(
        root / name(8), lambda manifest: {**manifest, "metrics": {"\x1b[2J": 1.0}, "module": "\x1b]0;title\x07\u202e"}
    )
    for arguments in (["show", str(root / name(8))], ["list", str(root)], ["verify", str(root)]):
        assert main(["checkpoint", *arguments]) == 0
    printed = capsys.readouterr()
    assert "\\x1b[2J" in printed.out
    assert all(each.isprintable() or each == "\n" for each in printed.out + printed.err)
