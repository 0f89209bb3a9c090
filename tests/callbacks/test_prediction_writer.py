from __future__ import annotations

import json
import os
import resource
import sys
import weakref
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks import run_ranks, run_script
from torch.utils.data import DataLoader, TensorDataset

from callbacks import PredictionWriter, read_predictions
from engine import Callback, Fit, TrainModule

ROWS = torch.arange(11, dtype=torch.float32).reshape(11, 1)
FORMATS = ("safetensors", "jsonl")


class Doubling(TrainModule):
    def __init__(self, result=lambda rows: rows * 2):
        super().__init__()
        self.result = result

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.result(batch[0])


def loader(rows=ROWS, **options):
    return DataLoader(TensorDataset(rows), batch_size=2, **options)


def fit_with(writer, tmp_path, **settings):
    return Fit(accelerator="cpu", devices=1, root_dir=tmp_path, callbacks=[writer], **settings)


def rows_of(predictions):
    return torch.cat([torch.as_tensor(each) for each in predictions]).flatten().tolist()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("interval", "files"), [("auto", 1), ("batch", 6), (4, 2), ("epoch", 1)])
def test_every_batch_in_order(tmp_path, format, interval, files):
    writer = PredictionWriter(write_interval=interval, format=format)
    returned = fit_with(writer, tmp_path).predict(Doubling(), loader(num_workers=0), return_predictions=False)
    assert returned == []
    predictions = read_predictions(writer.folder)
    assert [len(each) for each in predictions] == [2] * 5 + [1]
    assert rows_of(predictions) == [2.0 * i for i in range(11)]
    assert writer.folder.parent == tmp_path
    assert len(list(writer.folder.iterdir())) == 1 + (files if format == "safetensors" else 1)


def test_a_file_has_some_megabytes_by_default(tmp_path):
    """Batches of 3.2 MB: after the third, 8 MiB are there."""
    writer = PredictionWriter()
    module = Doubling(lambda rows: rows.expand(-1, 400_000).contiguous())
    fit_with(writer, tmp_path).predict(module, loader(), return_predictions=False)
    names = sorted(path.name for path in writer.folder.iterdir())
    assert names == ["0-00000000-rank0.safetensors", "0-00000003-rank0.safetensors", "complete.json"]
    assert torch.cat(read_predictions(writer.folder))[:, -1].tolist() == ROWS.flatten().tolist()


def test_the_structure_of_a_prediction(tmp_path):
    def result(rows):
        return {
            "logits": rows.to(torch.bfloat16),
            "pair": (rows[0], [1, 2.5, "text", None, True]),
            "ids": np.arange(len(rows)),
            "all": rows.T,
        }

    writer = PredictionWriter(tmp_path / "out")
    returned = fit_with(writer, tmp_path).predict(Doubling(result), loader())
    assert len(returned) == 6  # return_predictions=True gives them as well
    first = read_predictions(tmp_path / "out")[0]
    assert first["logits"].dtype == torch.bfloat16
    assert first["logits"].flatten().tolist() == [0.0, 1.0]
    assert isinstance(first["pair"], tuple)
    assert first["pair"][0].tolist() == [0.0]
    assert first["pair"][1] == [1, 2.5, "text", None, True]
    assert first["ids"].tolist() == [0, 1]
    assert first["all"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("format", FORMATS)
def test_every_tensor_has_its_name(tmp_path, format):
    rows = loader(ROWS[:2])
    writer = PredictionWriter(format=format)
    fit_with(writer, tmp_path).predict(Doubling(lambda rows: {"a.b": rows, "a": {"b": rows + 5}}), rows)
    (found,) = read_predictions(writer.folder)
    assert rows_of([found["a.b"]]) == [0.0, 1.0]
    assert rows_of([found["a"]["b"]]) == [5.0, 6.0]
    with pytest.raises(TypeError, match="two keys with the same text"):
        fit_with(PredictionWriter(tmp_path / "out"), tmp_path).predict(
            Doubling(lambda rows: {1: rows, "1": rows}), rows
        )


class Calls(Callback):
    """Counts the calls from the first batch to the end, those of C functions too."""

    def __init__(self):
        self.count = 0

    def _add(self, frame, event, arg):
        self.count += event in ("call", "c_call")

    def on_predict_start(self, run, module):
        self.earlier = sys.getprofile()
        sys.setprofile(self._add)

    def on_predict_end(self, run, module):
        sys.setprofile(self.earlier)


def test_a_batch_costs_few_calls(tmp_path):
    """A batch is written twice: when its hook returns, and in its file; with safetensors' ``save`` and ``save_file`` that took 117 calls."""

    def calls(count, *callbacks):
        counter = Calls()
        fit = Fit(accelerator="cpu", devices=1, root_dir=tmp_path, callbacks=[*callbacks, counter])
        fit.predict(Doubling(), [[ROWS[:2]]] * count, return_predictions=False)
        return counter.count

    calls(10, PredictionWriter(tmp_path / "first"))
    extra = [calls(n, PredictionWriter(tmp_path / f"{n}")) - calls(n) for n in (100, 300)]
    assert (extra[1] - extra[0]) / 200 < 90


@pytest.mark.parametrize("format", FORMATS)
def test_several_loaders(tmp_path, format):
    writer = PredictionWriter(format=format, write_interval=4)
    fit_with(writer, tmp_path).predict(Doubling(), [loader(), loader(ROWS[:3] + 100)], return_predictions=False)
    first, second = read_predictions(writer.folder)
    assert rows_of(first) == [2.0 * i for i in range(11)]
    assert rows_of(second) == [200.0, 202.0, 204.0]


def test_lines_can_be_read_by_others(tmp_path):
    writer = PredictionWriter(format="jsonl")
    fit_with(writer, tmp_path).predict(Doubling(lambda rows: {"sum": float(rows.sum())}), loader())
    lines = [json.loads(line) for line in (writer.folder / "rank0.jsonl").read_text().splitlines()]
    assert lines[1] == {"loader": 0, "index": 1, "prediction": {"sum": 5.0}}


def test_nothing_stays_in_memory(tmp_path):
    seen, most = [], []

    class Watched(Doubling):
        def predict_step(self, batch, batch_idx):
            most.append(sum(each() is not None for each in seen))
            outputs = super().predict_step(batch, batch_idx)
            seen.append(weakref.ref(outputs))
            return outputs

    fit_with(PredictionWriter(), tmp_path).predict(Watched(), loader(), return_predictions=False)
    assert len(most) == 6
    assert max(most) <= 1  # the one before


def test_earlier_predictions_are_not_mixed_with_new_ones(tmp_path):
    for format in ("safetensors", "jsonl"):
        fit_with(PredictionWriter(tmp_path / "out", format=format, overwrite=True), tmp_path).predict(
            Doubling(), loader()
        )
    with pytest.raises(ValueError, match=r"out has predictions already \(rank0.jsonl, ...\)"):
        fit_with(PredictionWriter(tmp_path / "out"), tmp_path).predict(Doubling(), loader())
    (tmp_path / "out" / "own.txt").write_text("kept")
    short = loader(ROWS[:2])
    fit_with(PredictionWriter(tmp_path / "out", overwrite=True), tmp_path).predict(Doubling(), short)
    assert rows_of(read_predictions(tmp_path / "out")) == [0.0, 2.0]
    assert (tmp_path / "out" / "own.txt").exists()


def test_what_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete predictions"):
        read_predictions(tmp_path)
    fit_with(PredictionWriter(tmp_path / "out", "batch"), tmp_path).predict(Doubling(), loader())
    next((tmp_path / "out").glob("0-00000002-*")).unlink()
    with pytest.raises(ValueError, match=r"has \[5\] batches of its loaders, and \[6\] were written"):
        read_predictions(tmp_path / "out")
    assert rows_of(read_predictions(tmp_path / "out", partial=True)) == [0, 2, 4, 6, 12, 14, 16, 18, 20]


FILES = ("0-00000000-rank0.safetensors", ".waiting-rank0", "rank0.jsonl", "complete.json")
HEADERS = {
    "no metadata": {},
    "no trees": {"__metadata__": {"loader": "0"}},
    "trees of numbers": {"__metadata__": {"loader": "0", "trees": '{"0": [1]}'}},
    "a tensor that is not there": {"__metadata__": {"loader": "0", "trees": '{"0": ["tensor", "x"]}'}},
    "many loaders": {"__metadata__": {"loader": str(10**12), "trees": "{}"}},
    "deep": {"__metadata__": {"loader": "0", "trees": '{"0": ' + '["list", [' * 50_000 + "]]" * 50_000 + "}"}},
}


def headed(header):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def test_any_text_is_a_key(tmp_path):
    keys = ["/etc/x", "../x", "\0", "a" * 5000, "\ud800", "\x1b[31m", "", "x@complex128", "__metadata__", "tensor"]
    writer = PredictionWriter(tmp_path / "out")
    fit_with(writer, tmp_path).predict(Doubling(lambda rows: dict.fromkeys(keys, rows)), loader())
    assert [list(each) for each in read_predictions(tmp_path / "out")] == [keys] * 6


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_was_written(tmp_path, name, monkeypatch):
    monkeypatch.setattr("callbacks.prediction_writer._LONGEST", 1 << 20)

    def content(content):
        return lambda path: path.write_bytes(content)

    def hole(path):
        path.touch()
        os.truncate(path, 20 << 30)

    files = [
        os.mkfifo,
        Path.mkdir,
        hole,
        content(b"\xff\n"),
        content(b"[]\n"),
        content(b"1\n"),
        content(b"[" * 100_000 + b"\n"),
    ]
    files += [lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
    for header in map(headed, HEADERS.values()):
        files.append(content((len(header).to_bytes(8, "little") if name.startswith(".") else b"") + header))
    for number, make in enumerate(files):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        try:
            answer = str(read_predictions(folder, partial=True))
        except (ValueError, OSError) as error:
            answer = str(error)
        assert answer == "[]" or str(folder / name) in answer


def test_a_folder_that_cannot_be_read(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        read_predictions(tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "name"), [({}, ".waiting-rank0"), ({"write_interval": 2}, "0-0"), ({"format": "jsonl"}, "rank0.jsonl")]
)
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, options, name):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=name):
            fit_with(PredictionWriter(tmp_path / "out", **options), tmp_path).predict(
                Doubling(lambda rows: torch.ones(2, 100_000)), loader()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nothing_is_written_through_a_link(tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (".complete.json", ".0-00000000-rank0.safetensors", *FILES):
        (folder / name).symlink_to(other)
    fit_with(PredictionWriter(folder, overwrite=True), tmp_path).predict(Doubling(), loader())
    assert other.read_text() == "kept"
    assert len(read_predictions(folder)) == 6


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(TypeError, match=r"Doubling.predict_step returned .* of type set"):
        fit_with(PredictionWriter(), tmp_path).predict(Doubling(lambda rows: {"a": {1}}), loader())
    with pytest.raises(ValueError, match="write_interval='batch_and_epoch'"):
        PredictionWriter(write_interval="batch_and_epoch")
    with pytest.raises(TypeError, match="write_on_epoch_end is not called"):
        type("Own", (PredictionWriter,), {"write_on_epoch_end": lambda *args: None})
    with pytest.raises(TypeError, match=r"'0\.a' has the dtype complex128"):
        fit_with(PredictionWriter(tmp_path / "out"), tmp_path).predict(
            Doubling(lambda rows: {"a": rows + 0j * rows.double()}), loader()
        )
    with pytest.raises(ValueError, match="format='pickle'"):
        PredictionWriter(format="pickle")


def test_a_training_writes_nothing(tmp_path):
    class Trained(Doubling):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch, batch_idx):
            return (self.weight * batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    writer = PredictionWriter()
    fit_with(writer, tmp_path).run(Trained(), loader())
    assert writer.folder is None


KILLED = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from callbacks import PredictionWriter
from engine import Fit, TrainModule

class Killed(TrainModule):
    def predict_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(os.getpid(), 9)
        return batch[0]

data = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2)
writer = PredictionWriter(sys.argv[1], format=sys.argv[2])
Fit(accelerator="cpu", devices=1, root_dir=sys.argv[3], callbacks=[writer]).predict(Killed(), data, return_predictions=False)
"""


@pytest.mark.parametrize("format", [FORMATS[0], pytest.param(FORMATS[1], marks=pytest.mark.slow)])
def test_a_killed_run_leaves_what_was_written(tmp_path, format):
    run_script(KILLED, tmp_path / "out", format, tmp_path, check=False, forked=True)
    with pytest.raises(ValueError, match="no complete predictions"):
        read_predictions(tmp_path / "out")
    if format == "jsonl":
        with (tmp_path / "out" / "rank0.jsonl").open("a") as file:
            file.write('{"loader": 0, "ind')  # killed while it wrote
    else:
        with (tmp_path / "out" / ".waiting-rank0").open("ab") as file:
            file.write((1000).to_bytes(8, "little") + b"half of it")
        (tmp_path / "out" / ".0-00000000-rank0.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{")
    assert rows_of(read_predictions(tmp_path / "out", partial=True)) == [0, 1, 2, 3, 4, 5]


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from callbacks import PredictionWriter, read_predictions
from engine import Fit, TrainModule

class Doubling(TrainModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0] * 2

def loader(count, **options):
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=2, **options)

found = {}
for format in ("safetensors", "jsonl"):
    writer = PredictionWriter(f"{sys.argv[1]}/{format}", format=format, write_interval=2)
    fit = Fit(accelerator="cpu", strategy="ddp", root_dir=sys.argv[1], callbacks=[writer])
    # Uneven shards: 11 samples are 3 batches of rank 0, and 3 smaller ones of rank 1; 1 sample leaves rank 1 with nothing.
    returned = fit.predict(Doubling(), [loader(11, num_workers=2 * (format == "jsonl")), loader(1)], return_predictions=False)
    found[format] = [returned, [[torch.as_tensor(b).tolist() for b in one] for one in read_predictions(writer.folder)]]
fit = Fit(accelerator="cpu", strategy="ddp", root_dir=sys.argv[1])
found["returned"] = [[b.tolist() for b in one] for one in fit.predict(Doubling(), [loader(11), loader(1)])]
report(found)
"""


def test_two_ranks_write_their_parts(tmp_path):
    for rank in run_ranks(SCRIPT, 2, tmp_path):
        for format in FORMATS:
            returned, (first, second) = rank.value[format]
            assert returned == [[], []]
            assert list(chain.from_iterable(first)) == [2.0 * i for i in range(11)]
            assert second == [[0.0]]
            assert [first, second] == rank.value["returned"]
    files = {path.name for path in (tmp_path / "jsonl").iterdir()}
    assert files == {"rank0.jsonl", "rank1.jsonl", "complete.json"}
