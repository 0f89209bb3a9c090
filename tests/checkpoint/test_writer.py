"""Saves in the background: what is written is what was there, the training waits only for copies, and nothing is lost at the end."""

from __future__ import annotations

import ast
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.checkpoints import read
from support.internals import new_content, new_folder, new_writer, save_request
from support.ranks import PATIENCE_S, ROOT, ranks_of, run_script
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from torch import nn

from callbacks import ModelCheckpoint
from engine import Callback, Engine
from engine.checkpoint import writer
from engine.checkpoint.staging import Staging
from engine.checkpoint.writer import CheckpointWriter


class Gate:
    """Stops the writing thread at a file operation until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        call = getattr(os, name)

        def waits(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.open.wait(PATIENCE_S)
            return call(*arguments)

        patch.setattr(os, name, waits)


def test_the_caller_goes_on_while_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, folder, weight, buffer = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3)), torch.ones(2)
    gate = Gate(monkeypatch, "write")
    writes.save(
        folder,
        new_content(model={"w": weight, "b": buffer}, changed_by_steps={id(weight)}),
        save_request("a", asynchronous=True),
    )
    buffer.zero_()  # a buffer may change at once
    assert gate.reached.wait(PATIENCE_S)
    writes.hold()
    with torch.no_grad():
        weight.zero_()  # a parameter when hold() has returned
    assert not (tmp_path / "a").exists()
    gate.open.set()
    writes.wait(folder)
    saved = read(tmp_path / "a").model
    assert saved["w"].tolist() == [1, 1, 1]
    assert saved["b"].tolist() == [1, 1]
    writes.close(folder)


def test_hold_waits_for_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    reached, opened = threading.Event(), threading.Event()
    copy = Staging._copy

    def slowly(self: Staging) -> None:
        reached.set()
        assert opened.wait(PATIENCE_S)
        copy(self)

    monkeypatch.setattr(Staging, "_copy", slowly)
    writes.save(
        folder, new_content(model={"w": weight}, changed_by_steps={id(weight)}), save_request("a", asynchronous=True)
    )
    assert reached.wait(PATIENCE_S)
    threading.Timer(0.2, opened.set).start()
    writes.hold()
    assert opened.is_set()
    writes.wait(folder)
    writes.close(folder)


def test_what_changes_weights_waits_by_a_name_of_the_list() -> None:
    """Every place of the library that waits for copies has a name beside ``hold``, and every name has a place."""
    names = {name for name, member in vars(writer.CheckpointWriter).items() if member is writer.CheckpointWriter.hold}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "engine").rglob("*.py")]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value).endswith(("writer", "saver"))}
    assert used & {"hold", *names} == names - {"hold"}


def test_parameters_that_others_change_are_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    gate = Gate(monkeypatch, "mkdir")
    writes.save(folder, new_content(model={"w": weight}, changed_by_steps=None), save_request("a", asynchronous=True))
    with torch.no_grad():
        weight.zero_()
    gate.open.set()
    writes.wait(folder)
    assert read(tmp_path / "a").model["w"].tolist() == [1, 1, 1]
    writes.close(folder)


def test_a_parameter_that_changes_while_it_is_copied_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better no checkpoint than a torn one."""
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    copy = Staging._copy

    def late(self: Staging) -> None:
        with torch.no_grad():
            weight.add_(1)
        copy(self)

    monkeypatch.setattr(Staging, "_copy", late)
    writes.save(
        folder, new_content(model={"w": weight}, changed_by_steps={id(weight)}), save_request("a", asynchronous=True)
    )
    with pytest.raises(RuntimeError, match="changed by something other than an optimizer"):
        writes.wait(folder)
    assert not (tmp_path / "a").exists()
    writes.close(folder)


@pytest.mark.parametrize("held", [True, False])
def test_a_change_after_the_copy_and_before_the_hold_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A kernel that ran while its tensor was copied raises the version when it ends, perhaps after the copy was looked at."""
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    gate = Gate(monkeypatch, "write")
    writes.save(
        folder, new_content(model={"w": weight}, changed_by_steps={id(weight)}), save_request("a", asynchronous=True)
    )
    assert gate.reached.wait(PATIENCE_S)
    with torch.no_grad():
        weight.add_(1)
    if held:
        writes.hold()
    gate.open.set()
    with pytest.raises(RuntimeError, match="changed by something other than an optimizer"):
        writes.wait(folder)
    assert not (tmp_path / "a").exists()
    writes.close(folder)


def test_a_change_after_the_files_are_written_does_no_harm(tmp_path: Path) -> None:
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    writes.save(
        folder, new_content(model={"w": weight}, changed_by_steps={id(weight)}), save_request("a", asynchronous=True)
    )
    assert writes._job is not None
    assert writes._job.future is not None
    assert writes._job.future.result(20) is None
    with torch.no_grad():
        weight.zero_()
    writes.hold()
    writes.wait(folder)
    assert read(tmp_path / "a").model["w"].tolist() == [1, 1, 1]
    writes.close(folder)


def test_saves_share_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a finished save's thread has waited for; a small save starts no others."""
    writes, folder, threads = new_writer(), new_folder(tmp_path), []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (threads.append(self), start(self)))
    for name in ("a", "b", "c"):
        writes.save(folder, new_content(), save_request(name, asynchronous=True))
        writes.wait(folder)
    assert [thread.name for thread in threads] == ["checkpoint"]
    writes.close(folder)
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()
    writes.save(folder, new_content(2.0), save_request("d", asynchronous=True))  # it begins again
    writes.wait(folder)
    assert len(threads) == 2
    assert read(tmp_path / "d").model["head.weight"].tolist() == [[2.0] * 3] * 2
    writes.close(folder)


def test_buffers_are_used_again(tmp_path: Path) -> None:
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    places = []
    for name in ("a", "b"):
        writes.save(folder, new_content(model={"w": weight}), save_request(name, asynchronous=True))
        writes.wait(folder)
        assert writes._staging is not None
        places.append(writes._staging._buffers["model/w"].data_ptr())
    assert places[0] == places[1] != weight.data_ptr()
    writes.save(
        folder, new_content(model={"w": nn.Parameter(torch.ones(4))}), save_request("c", asynchronous=True)
    )  # another shape
    writes.wait(folder)
    assert read(tmp_path / "c").model["w"].tolist() == [1, 1, 1, 1]
    writes.close(folder)


def test_buffers_are_given_back_when_no_save_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "KEEP_S", 0.01)
    writes, folder, weight = new_writer(), new_folder(tmp_path), nn.Parameter(torch.ones(3))
    for name in ("a", "b"):
        freed = threading.Event()
        begin = Staging.start

        def begins(self: Staging, *arguments: Any, begin: Any = begin, freed: threading.Event = freed) -> None:
            begin(self, *arguments)
            weakref.finalize(self._buffers["model/w"], freed.set)  # its memory goes with it

        monkeypatch.setattr(Staging, "start", begins)
        writes.save(folder, new_content(model={"w": weight}), save_request(name, asynchronous=True))
        assert freed.wait(PATIENCE_S)  # also of a save that nobody waits for
        monkeypatch.setattr(Staging, "start", begin)
    writes.wait(folder)
    assert read(tmp_path / "b").model["w"].tolist() == [1, 1, 1]
    writes.close(folder)


def test_what_cannot_be_stored_is_an_error_at_once(tmp_path: Path) -> None:
    writes, folder = new_writer(), new_folder(tmp_path)
    for changes, message in (
        ({"of_rank": {"x": object()}}, r"the state\['x'\]"),
        ({"facts": {"x": torch.ones(1)}}, "the manifest|small JSON"),
        ({"model": {"w": torch.ones(1).to_sparse()}}, "the model's 'w'"),
    ):
        with pytest.raises(TypeError, match=message):
            writes.save(folder, new_content(**changes), save_request("a", asynchronous=True))
    assert not tmp_path.exists() or os.listdir(tmp_path) == []


def test_a_failure_is_told_by_wait(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").touch()
    writes, folder = new_writer(), new_folder(tmp_path)
    writes.save(folder, new_content(), save_request("a", asynchronous=True))
    with pytest.raises(RuntimeError, match="checkpoint a was not written: FileExistsError"):
        writes.wait(folder)
    assert folder.lost == {"a"}
    writes.wait(folder)
    writes.close(folder)


def test_an_error_of_the_thread_itself_is_told_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise SystemExit("planted")

    writes, folder = new_writer(), new_folder(tmp_path)
    with monkeypatch.context() as planted:
        planted.setattr(CheckpointWriter, "_run", fails)
        writes.save(folder, new_content(), save_request("a", asynchronous=True))
        with pytest.raises(RuntimeError, match="checkpoint a was not written: SystemExit: planted"):
            writes.wait(folder)
    writes.save(folder, new_content(), save_request("b", asynchronous=True))
    writes.close(folder)
    assert folder.lost == {"a"}
    assert (tmp_path / "b").is_dir()


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_file_stays_and_the_checkpoint_is_numbered(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writes, folder = new_writer(), new_folder(tmp_path if place == "local" else f"memory://{tmp_path.name}")
    storage = folder.storage
    files, inside = fsspec.core.url_to_fs(storage.root)
    files.pipe_file(f"{inside}/best.ckpt", b"of another trainer")
    paths = [writes.save(folder, new_content(), save_request("best.ckpt")) for _ in range(2)]
    assert [str(path).rpartition("/")[2] for path in paths] == ["best-v1.ckpt", "best-v2.ckpt"]  # the first may be kept
    assert list(storage.manifests()) == ["best-v1.ckpt", "best-v2.ckpt"]
    assert caplog.text.count("must stay") == 1
    assert f"{storage.path('best.ckpt')} must stay: it is in use, cannot be read, or is not a checkpoint" in caplog.text
    assert files.cat_file(f"{inside}/best.ckpt") == b"of another trainer"
    writes.close(folder)


def test_each_folder_has_its_own_failures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A writer serves a run and ``save_state``: neither ends for what the other could not write."""
    (tmp_path / "one" / "a").mkdir(parents=True)
    (tmp_path / "one" / "a" / "mine").touch()
    writes, one, other = new_writer(), new_folder(tmp_path / "one"), new_folder(tmp_path / "other")
    writes.save(one, new_content(), save_request("a", asynchronous=True))
    writes.save(other, new_content(), save_request("b", asynchronous=True))
    assert "checkpoint a was not written: FileExistsError" in caplog.text
    writes.wait(other)
    assert (one.lost, other.lost) == ({"a"}, set())
    with pytest.raises(RuntimeError, match=r"checkpoint a was not written: FileExistsError"):
        writes.wait(one)
    writes.wait(one)
    writes.close(one)
    assert read(tmp_path / "other" / "b").model["head.weight"].tolist() == [[1.0] * 3] * 2


LIGHT = """
import sys
from pathlib import Path
import torch
from engine import Engine

engine = Engine(accelerator="cpu")
engine.prepare(torch.nn.Linear(2, 2))
engine.save_state(Path(sys.argv[1]) / "a")
report([name for name in ("torch.distributed.checkpoint", "torch.distributed.tensor") if name in sys.modules])
"""


def test_a_save_on_one_process_imports_little(tmp_path: Path) -> None:
    """torch.distributed.checkpoint takes 0.7 s to import: whoever only saves whole tensors does not wait for it."""
    assert run_script(LIGHT, tmp_path).value == []


EXIT = """
import sys
from pathlib import Path
import torch
from engine import Engine

engine = Engine(accelerator="cpu")
model = engine.prepare(torch.nn.Linear(1000, 1000))
engine.save_state(Path(sys.argv[1]) / "a", wait=False)
"""


def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    run_script(EXIT, tmp_path, forked=True)
    assert read(tmp_path / "a").model["weight"].shape == (1000, 1000)


def test_a_failing_run_completes_the_save_that_is_on_its_way(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if run.step == 3:
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        linear_fit(tmp_path, Fails(), ModelCheckpoint(every=1, save_top_k=-1)).run(Linear(), LINEAR_BATCHES)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step=00000001",
        "step=00000002",
        "step=00000003",
    ]


class Heavy(Linear):
    """Copies of its parameters take longer than its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 500_000)


def test_background_saves_hold_what_blocking_ones_do(tmp_path: Path) -> None:
    for name, asynchronous in (("one", True), ("two", False)):
        checkpoint = ModelCheckpoint(every=1, save_top_k=-1, asynchronous=asynchronous)
        linear_fit(tmp_path / name, checkpoint, max_epochs=1, seed=1).run(Heavy(), LINEAR_BATCHES)
    names = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert len(names) == 4
    for name in names:
        for file in ("model", "optim"):
            one, two = (
                (tmp_path / run / "checkpoints" / name / file / "rank=00000.safetensors").read_bytes()
                for run in ("one", "two")
            )
            assert one == two, (name, file)


def test_an_engine_loop_saves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Staging._copy

    def slowly(self: Staging) -> None:
        time.sleep(0.3)
        copy(self)

    monkeypatch.setattr(Staging, "_copy", slowly)
    engine = Engine(accelerator="cpu")
    model = nn.Linear(2000, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = engine.prepare(model, optimizer)
    before = model.weight.detach().clone()
    engine.save_state(tmp_path / "a", wait=False)
    engine.backward(model(torch.ones(1, 2000)).sum())
    optimizer.step()
    engine.wait_for_checkpoint()
    assert torch.equal(read(tmp_path / "a").model["weight"], before)
    assert not torch.equal(model.weight, before)


class RollsBack(Callback):
    """At step 2 begins a save, and rolls back to step 1 at once."""

    lost: set[str] | None = None

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        if run.step == 1:
            self.weights = {1: module.net.weight.detach().clone()}
            self.path = run.save_checkpoint()
        if run.step == 2 and self.lost is None:
            self.weights[2] = module.net.weight.detach().clone()
            run.save_checkpoint(asynchronous=True)
            run.roll_back(self.path)
            self.lost = run.wait_for_checkpoint()
            assert torch.equal(module.net.weight, self.weights[1])


def test_a_roll_back_waits_for_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Staging._copy

    def slowly(self: Staging) -> None:
        time.sleep(0.3)
        copy(self)

    monkeypatch.setattr(Staging, "_copy", slowly)
    callback = RollsBack()
    linear_fit(tmp_path, callback).run(Linear(), LINEAR_BATCHES)
    assert callback.lost == set()
    saved = read(tmp_path / "checkpoints" / "step=00000002").model["net.weight"]
    assert torch.equal(saved, callback.weights[2])


class StatesToo(Callback):
    """Saves beside ``ModelCheckpoint``, without waiting either."""

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        run.engine.save_state(run.settings.root_dir / "states" / str(run.step), wait=False)


def ranks_save_through_both_doors(root: str) -> list[Any]:
    saves = ModelCheckpoint("1 steps", save_top_k=-1)
    fit = linear_fit(Path(root), StatesToo(), saves, devices="auto", max_epochs=6)
    fit.run(Linear(), LINEAR_BATCHES)
    return list(saves.names)


def test_saves_of_several_savers_do_not_mix_their_collectives(tmp_path: Path) -> None:
    assert ranks_of(ranks_save_through_both_doors, 2, tmp_path) == [list(range(1, 13))] * 2
    assert len(list((tmp_path / "states").glob("*/manifest.json"))) == 12
