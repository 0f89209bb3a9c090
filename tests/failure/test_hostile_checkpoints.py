"""Checkpoints that somebody has changed and given checksums that fit: none runs code, touches another file, raises a raw error, or takes long.

So do archives, folders to pack, pickles, and the files that reports read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_script

SCRIPT = """
import copy, itertools, json, logging, os, random, shutil, struct, sys, time, traceback, warnings
from pathlib import Path
import torch

tests, root = sys.argv[1], Path(sys.argv[2])
least = int(sys.argv[3])
sys.path.insert(0, tests)
from support.checkpoints import record_of, resummed
from support.internals import write_folders
from callbacks import ModelCheckpoint
from engine import Engine, Fit, TrainModule
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.catalog import entries, facts, problems
from engine.cli.main import main

logging.disable(logging.CRITICAL)
os.fsync = lambda descriptor: None  # what is on the disk for certain is not asked here
warnings.simplefilter("ignore")
DATA = [torch.ones(2, 4)] * 4


class Net(TrainModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def train(folder, steps, resume=None):
    saved = ModelCheckpoint(every=3, save_top_k=1, monitor=None)
    return Fit(accelerator="cpu", root_dir=folder, callbacks=[saved], max_steps=steps, max_epochs=None, seed=1).run(
        Net(), DATA, resume=resume
    )


def paths(value, path=()):
    # Where each value stands. Settings are many and alike: every eighth of them.
    yield path
    if isinstance(value, dict):
        inner = list(value.items())
        inner = inner[::8] if path == ("config",) else inner
        yield from itertools.chain.from_iterable(paths(each, (*path, key)) for key, each in inner)
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(paths(each, (*path, index)) for index, each in enumerate(value))


def replaced(value, path, new):
    if not path:
        return new
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if new is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return value


GONE, DEEP = object(), []
for _ in range(400):
    DEEP = [DEEP]
HOSTILE = [
    GONE, None, True, -1, 2**70, 10**400, 1e308, "", "../../victims", "/victims", "\\x1b[2J\\x07", "\\0", "a" * 5000, [], {}, [[]], DEEP,
    {"$": "float", "value": "nan"}, {"$": "tensor", "name": "rng.torch"}, {"$": "set", "items": [[1]]}, {"$": "bytes", "base64": "AA=="},
    {"__class__": "os.system"}, {"$": "eval", "items": ["os.system('touch ran')"]},
]
PREFIX = "model/" if sys.argv[4] == "joined" else ""  # of the names of tensors
WEIGHTS = "rank=00000.safetensors" if PREFIX else "model/rank=00000.safetensors"
if not PREFIX:
    write_folders()


def seal(path):
    if not (path / "manifest.json").is_file():
        return
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (ValueError, RecursionError):
        return
    manifest["files"] = {name: record_of(path / name) if (path / name).is_file() else known for name, known in manifest["files"].items()}
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))


def fields(path):
    for file in ("manifest.json", "state/shared.json", "state/rank=00000.json", "optim/optim.json", "model/model.json"):
        if not (path / file).is_file():
            continue  # the manifest has it
        value = json.loads((path / file).read_text())
        for where in paths(value):
            if where and not (file == "manifest.json" and where[0] == "crc32"):
                yield file, value, where


def header(path, change):
    content = (path / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    text = json.loads(content[8 : 8 + size])
    text = json.dumps(change(text) or text).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def sharding(info):
    return lambda path: header(path, lambda text: text["__metadata__"].update(DCP_SHARDING_INFO=info if isinstance(info, str) else json.dumps(info)))


def raw(name, content):
    def change(path):
        (path / name).write_bytes(content)

    return change


def fifo(name):
    def change(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    return change


SHARED, OPTIM = ("manifest.json", "manifest.json") if PREFIX else ("state/shared.json", "optim/optim.json")
BOTH = (PREFIX + "net.weight", PREFIX + "net.bias")
SPECIAL = {
    **{f"offsets {info!r:.40}": sharding(info) for info in (
        [], 3, "[" * 5000, "{}", "nothing", *({name: {"saved_offsets": value} for name in BOTH} for value in (
            [], None, "x", [0, 0, 0], [-1], [2**70], [2**62, 2**62], [1e308], [None], {"a": 1}, [[0]])))},
    "header of a number": lambda path: raw(WEIGHTS, struct.pack("<Q", 1 << 60))(path),
    "empty": raw(WEIGHTS, b""),
    "huge shape": lambda path: header(path, lambda text: text[PREFIX + "net.weight"].update(shape=[1 << 40])),
    "names": lambda path: header(path, lambda text: {("\\x1b[2J" + name if name != "__metadata__" else name): value for name, value in text.items()}),
    "an option of GPUs": lambda path: (path / OPTIM).write_text(
        (path / OPTIM).read_text().replace('"capturable": false', '"capturable": true')),
    "no text": raw(OPTIM, b"\\xff\\xfe"),
    **{f"deep {name}": raw(name, b"[" * 100000 + b"]" * 100000) for name in {SHARED, OPTIM}},
    **{f"fifo {name}": fifo(name) for name in {WEIGHTS, SHARED, "manifest.json"}},
}


def cases(base):
    rng = random.Random(0)
    for number, (file, value, where) in enumerate(fields(base)):
        for new in rng.sample(HOSTILE, 2 if file == "state/shared.json" else 1):
            def change(path, file=file, value=value, where=where, new=new):
                text = json.dumps(replaced(value, where, new))
                (path / file).write_text(text)
                if file == "manifest.json":
                    (path / file).write_text(json.dumps(resummed(json.loads(text))))
                else:
                    seal(path)
            yield f"{file} {'.'.join(map(str, where))} = {'(gone)' if new is GONE else '(deep)' if new is DEEP else repr(new)[:40]}", change
    for name, make in SPECIAL.items():
        def change(path, make=make):
            make(path)
            seal(path)
        yield name, change


RAW = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, AssertionError, MemoryError, NameError, UnicodeError)
touched, watching = [], []
allowed = str(root / "run")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree", "os.chmod")


def audit(event, arguments):
    if not watching:
        return
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "pickle.find_class", "socket.connect"):
        touched.append((event, str(arguments)[:200]))
    elif event in WRITES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        folder = f"/proc/self/fd/{arguments[1]}" if event in ("os.remove", "os.rmdir") and arguments[1] >= 0 else "."
        name = isinstance(arguments[0], (str, bytes, os.PathLike))
        path = os.path.join(os.path.realpath(folder), os.fsdecode(arguments[0])) if name else ""
        if path and not path.startswith((allowed, "/tmp/checkpoints-", "/dev/null")) and "__pycache__" not in path:
            touched.append((event, path))


sys.addaudithook(audit)


def attempt(label, function):
    began = time.process_time()
    watching.append(1)
    try:
        function()
        outcome = "taken"
    except RAW as error:
        outcome = "RAW"
        print("RAW", label, "".join(traceback.format_exception(error)[-4:]), flush=True)
    except Exception as error:
        outcome = type(error).__name__
        if any(not c.isprintable() and c != "\\n" for c in str(error)):
            outcome = "RAW"
            print("ESCAPES", label, repr(str(error)), flush=True)
    finally:
        watching.clear()
    took = time.process_time() - began
    if took > 10:
        print("SLOW", label, took, flush=True)
        outcome = "RAW"
    return outcome


def tell(path):
    import contextlib, io
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        for arguments in (["show", str(path)], ["verify", str(path)], ["list", str(path.parent)]):
            main(["checkpoint", *arguments])
    if any(not c.isprintable() and c != "\\n" for c in out.getvalue()):
        raise AssertionError("control characters reach the terminal")


train(root / "base", 3)
(base,) = (p.parent for p in (root / "base").rglob("manifest.json"))
victims = root / "victims"
for name in ("step=00000001", "step=00000002"):
    shutil.copytree(base, victims / name)
shutil.copytree(base, root / "other")


def contents():
    return {str(p): p.read_bytes() for d in (victims, root / "other", base) for p in sorted(d.rglob("*")) if p.is_file()}


before = contents()
outcomes, count = {}, 0
for label, change in cases(base):
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    path = run / "checkpoints" / "step=00000003"
    shutil.copytree(base, path)
    try:
        change(path)
    except (RecursionError, ValueError):
        continue
    count += 1
    for what, function in (
        ("resume", lambda: train(run / "new", 5, path)), ("tell", lambda: tell(path)), ("load", lambda: Net.load_from_checkpoint(path)),
    ):
        outcome = attempt(f"{what}: {label}", function)
        outcomes.setdefault(outcome, 0)
        outcomes[outcome] += 1
print(count, outcomes)
assert contents() == before, "other files were touched"
assert not touched, touched
assert count >= least, count
assert not outcomes.get("RAW"), outcomes
assert not Path("ran").exists()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folders", "joined"])
def test_hostile_checkpoints_do_nothing(form: str, tmp_path: Path) -> None:
    out = run_script(SCRIPT, Path(__file__).parents[1], tmp_path, 150, form, timeout=900, forked=True)
    assert "done" in str(out)


@pytest.mark.parametrize(
    ("kinds", "form", "least"),
    [
        ("archive", "folders", 230),
        ("archive", "joined", 200),
        ("pickle,index", "folders", 130),
        ("folder,report", "folders", 90),
        ("folder", "joined", 50),
    ],
)
def test_hostile_files_do_nothing(kinds: str, form: str, least: int, tmp_path: Path) -> None:
    """Through every door: no raw error, no hang, no more bytes than there were, nothing from outside, nothing outside."""
    here = Path(__file__).parent
    out = run_script(here / "hostile_files.py", here.parent, tmp_path, kinds, form, timeout=240, forked=True).stdout
    assert int(out.split("inputs:")[1].split()[0]) >= least


SWAPS = """
import multiprocessing, os, sys, time
from pathlib import Path
import torch
from callbacks import ModelCheckpoint
from engine import DamagedCheckpoint, Fit, TrainModule
from engine.checkpoint.catalog import problems

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def swap(place):
    files = [file for file in place.rglob("*") if file.is_file()]
    for number in range(10**9):
        for file in files:
            kept, other = file.with_name("." + file.name), file.with_name(".other")
            os.link(file, kept)
            if number % 4 == 0:
                os.mkfifo(other)
            elif number % 4 == 1:
                other.symlink_to("/dev/zero")
            elif number % 4 == 2:
                other.write_bytes(file.read_bytes()[:-1])
            else:
                other.write_bytes(kept.read_bytes())
                os.truncate(other, kept.stat().st_size // 2)
            os.replace(other, file)
            os.replace(kept, file)

torch.set_num_threads(1)
root = Path(sys.argv[1])
saved = ModelCheckpoint(every=1, monitor=None)
run = Fit(accelerator="cpu", root_dir=root, callbacks=[saved], max_steps=1, seed=1).run(Net(), [torch.ones(2, 64)])
(path,) = root.rglob("step=00000001")
swapper = multiprocessing.get_context("fork").Process(target=swap, args=(path,), daemon=True)
swapper.start()
ended, until = {}, time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    for door in (Net.load_from_checkpoint, problems):
        try:
            door(path)
            kind = "read"
        except (DamagedCheckpoint, OSError) as error:
            kind = type(error).__name__
        ended[kind] = ended.get(kind, 0) + 1
assert swapper.is_alive()
swapper.kill()
report(ended)
"""


@pytest.mark.slow
def test_files_that_are_swapped_while_they_are_read(tmp_path: Path) -> None:
    """Another program replaces them by pipes, devices and shorter files again and again: each reading ends."""
    ended = run_script(SWAPS, tmp_path, 20, timeout=200).value
    assert ended["read"] > 0
    assert ended["DamagedCheckpoint"] > 0
