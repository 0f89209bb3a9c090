"""``fit checkpoint``: what it prints, its exit status, and what is there afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import Tied, record_of, resummed, train_and_save

from engine.checkpoint import local_storage
from engine.checkpoint.catalog import entries
from engine.cli.main import main
from engine.loop.replay import starting_point

SCORES = {1: 0.5, 2: 0.1, 3: 0.3}
NAMES = [f"step={step:08d}" for step in SCORES]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with three checkpoints, whose files are in folders."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.manifest.JOINED_BYTES", -1)
        train_and_save(root, Tied(), [torch.randn(8, 6) for _ in SCORES], scores=SCORES)
    return root / "checkpoints"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    subprocess.run(["cp", "-r", str(written), str(tmp_path / "checkpoints")], check=True)
    return tmp_path / "checkpoints"


class Output:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> str:
        """What ``fit checkpoint`` prints, with ``status`` 1 on stderr too."""
        self._capsys.readouterr()
        assert main(["checkpoint", *map(str, arguments)]) == status
        out, err = self._capsys.readouterr()
        assert bool(err) <= bool(status), err
        return out + err

    def json(self, *arguments: object, status: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", status=status))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)


@pytest.mark.parametrize("saved", [True, False])
def test_list_among_many_runs_looks_at_each_once(
    written: Path, tmp_path: Path, run: Output, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """The first of 300 runs, or none, has checkpoints."""
    for number in range(300):
        folder = tmp_path / f"version_{number}" if number else tmp_path
        folder.mkdir(exist_ok=True)
        (folder / "metrics.csv").write_text("step,epoch\n")
    if saved:
        subprocess.run(["cp", "-r", str(written), str(tmp_path / "checkpoints")], check=True)
    opened: list[str] = []
    scandir = os.scandir

    def counted(path: str) -> Any:
        if os.fspath(path).startswith(str(tmp_path)):  # imports look elsewhere
            opened.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    text = run("list", tmp_path, status=0 if saved else 1)
    assert ("step=00000003" in text) is saved
    assert "contains none" in text or saved
    assert sum("version_" in path for path in opened) == 299
    assert len(opened) < 310


def damage(path: Path) -> Path:
    """Change one bit of the model's file."""
    file = next((path / "model").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    return file


def test_list(written: Path, run: Output) -> None:
    lines = run("list", written).splitlines()
    assert lines[0].split()[:6] == ["name", "step", "epoch", "time", "size", "ranks"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [name, str(step)] for name, step in zip(NAMES, SCORES, strict=True)
    ]
    assert all(f"val={score} (min)" in line for line, score in zip(lines[1:], SCORES.values(), strict=True))
    assert run("list", written.parent).splitlines() == lines  # the run's folder
    assert [[word for word in line.split() if word in ("best", "last")] for line in lines[1:]] == [
        [],
        ["best"],
        ["last"],
    ]
    found = run.json("list", written)
    assert [entry["aliases"] for entry in found] == [[], ["best"], ["last"]]
    assert [entry["name"] for entry in found] == NAMES
    assert found[1]["score"] == {"monitor": "val", "mode": "min", "value": 0.1}
    assert (found[2]["step"], found[2]["world_size"], found[2]["complete"]) == (3, 1, True)
    size = sum(
        file.stat().st_size
        for file in (written / NAMES[2]).rglob("*")
        if file.is_file() and file.name != "manifest.json"
    )
    assert found[2]["bytes"] == size
    assert [entry["name"] for entry in run.json("list", written / NAMES[1])] == [NAMES[1]]


def test_a_folder_of_runs_is_the_newest_and_the_first_has_a_name(tmp_path: Path, run: Output) -> None:
    for name, step in (("", 1), ("version_1", 2), ("version_2", 3)):
        train_and_save(tmp_path / "runs" / name, Tied(), [torch.randn(8, 6)] * step, scores={step: 0.5})
    (tmp_path / "runs" / "version_3").mkdir()  # an evaluation
    root = tmp_path / "runs"
    first, _, newest = run("list", root).splitlines()
    assert newest.split()[:2] == ["step=00000003", "3"]
    assert first == (
        f"{root}/version_2/checkpoints: the newest run in {root} that has checkpoints. Those of the first run are in {root}/checkpoints"
    )
    for name, step in (("version_0", 1), ("version_1", 2)):
        _, line = run("list", root / name).splitlines()
        assert line.split()[1] == str(step)
    assert starting_point(root / "version_0", 2).checkpoint == str(root / "checkpoints" / "step=00000001")
    with pytest.raises(FileNotFoundError, match="version_4 does not exist or is empty"):
        starting_point(root / "version_4", 2)


def test_list_reads_each_manifest_once(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_manifest = local_storage.read_manifest
    monkeypatch.setattr(local_storage, "read_manifest", lambda path: (reads.append(path.name), read_manifest(path))[1])
    assert len(entries(written)) == len(NAMES)
    assert len(reads) == len(NAMES) + 1  # the first tells that there are any
    reads.clear()
    assert len(entries(written.parent)) == len(NAMES)  # the run's folder
    assert len(reads) <= len(NAMES) + 2


@pytest.mark.parametrize("action", ["list", "show", "verify", "prune"])
def test_what_reads_no_tensors_imports_no_torch(folder: Path, action: str) -> None:
    arguments = ["checkpoint", action, str(folder), *(["--keep", "2"] if action == "prune" else [])]
    code = (
        f"import sys\nfrom engine.cli.main import main\nassert main({arguments!r}) == 0\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_list_says_what_is_incomplete(folder: Path, run: Output) -> None:
    (folder / NAMES[0] / "manifest.json").unlink()
    next((folder / NAMES[1] / "optim").glob("*.safetensors")).unlink()
    (folder / ".step=00000009.partial" / "model").mkdir(parents=True)
    (folder / "notes").mkdir()
    text = run("list", folder, status=1)
    assert f"{NAMES[0]}  incomplete or damaged: manifest.json is missing" in text
    assert f"{NAMES[1]}  incomplete or damaged: optim/rank=00000.safetensors is missing" in text
    assert ".step=00000009.partial  incomplete or damaged: not finished: a run is writing it, or was killed" in text
    assert "notes" not in text
    found = run.json("list", folder, status=1)
    assert [entry["name"] for entry in found if entry["complete"]] == [NAMES[2]]


def test_show(written: Path, run: Output) -> None:
    lines = [line.split() for line in run("show", written).splitlines()]
    assert lines[0] == [NAMES[2]]  # the newest
    assert ["width", "4"] in lines
    assert ["torch", torch.__version__] in lines
    assert ["strategy", "single", "default"] in lines
    assert not any("shard(s)" in line for line in lines)
    text = run("show", written / NAMES[0], "--tensors")
    assert next(line.split() for line in text.splitlines() if "head.weight" in line) == [
        "model.head.weight",
        "[6,",
        "4]",
        "float32",
        "1",
        "shard(s)",
    ]
    assert "model.up.weight is model.embed.weight" in text
    found = run.json("show", written / NAMES[0], "--tensors")
    assert found["hparams"] == {"width": 4, "scale": 1.0, "rate": 0.1}
    assert found["tensors"]["model"]["model.head.weight"] == {"shape": [6, 4], "dtype": "float32", "shards": 1}
    assert found["tied"] == {"model.up.weight": "model.embed.weight"}
    assert found["tensors"]["optim"]
    assert found["step"] == 1


def test_show_cuts_long_texts(folder: Path, run: Output) -> None:
    path, shared = folder / NAMES[0], folder / NAMES[0] / "state" / "shared.json"
    tree = json.loads(shared.read_text())
    tree["hparams"] |= {"prompt": "p" * 1_000_000, "list": [0] * 100_000, "n" * 100_000: 1}
    shared.write_text(json.dumps(tree))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state/shared.json"] = record_of(shared)
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))
    text = run("show", path)
    assert len(text) < 10_000
    assert f"{'p' * 1000}... (1,000,000 characters; --json prints all)" in text
    assert "0, 0, ... (300,000 characters; --json prints all)" in text
    assert ["width", "4"] in [line.split() for line in text.splitlines()]
    assert len(run.json("show", path)["hparams"]["prompt"]) == 1_000_000


def test_verify(folder: Path, run: Output) -> None:
    assert run("verify", folder / NAMES[0], folder / NAMES[1]).count("intact") == 2
    assert list(run.json("verify", folder)) == [str(folder / name) for name in NAMES]
    one = damage(folder / NAMES[0])
    two = folder / NAMES[0] / "state" / "shared.json"
    two.write_bytes(two.read_bytes()[:-1])
    three = folder / NAMES[1] / "optim" / "optim.json"
    three.unlink()
    found = run.json("verify", folder, status=1)
    assert [line.split()[0] for line in found[str(folder / NAMES[0])]] == [f"model/{one.name}", "state/shared.json"]
    assert found[str(folder / NAMES[1])] == ["optim/optim.json is missing"]
    assert found[str(folder / NAMES[2])] == []
    text = run("verify", folder / NAMES[0], folder / NAMES[2], status=1)
    assert f"{folder / NAMES[0]}: model/{one.name} is not what was written" in text
    assert f"{folder / NAMES[2]}: intact" in text


def test_verify_finds_what_is_no_checkpoint_or_has_more(folder: Path, run: Output) -> None:
    (folder / NAMES[2] / "model" / "more.safetensors").write_bytes(b"")
    assert run.json("verify", folder / NAMES[2], status=1)[str(folder / NAMES[2])] == [
        "model/more.safetensors is not in the manifest"
    ]
    (folder / NAMES[0] / "manifest.json").write_text("{}")
    assert "manifest.json has no format version" in run("verify", folder / NAMES[0], status=1)
    assert "is not a checkpoint" in run("verify", folder / "nothing", status=1)
    (folder / NAMES[1] / "manifest.json").unlink()
    assert "manifest.json is missing" in run("verify", folder / NAMES[1], status=1)


def test_verify_finds_what_is_beside_the_files_of_a_joined_one(tmp_path: Path, run: Output) -> None:
    train_and_save(tmp_path, Tied(), [torch.randn(8, 6)])
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert {path.name for path in checkpoint.iterdir()} == {"manifest.json", "rank=00000.safetensors"}
    assert "intact" in run("verify", checkpoint)
    (checkpoint / "extra").touch()
    assert run.json("verify", checkpoint, status=1) == {str(checkpoint): ["extra is not in the manifest"]}


def test_verify_opens_the_files(folder: Path, run: Output) -> None:
    """A file whose checksum is right and that is not a safetensors file."""
    path = folder / NAMES[0]
    file = next((path / "model").glob("*.safetensors"))
    file.write_bytes(b"x" * 100)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][f"model/{file.name}"] = record_of(file)
    manifest.pop("crc32")
    text = json.dumps(manifest, sort_keys=True)
    (path / "manifest.json").write_text(json.dumps({**manifest, "crc32": f"{zlib.crc32(text.encode()):08x}"}))
    assert "a safetensors file cannot be read" in run("verify", path, status=1)


def test_export(written: Path, tmp_path: Path, run: Output) -> None:
    out = tmp_path / "out"
    text = run(
        "export",
        written,
        out,
        "--dtype",
        "bf16",
        "--prefix-strip",
        "model.",
        "--exclude",
        "*.norm.*",
        "--max-shard-size",
        "60B",
    )
    assert "tied, written once: model.up.weight is model.embed.weight" in text
    assert "left out: model.norm.bias" in text
    files = [Path(line) for line in text.splitlines() if line.endswith(".safetensors")]
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(found) == {"embed.weight", "head.weight", "head.bias"}
    assert all(tensor.dtype is torch.bfloat16 for tensor in found.values())
    assert "holds model-00001-of" in run("export", written, out, status=1)
    assert run.json("export", written / NAMES[0], tmp_path / "two")["tensors"] == 8
    newest, first = Tied.load_from_checkpoint(written / NAMES[2]), Tied.load_from_checkpoint(written / NAMES[0])
    assert torch.equal(found["head.weight"], newest.model["head"].weight.bfloat16())  # a folder's newest
    assert not torch.equal(found["head.weight"], first.model["head"].weight.bfloat16())


def test_convert(tmp_path: Path, run: Output) -> None:
    module = Tied()
    torch.save(module.state_dict(), tmp_path / "a.pt")
    text = run("convert", tmp_path / "a.pt", tmp_path / "ours", status=1)
    assert text.startswith(
        f"fit checkpoint convert: {tmp_path / 'a.pt'} is a pickle, which can run code when it is opened: --trust-pickle"
    )
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "ours").exists()
    assert "from a torch.save file" in run("convert", tmp_path / "a.pt", tmp_path / "ours", "--trust-pickle")
    assert torch.equal(Tied.load_from_checkpoint(tmp_path / "ours").model["head"].weight, module.model["head"].weight)
    assert run.json("convert", tmp_path / "a.pt", tmp_path / "two", "--trust-pickle")["tensors"] == 8


def test_pack(folder: Path, tmp_path: Path, run: Output) -> None:
    out = tmp_path / "one.ckpt"
    assert run.json("pack", folder, out)["bytes"] == out.stat().st_size
    assert "intact" in run("verify", out)
    run("export", out, tmp_path / "of_file")
    run("export", folder, tmp_path / "of_folder")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("of_file", "of_folder"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert "exists" in run("pack", folder, out, status=1)
    data = out.read_bytes()
    out.write_bytes(data[:-30])
    assert "is a damaged archive" in run("show", out, status=1)
    run("pack", folder, tmp_path / "one.pt", "--pickle")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert found["global_step"] == 3
    torch.testing.assert_close({name: found["state_dict"][name] for name in one}, one, rtol=0, atol=0)


def test_prune(folder: Path, run: Output) -> None:
    dry = run("prune", folder, "--keep", 1, "--dry-run").splitlines()
    assert dry == [f"{NAMES[0]}: would be removed", f"{NAMES[1]}: would be removed", f"{NAMES[2]}: kept"]
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert run.json("prune", folder, "--keep", 1, "--keep-best", 1) == {
        "removed": [NAMES[0]],
        "kept": NAMES[1:],
        "in_use": [],
    }
    assert sorted(path.name for path in folder.iterdir()) == NAMES[1:]
    run("prune", folder, "--keep", 1)
    assert [path.name for path in folder.iterdir()] == [NAMES[2]]
    assert run("prune", folder, "--keep", 1).splitlines() == [f"{NAMES[2]}: kept"]


def test_of_equal_scores_the_first_is_the_best(tmp_path: Path, run: Output) -> None:
    train_and_save(tmp_path, Tied(), [torch.randn(8, 6)] * 3, scores={1: 0.1, 2: 0.1, 3: 0.3})
    assert [entry["aliases"] for entry in run.json("list", tmp_path)] == [["best"], [], ["last"]]
    assert run.json("prune", tmp_path, "--keep", 1, "--keep-best", 1)["kept"] == [NAMES[0], NAMES[2]]


def test_prune_keeps_what_is_being_read_and_what_is_incomplete(folder: Path, run: Output) -> None:
    descriptor = os.open(folder / NAMES[0] / "manifest.json", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    (folder / NAMES[2] / "manifest.json").unlink()
    # The newest complete one is the second: an incomplete one does not count.
    assert run.json("prune", folder, "--keep", 1) == {"removed": [], "kept": [NAMES[1]], "in_use": [NAMES[0]]}
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    os.close(descriptor)
    assert run.json("prune", folder, "--keep", 1)["removed"] == [NAMES[0]]
    assert sorted(path.name for path in folder.iterdir()) == NAMES[1:]
    assert "give the folder that it is in" in run("prune", folder / NAMES[1], "--keep", 1, status=1)


@pytest.fixture
def url(written: Path) -> Iterator[str]:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(str(written), "/runs/checkpoints", recursive=True)
    yield "memory://runs/checkpoints"
    memory.rm("/runs", recursive=True)


def test_places_that_fsspec_reaches(written: Path, url: str, tmp_path: Path, run: Output) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    assert [entry["name"] for entry in run.json("list", url)] == NAMES
    assert run.json("show", f"{url}/{NAMES[0]}")["step"] == 1
    assert run.json("show", "memory://runs")["step"] == 3
    assert run.json("verify", url) == {f"{url}/{name}": [] for name in NAMES}
    assert run.json("list", f"file://{written}")[0]["name"] == NAMES[0]
    run("export", url, tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 8
    memory.rm_file(f"/runs/checkpoints/{NAMES[0]}/state/shared.json")
    assert "incomplete or damaged: state/shared.json is missing" in run("list", url, status=1)
    assert run.json("verify", url, status=1)[f"{url}/{NAMES[1]}"] == []
    memory.pipe_file(f"/runs/checkpoints/{NAMES[1]}/state/shared.json", b"{}")
    assert "state/shared.json has 2 bytes" in run("list", url, status=1)
    assert run.json("prune", url, "--keep", 1)["kept"] == [NAMES[2]]
    assert "nowhere://a" in run("list", "nowhere://a", status=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "required: root"),
        (["lst", "a"], "invalid choice"),
        (["prune", "a"], "required: --keep"),
        (["prune", "a", "--keep", "0"], "'0' is not a whole number of at least 1"),
        (["export", "a", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["export", "a", "b", "--max-shard-size", "big"], "'big' is not a size: give bytes, or text such as '5GB'"),
        ([], "required"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("action", ["list", "show", "verify", "prune", "export"])
def test_nothing_there(action: str, tmp_path: Path, run: Output) -> None:
    more = {"prune": ["--keep", "1"], "export": [str(tmp_path / "out")]}.get(action, [])
    text = run(action, tmp_path / "nothing", *more, status=1)
    assert f"{tmp_path / 'nothing'} is not a checkpoint, and contains none" in text
    assert len(text.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["list", "show", "verify", "export", "convert", "pack", "prune"])
def test_each_has_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", action, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_as_a_process(written: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "checkpoint", "list", str(written)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert NAMES[0] in done.stdout
    assert done.stderr == ""


def test_best_last_and_names_of_a_folder(folder: Path, tmp_path: Path, run: Output) -> None:
    """The best of 0.5, 0.1 and 0.3 is the second."""
    steps = {"best": 2, "last": 3, NAMES[0]: 1}
    for name, step in steps.items():
        assert run.json("show", folder.parent, "--checkpoint", name)["step"] == step
    run("export", folder, tmp_path / "exported", "--checkpoint", "best")
    run("export", folder / NAMES[1], tmp_path / "second")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (
        tmp_path / "second/model.safetensors"
    ).read_bytes()
    run("pack", folder, tmp_path / "best.ckpt", "--checkpoint", "best")
    assert run.json("show", tmp_path / "best.ckpt")["step"] == 2
    text = f"has no complete checkpoint 'step=00000020'; it has {', '.join(NAMES)}"
    assert text in run("export", folder, tmp_path / "x", "--checkpoint", "step=00000020", status=1)
    assert "is a checkpoint: give the folder" in run("show", folder / NAMES[0], "--checkpoint", "best", status=1)
    assert "is not a checkpoint" in run("show", tmp_path / "nowhere", "--checkpoint", "best", status=1)
    for name in NAMES:
        manifest = folder / name / "manifest.json"
        manifest.write_text(json.dumps(resummed({**json.loads(manifest.read_text()), "score": None})))
    assert "has a score: train with ModelCheckpoint(monitor=...)" in run(
        "show", folder, "--checkpoint", "best", status=1
    )


def test_a_single_damaged_checkpoint_is_listed_with_its_reason(folder: Path, run: Output) -> None:
    step = folder / NAMES[1]
    for place in (step, f"file://{step}"):
        assert NAMES[1] in run("list", place)
    (step / "model" / "rank=00000.safetensors").unlink()
    for place in (step, f"file://{step}"):
        line = run("list", place, status=1)
        assert f"{NAMES[1]}  incomplete or damaged: model/rank=00000.safetensors is missing" in line
        [entry] = run.json("list", place, status=1)
        assert not entry["complete"]


@pytest.fixture
def web_server(folder: Path) -> Iterator[str]:
    """The URL of a server that lists folders as pages of links: names are encoded, sizes are missing."""
    pytest.importorskip("aiohttp")
    handler = partial(QuietHandler, directory=str(folder.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_checkpoints_at_a_web_server(web_server: str, folder: Path, run: Output) -> None:
    for place in (f"{web_server}/checkpoints", f"{web_server}/checkpoints/", web_server):
        assert [line.split()[0] for line in run("list", place).splitlines()[1:]] == NAMES
    assert NAMES[1] in run("list", f"{web_server}/checkpoints/{NAMES[1]}")
    assert NAMES[2] in run("show", f"{web_server}/checkpoints/{NAMES[2]}")
    assert "intact" in run("verify", f"{web_server}/checkpoints")
    (folder / NAMES[1] / "model" / "rank=00000.safetensors").unlink()
    for place in (f"{web_server}/checkpoints", f"{web_server}/checkpoints/{NAMES[1]}"):
        assert f"{NAMES[1]}  incomplete or damaged: model/rank=00000.safetensors is missing" in run(
            "list", place, status=1
        )
    for place in (f"{web_server}/nothing", f"{web_server}/checkpoints/{NAMES[0]}/manifest.json"):
        assert "is not a checkpoint" in run("list", place, status=1)
