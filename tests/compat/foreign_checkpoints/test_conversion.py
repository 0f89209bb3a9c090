"""Checkpoints of others: Lightning's own, torch's distributed ones, safetensors; and pickles that would like to run."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.checkpoints import Tied, tied_batches, train_and_save
from support.internals import checkpoint_source, open_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter, metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from engine import Fit, Resume, TrainModule
from engine.checkpoint.catalog import facts, problems
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.manifest import SHARED
from engine.checkpoint.tensor_files import Stored
from engine.compat.foreign_checkpoints import conversion as converting
from engine.compat.foreign_checkpoints.conversion import convert
from engine.compat.foreign_checkpoints.optimizer_names import nested, with_parameter_names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class Net(TrainModule):
    """What Lightning trains in :func:`ckpt`, here."""

    def __init__(self, width: int = 3, decay: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        build(self, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return loss_of(self, batch)

    def configure_optimizers(self) -> Any:
        return optimizers(self, self.hparams.decay)


def build(module: Any, width: int) -> None:
    module.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width))
    module.head, module.mirror = nn.Linear(width, 6), nn.Linear(width, 6, bias=False)
    module.mirror.weight = module.head.weight


def loss_of(module: Any, batch: Tensor) -> Tensor:
    features = module.body(batch)
    return (module.head(features) + module.mirror(features) - batch).square().mean()


def optimizers(module: Any, decay: float) -> Any:
    matrices, vectors = [p for p in module.parameters() if p.ndim == 2], [p for p in module.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}], lr=0.05
    )
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def ckpt(root: Path, epochs: int, **extra: Any) -> tuple[Path, Any]:
    """What Lightning writes at the end of training ``epochs`` over the batches, and its module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

        class Theirs(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self, width: int = 3, decay: float = 0.0) -> None:
                super().__init__()
                self.save_hyperparameters()
                build(self, width)

            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return loss_of(self, batch)

            def configure_optimizers(self) -> Any:
                return optimizers(self, self.hparams.decay)

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint |= extra

            def on_train_epoch_end(self) -> None:
                self.trainer.save_checkpoint(root / "inside.ckpt")

        torch.manual_seed(0)
        module = Theirs(width=4, decay=0.1)
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=root, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(tied_batches(3), batch_size=None))
        trainer.save_checkpoint(root / "theirs.ckpt")
    return root / "theirs.ckpt", module


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    path, theirs = ckpt(tmp_path, 1, mine={"a": torch.ones(2)})
    done = convert(path, tmp_path / "ours", trust_pickle=True)
    assert (done.kind, done.step, done.epoch, done.optimizers) == ("Lightning checkpoint", 3, 1, 1)
    assert done.hyperparameters == ["width", "decay"]
    assert done.tensors == len(theirs.state_dict()) - 1  # the tied one once
    assert problems(tmp_path / "ours") == {str(tmp_path / "ours"): []}
    assert facts(tmp_path / "ours")["converted_from"] == {"path": str(path), "kind": "Lightning checkpoint"}
    ours = Net.load_from_checkpoint(tmp_path / "ours")
    assert ours.hparams == {"width": 4, "decay": 0.1}
    assert same(ours, theirs)
    fresh = Net(width=4)
    Fit(accelerator="cpu", max_steps=0, root_dir=tmp_path).run(
        fresh, tied_batches(), resume=Resume(tmp_path / "ours", weights_only=True)
    )
    assert same(fresh, theirs)


class Configured(TrainModule):
    def __init__(self, conf: Any, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.net = nn.Linear(conf["width"], width)


def test_one_dict_of_hyperparameters_and_what_cannot_be_kept_of_it(tmp_path: Path) -> None:
    state = {f"net.{name}": tensor for name, tensor in nn.Linear(3, 1).state_dict().items()}
    hparams = {"width": 3, "folder": Path("data")}
    theirs = {
        "state_dict": state,
        "pytorch-lightning_version": "2.5",
        "hyper_parameters": hparams,
        "hparams_name": "conf",
    }
    torch.save(theirs, tmp_path / "a.ckpt")
    done = convert(tmp_path / "a.ckpt", tmp_path / "ours", trust_pickle=True)
    assert done.hyperparameters == ["width"]
    assert "the hyperparameter 'folder'" in done.notes[0]
    module = Configured.load_from_checkpoint(tmp_path / "ours")
    assert module.hparams == {"width": 3}
    assert torch.equal(module.net.weight, state["net.weight"])


def test_an_epoch_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    path, _ = ckpt(tmp_path, 1)
    inside = path.with_name("inside.ckpt")  # as ModelCheckpoint writes it: Lightning still counts epoch 0
    assert torch.load(inside, weights_only=True)["epoch"] == 0
    assert convert(inside, tmp_path / "ours", trust_pickle=True).epoch == 1


def test_its_optimizer_has_the_names_of_the_parameters(tmp_path: Path) -> None:
    path, theirs = ckpt(tmp_path, 1)
    convert(path, tmp_path / "ours", trust_pickle=True)
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]
    # Lightning's optimizer sees body.0.weight, head.weight | body.0.bias, body.1.weight, body.1.bias, head.bias.
    names = {id(p): name for name, p in theirs.named_parameters()}
    expected = [
        names[id(p)] for group in theirs.optimizers(use_pl_optimizer=False).param_groups for p in group["params"]
    ]
    with open_checkpoint(tmp_path / "ours") as opened:
        source = checkpoint_source(opened)
        found = source.read_optim(source.optim["0"], lambda stored: torch.empty(stored.shape, dtype=stored.dtype))
        shared = opened.tree(SHARED)
    assert [name for group in found["param_groups"] for name in group["params"]] == expected
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.1, 0.0]
    keys = list(found["state"])
    assert all(torch.equal(found["state"][key]["exp_avg"], saved["state"][i]["exp_avg"]) for i, key in enumerate(keys))
    assert shared["schedulers"][0]["last_epoch"] == 1
    assert shared["state"] == {"epoch": 1, "step": 3}


def test_a_run_goes_on_from_lightning_as_lightning_does(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    path, _ = ckpt(tmp_path, 1)
    _, theirs = ckpt(tmp_path / "two", 2)
    convert(path, tmp_path / "ours", trust_pickle=True)
    ours = Net(width=4, decay=0.1)
    done = Fit(accelerator="cpu", devices=1, max_epochs=2, root_dir=tmp_path / "run").run(
        ours, tied_batches(3), resume=tmp_path / "ours"
    )
    assert (done.step, done.epoch) == (6, 2)
    # The weights of one more epoch with the same optimizer state and learning rate: Lightning's own.
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_pickle_needs_the_flag(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in ("a.pt", "dcp"):
        with pytest.raises(
            ValueError, match=r"is a pickle, which can run code when it is opened: --trust-pickle .* reads it anyway"
        ):
            convert(tmp_path / source, tmp_path / "ours")
        assert not (tmp_path / "ours").exists()
        assert convert(tmp_path / source, tmp_path / f"ours-{source}", trust_pickle=True).tensors == 1


class Hostile:
    """Makes ``mark`` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_hostile_pickle_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists()  # it would
    mark.unlink()
    torch.save(
        {"state_dict": {"w": torch.ones(1)}, "pytorch-lightning_version": "2", "hyper_parameters": Hostile(mark)},
        tmp_path / "a.ckpt",
    )
    torch.save({"w": Hostile(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Hostile(mark)))
    for name in ("index", "both"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    save_file({"w": torch.ones(1)}, tmp_path / "both" / "model.safetensors")
    for source in ("a.ckpt", "old.pt", "raw.pt", "index", "both"):
        with pytest.raises(ValueError, match=r"posix\.system|cannot be read"):
            convert(tmp_path / source, tmp_path / "ours", trust_pickle=True)
        assert not mark.exists(), source
        assert not list(tmp_path.glob("*ours*"))


def test_a_hostile_value_in_a_distributed_checkpoint_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    optim = {"state": {}, "param_groups": [{"lr": Hostile(mark)}]}
    dcp.save({"model": {"w": torch.ones(2)}, "optim": optim}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(ValueError, match=r"posix\.system"):
        convert(tmp_path / "d", tmp_path / "ours", trust_pickle=True)
    assert not mark.exists()


def test_values_that_occur_again_and_again_are_refused_before_they_are_walked_through(tmp_path: Path) -> None:
    """A few hundred bytes that stand for 10^9 values, or for a tensor of 4 GB; what occurs twice is fine."""
    lists: Any = [0]
    for _ in range(9):
        lists = [lists] * 10
    weights, shared = {"w": torch.ones(2, 2)}, {"sizes": [1, 2]}
    plain = {"state_dict": weights, "pytorch-lightning_version": "2"}
    torch.save(
        {**plain, "hyper_parameters": {"a": shared, "b": shared}, "mine": [shared] * 1000}, tmp_path / "fine.ckpt"
    )
    assert convert(tmp_path / "fine.ckpt", tmp_path / "ours", trust_pickle=True).hyperparameters == ["a", "b"]
    for name, extra, message in (
        ("lists", {"hyper_parameters": {"a": lists}}, "values, which stand for more than"),
        ("weights", {"state_dict": {**weights, "lists": lists}}, "values, which stand for more than"),
        ("tensor", {"state_dict": {"w": torch.ones(1).expand(10**9)}}, r"has a tensor of shape \[1000000000\] whose"),
    ):
        torch.save({**plain, **extra}, tmp_path / f"{name}.ckpt")
        with pytest.raises(DamagedCheckpoint, match=message):
            convert(tmp_path / f"{name}.ckpt", tmp_path / name, trust_pickle=True)
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    torch.save({**plain, "mine": holds_itself}, tmp_path / "itself.ckpt")
    with pytest.raises(DamagedCheckpoint, match="has a value that holds itself"):
        convert(tmp_path / "itself.ckpt", tmp_path / "itself", trust_pickle=True)


def test_an_index_that_leads_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    (tmp_path / "out.distcp").write_bytes((tmp_path / "d" / "__0_0.distcp").read_bytes())
    index = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../out.distcp"
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DamagedCheckpoint, match=r"'\.\./out\.distcp', which leads out"):
        convert(tmp_path / "d", tmp_path / "ours", trust_pickle=True)


@pytest.mark.parametrize("around", [False, True], ids=["plain", "app"])
def test_a_distributed_checkpoint(tmp_path: Path, around: bool) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.03)
    loss_of(module, tied_batches(1)[0]).backward()
    optimizer.step()
    model, optim = get_state_dict(module, optimizer)
    tree: dict[str, Any] = {"model": model, "optim": optim}
    dcp.save({"app": tree} if around else {**tree, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = convert(tmp_path / "dcp", tmp_path / "ours", trust_pickle=True)
    assert (done.optimizers, done.notes) == (1, [] if around else ["left out: 'step'"])
    other = Net.load_from_checkpoint(tmp_path / "ours")
    assert same(other, module)
    with open_checkpoint(tmp_path / "ours") as opened:
        source = checkpoint_source(opened)
        state = source.read_optim(source.optim["0"], lambda stored: torch.empty(stored.shape, dtype=stored.dtype))
    assert state["param_groups"][0]["lr"] == 0.03
    assert torch.equal(state["state"]["head.bias"]["exp_avg"], optimizer.state[module.head.bias]["exp_avg"])


def test_an_index_that_an_early_python_3_11_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pickles a member of an enumeration as a call of ``getattr``."""
    formats = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(formats, "__reduce_ex__", lambda self, _: (getattr, (formats, self.name)))
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert b"getattr" in (tmp_path / "d" / ".metadata").read_bytes()
    convert(tmp_path / "d", tmp_path / "ours", trust_pickle=True)
    with open_checkpoint(tmp_path / "ours") as opened:
        assert list(opened.tensors("model").stored) == ["w"]


def test_parts_of_a_distributed_checkpoint_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "d", no_dist=True)
    index = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    [(key, info)] = index.storage_data.items()
    chunk = index.state_dict_metadata["w"].chunks[0]
    index.storage_data, index.state_dict_metadata["w"].chunks = {}, []
    for row, rows in ((0, 1), (1, 3)):  # as two ranks write it: one row, and three
        torch.save(whole[row : row + rows].clone(), tmp_path / "d" / f"__{row}_0.distcp")
        size = (tmp_path / "d" / f"__{row}_0.distcp").stat().st_size
        index.storage_data[type(key)("w", torch.Size([row, 0]))] = type(info)(f"__{row}_0.distcp", 0, size)
        index.state_dict_metadata["w"].chunks.append(type(chunk)(torch.Size([row, 0]), torch.Size([rows, 3])))
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    convert(tmp_path / "d", tmp_path / "ours", trust_pickle=True)
    assert torch.equal(weights(tmp_path / "ours")["w"], whole)
    index.state_dict_metadata["w"].chunks.pop()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DamagedCheckpoint, match="parts of 'w' are missing"):
        convert(tmp_path / "d", tmp_path / "ours2", trust_pickle=True)


def weights(path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as opened:
        return opened.tensors("model").whole_tensors()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_hugging_face_directory_needs_no_flag(tmp_path: Path, distributed: bool) -> None:
    state = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16()}
    files = {} if distributed else {"fqn_to_index_mapping": {"a": 1, "b": 2}}
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=distributed, **files)  # type: ignore[arg-type]
    dcp.save(state, storage_writer=writer, no_dist=True)
    done = convert(tmp_path / "hf", tmp_path / "ours")
    assert (done.kind, done.tensors, done.bytes) == ("safetensors directory", 2, 32)
    found = weights(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype for name, tensor in state.items())


def test_one_safetensors_file_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "SHARD", 20)
    state = {"a": torch.randn(4), "b": torch.randn(4), "c": torch.arange(2)}
    save_file(state, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(4)}, tmp_path / "other.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "ours")
    found = weights(tmp_path / "ours")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert len(list((tmp_path / "ours" / "model").glob("*.safetensors"))) == 3


def test_a_plain_file_of_torch_save(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "ours", trust_pickle=True)
    assert (done.kind, done.tensors, done.optimizers) == ("torch.save file", 4, 1)
    with open_checkpoint(tmp_path / "ours") as opened:
        assert opened.tree("optim/optim", opened.tensors("optim").stored)["0"]["param_groups"][0]["params"] == [
            *("0.weight", "0.bias", "1.weight", "1.bias"),
        ]


def test_from_and_to_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    module = Tied(scale=3.0)
    torch.save(module.state_dict(), tmp_path / "a.pt")
    memory = fsspec.filesystem("memory")
    memory.put_file(str(tmp_path / "a.pt"), "/theirs/a.pt")
    convert("memory://theirs/a.pt", "memory://ours/step=1", trust_pickle=True)
    assert same(Tied.load_from_checkpoint("memory://ours/step=1"), module)
    assert same(Tied.load_from_checkpoint("memory://ours"), module)
    with pytest.raises(ValueError, match=r"give a name in it, such as memory://ours/step=00000000"):
        convert("memory://theirs/a.pt", "memory://ours", trust_pickle=True)
    with pytest.raises(FileExistsError, match=r"memory://ours/step=1 exists already"):
        convert("memory://theirs/a.pt", "memory://ours/step=1", trust_pickle=True)
    memory.rm("/theirs", recursive=True)
    memory.rm("/ours", recursive=True)


@pytest.mark.filterwarnings("ignore:.*parse.*invariant")  # torch's, when it reads one
def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    ours = train_and_save(tmp_path / "run", Tied())
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "none.pt")
    torch.save({"a": torch.ones(2).to_sparse(), "b": torch.ones(2)}, tmp_path / "sparse.pt")
    (tmp_path / "junk.ckpt").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    for source, error, message in (
        (ours, ValueError, "is a checkpoint of this library already"),
        (tmp_path / "list.pt", ValueError, "holds a list: a dict of tensors by name is needed"),
        (tmp_path / "none.pt", ValueError, "has no tensors by name; its keys are a"),
        (tmp_path / "sparse.pt", ValueError, "'a' .*sparse.* cannot be stored: convert it to a dense tensor first"),
        (tmp_path / "junk.ckpt", DamagedCheckpoint, "junk.ckpt cannot be read"),
        (tmp_path / "junk.safetensors", DamagedCheckpoint, "a safetensors file cannot be read"),
        (tmp_path / "empty", ValueError, "has neither .metadata nor .safetensors files"),
        (tmp_path / "nothing", FileNotFoundError, "nothing does not exist"),
    ):
        with pytest.raises(error, match=message):
            convert(source, tmp_path / "out", trust_pickle=True)
        assert not list(tmp_path.glob("*out*"))
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(FileExistsError, match="exists already: choose another path"):
        convert(tmp_path / "a.safetensors", ours)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    monkeypatch.setattr("engine.checkpoint.storage.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        convert(tmp_path / "a.safetensors", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def optimizer_state(shapes: list[list[tuple[int, ...] | None]], **group: Any) -> dict[str, Any]:
    state: dict[int, Any] = {}
    groups, number = [], 0
    for row in shapes:
        groups.append({"params": list(range(number, number + len(row))), **group})
        for shape in row:
            if shape is not None:
                state[number] = {"exp_avg": torch.full(shape, float(number))}
            number += 1
    return {"state": state, "param_groups": groups}


def stored(**shapes: tuple[int, ...]) -> dict[str, Stored]:
    return {name: Stored(name, torch.Size(shape), torch.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([[(2, 3), (3,), (3, 1)]], [["a", "b", "c"]]),
        ([[(2, 3), (3, 1)], [(3,)]], [["a", "c"], ["b"]]),  # groups by shape
        ([[None, None, None]], [["a", "b", "c"]]),  # no other choice
        ([[(3,)]], [["b"]]),
        ([[None]], None),  # any of three
        ([[(3, 1), (2, 3)]], None),  # another order than the model's
        ([[(2, 3)], [(2, 3)]], None),  # one parameter for two
        ([[(9,)]], None),
    ],
)
def test_numbers_get_names_when_there_is_one_choice(shapes: Any, expected: Any) -> None:
    found = with_parameter_names(optimizer_state(shapes), stored(a=(2, 3), b=(3,), c=(3, 1)))
    assert (found and [group["params"] for group in found["param_groups"]]) == expected
    if found:
        numbers = {name: number for number, name in enumerate(n for group in expected for n in group)}
        assert all(entry["exp_avg"].flatten()[0] == numbers[name] for name, entry in found["state"].items())


def test_two_of_one_shape_are_no_choice_and_given_names_are() -> None:
    model = stored(a=(2,), b=(2,))
    assert with_parameter_names(optimizer_state([[(2,)]]), model) is None
    found = with_parameter_names(optimizer_state([[(2,)]], param_names=["b"]), model)
    assert found is not None
    assert found["param_groups"][0]["params"] == list(found["state"]) == ["b"]


def test_trees_from_paths() -> None:
    assert nested({("a", 0, "x"): 1, ("a", 1, "x"): 2, ("b",): 3}) == {"a": [{"x": 1}, {"x": 2}], "b": 3}
    assert nested({(1,): "x"}) == {1: "x"}


def test_the_name_of_a_foreign_class_is_text(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02c\x1b[2J\nx\n)R.")
        file.writestr("archive/version", b"3")
    with pytest.raises(ValueError, match="which is neither a tensor nor a plain value") as caught:
        convert(path, tmp_path / "out", trust_pickle=True)
    assert "\\x1b[2J.x" in str(caught.value)
    assert str(caught.value).isprintable()
