"""Run by ``test_hostile_checkpoints.py``: files of all kinds that nobody would write, through every door that takes such a file.

``hostile_files.py TESTS FOLDER KINDS FORM``: the folder of tests, an empty folder, some of :data:`DOORS`, and ``joined`` or ``folders``, the form
of the checkpoint that is changed.
"""

import contextlib
import csv
import faulthandler
import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

sys.path.insert(0, sys.argv[1])
from support.checkpoints import record_of, resummed
from support.internals import write_folders

from callbacks import ModelCheckpoint, write_report
from callbacks.report.runs import logged_until
from engine import Fit, TrainModule
from engine.checkpoint.one_file import pack_folder
from engine.cli.main import main
from engine.compat.foreign_checkpoints.conversion import convert
from engine.interop import lightning

root = Path(sys.argv[2])

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
os.fsync = lambda descriptor: None
tempfile.tempdir = str(root / "temporary")
(root / "temporary").mkdir()
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a bomb must not need the machine
DATA = [torch.ones(2, 4)] * 2
LIMIT_S = 5
JOINED = sys.argv[4] == "joined"
if not JOINED:
    write_folders()  # a checkpoint with all kinds of files


class Net(TrainModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Theirs(lightning.LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)


def train(folder, resume=None):
    return Fit(
        accelerator="cpu", root_dir=folder, callbacks=[ModelCheckpoint()], max_epochs=1 if resume is None else 2
    ).run(Net(), DATA, resume=resume)


train(root / "run")
BASE = next((root / "run").rglob("manifest.json")).parent
pack_folder(BASE, root / "base.ckpt")
WHOLE = (root / "base.ckpt").read_bytes()
NAMES = ["manifest.json", *json.loads((BASE / "manifest.json").read_text())["files"]]
CONTENT = {name: (BASE / name).read_bytes() for name in NAMES}
MODEL = "rank=00000.safetensors" if JOINED else "model/rank=00000.safetensors"
SECRET = root / "secret"
SECRET.write_text("secret")
os.mkfifo(root / "fifo")

# -- archives -------------------------------------------------------------------------------------------------------------------------


def archive(path, content=None, changed=(), method=zipfile.ZIP_STORED, methods=(), before_end=None):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in ({**CONTENT, **dict(changed)} if content is None else content).items():
            if data is not None:
                file.writestr(name, data, dict(methods).get(name, method))
        if before_end is not None:
            before_end(file)


def manifest_of(content):
    files = {}
    for name, data in content.items():
        (root / "one").write_bytes(data)
        files[name] = record_of(root / "one")
    manifest = json.loads(CONTENT["manifest.json"])
    return json.dumps(resummed({**manifest, "files": files}))


def sealed(path, changed, **options):
    content = {
        name: data for name, data in {**CONTENT, **changed}.items() if name != "manifest.json" and data is not None
    }
    archive(path, {"manifest.json": manifest_of(content), **content}, **options)


def flags(value):
    def change(file):
        for info in file.filelist:
            info.flag_bits |= value

    return lambda path: archive(path, before_end=change)


def every(**values):
    def change(file):
        for info in file.filelist:
            for name, value in values.items():
                setattr(info, name, value)

    return lambda path: archive(path, before_end=change)


def overlapping(path):
    big = bytes(1 << 22)
    names = [f"model/part{i}.safetensors" for i in range(200)]
    manifest = manifest_of({"model/part0.safetensors": big})
    record = json.loads(manifest)["files"]["model/part0.safetensors"]
    manifest = json.dumps(resummed({**json.loads(manifest), "files": dict.fromkeys(names, record)}))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", manifest)
        file.writestr(names[0], big)
        first = file.filelist[-1]
        for name in names[1:]:
            info = zipfile.ZipInfo(name)
            info.CRC, info.file_size, info.compress_size, info.header_offset = (
                first.CRC,
                first.file_size,
                first.compress_size,
                first.header_offset,
            )
            file.filelist.append(info)
            file.NameToInfo[name] = info
        file._didModify = True


def ends(**fields):
    # Fields of the end of the central directory: position in it, and its format.
    places = {
        "disk": (4, "<H"),
        "start_disk": (6, "<H"),
        "here": (8, "<H"),
        "count": (10, "<H"),
        "size": (12, "<L"),
        "offset": (16, "<L"),
        "comment": (20, "<H"),
    }

    def change(path):
        data = bytearray(WHOLE)
        at = data.rindex(b"PK\5\6")
        for name, value in fields.items():
            struct.pack_into(places[name][1], data, at + places[name][0], value)
        path.write_bytes(data)

    return change


def raw(data):
    return lambda path: path.write_bytes(data)


def twice(path):
    def again(file):
        file.writestr(MODEL, CONTENT[MODEL])

    archive(path, before_end=again)


def as_links(path):
    with zipfile.ZipFile(path, "w") as file:
        for name, data in CONTENT.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16 if name == MODEL else 0o644 << 16
            file.writestr(info, str(SECRET) if name == MODEL else data)


def linked(target):
    return lambda path: path.symlink_to(target)


def endless(head=b""):
    """A file with a line of 100 GB, nearly all of it a hole, which takes no space."""

    def make(path):
        with path.open("wb") as file:
            file.write(head)
            file.truncate(100 << 30)

    return make


def listening(path):
    os.chdir(path.parent)  # the name of a socket is short
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(path.name)


kept, rng = [], random.Random(0)
zeros = {MODEL: bytes(40_000_000)}
ARCHIVES = {
    **{f"method {method}": lambda path, method=method: archive(path, method=method) for method in (8, 12, 14)},
    **{f"{name} deflated": lambda path, name=name: archive(path, methods={name: 8}) for name in NAMES},
    **{f"bomb {method}": lambda path, method=method: sealed(path, zeros, method=method) for method in (8, 12, 14)},
    "bomb beside the manifest": lambda path: archive(
        path, changed={"model/x.safetensors": bytes(40_000_000)}, method=8
    ),
    **{f"flags {value}": flags(value) for value in (1, 1 << 5, 1 << 6, 1 << 13, 0x41, 0xFFFF & ~8)},
    **{
        f"{name} {value}": every(**{name: value})
        for name, value in (
            ("compress_type", 99),
            ("compress_type", 8),
            ("extract_version", 99),
            ("file_size", 0),
            ("file_size", 2**40),
            ("file_size", 2**62),
            ("compress_size", 0),
            ("compress_size", 2**40),
            ("compress_size", 2**62),
            ("header_offset", 0),
            ("header_offset", 2**31),
            ("header_offset", 2**62),
            ("CRC", 0),
            ("volume", 7),
            ("extra", b"\1\0\x20\0" + b"\xff" * 32),
            ("extra", b"\1\0\4\0abcd"),
            ("extra", b"\xff" * 3),
            ("extra", b"\x99\x99\xff\xff"),
        )
    },
    **{
        f"end {fields}": ends(**fields)
        for fields in (
            {"offset": 0},
            {"offset": 2**32 - 1},
            {"offset": 10**6},
            {"size": 0},
            {"size": 2**32 - 1},
            {"size": 7},
            {"count": 0, "here": 0},
            {"count": 65535, "here": 65535},
            {"disk": 3},
            {"start_disk": 9},
            {"comment": 65535},
            {"size": 2**32 - 1, "offset": 2**32 - 1, "count": 65535},
        )
    },
    **{f"cut at {cut:.0%}": raw(WHOLE[: int(len(WHOLE) * cut)]) for cut in (x / 40 for x in range(40))},
    **{f"without its first {n}": raw(WHOLE[n:]) for n in (1, 4, 30, 500)},
    "after junk": raw(b"junk" * 100 + WHOLE),
    "before junk": raw(WHOLE + b"junk" * 100),
    "doubled": raw(WHOLE + WHOLE),
    **{f"{name} is missing": lambda path, name=name: archive(path, changed={name: None}) for name in NAMES},
    **{f"{name} is short": lambda path, name=name: archive(path, changed={name: CONTENT[name][:-1]}) for name in NAMES},
    **{
        f"{name} is long": lambda path, name=name: archive(path, changed={name: CONTENT[name] + b" "})
        for name in NAMES[1:]
    },
    **{
        f"also {name!r:.30}": lambda path, name=name: archive(path, changed={name: b"x"})
        for name in (
            "../outside",
            "/outside",
            str(SECRET),
            "model/../../outside",
            "model/../manifest.json",
            "model//x",
            "./manifest.json",
            "x",
            "model/x.safetensors",
            "model",
            "state/rank=00000.json/x",
            "C:\\x",
            "\\\\host\\x",
            "\x1b[2J",
            "\u202e",
            "a" * 4000,
            "model/" + "b" * 300,
            " ",
            ".",
            "..",
            "manifest.json/",
            "MANIFEST.JSON",
            "weights/weights.json",
            "optim/../optim/optim.json",
        )
    },
    **{
        f"named {name!r:.30}": lambda path, name=name: sealed(path, {name: b"x"})
        for name in (
            "../outside",
            "/outside",
            "model/../../outside",
            "model/a/b",
            "x",
            "model/\x1b[2J",
            "model/" + "b" * 300,
            "weights/weights.json",
            "model/..",
        )
    },
    "a folder with content": lambda path: archive(path, changed={"model/": b"content"}),
    "twice": twice,
    "as links": as_links,
    "overlapping": overlapping,
    **{
        f"manifest {text[:20]!r}": lambda path, text=text: archive(path, changed={"manifest.json": text})
        for text in (
            b"",
            b"{}",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"format": 3}',
            b'{"format": 1e999}',
            b"9" * 5000,
        )
    },
    "empty": raw(b""),
    "an end": raw(b"PK\5\6" + bytes(18)),
    "a head": raw(WHOLE[:43]),
    "a head and noise": raw(WHOLE[:43] + rng.randbytes(5000)),
    "noise": raw(rng.randbytes(5000)),
    "a head of another": raw(b"PK\3\4" + bytes(100)),
    "64 bit end": raw(WHOLE[:43] + b"PK\6\6" + bytes(52) + b"PK\6\7" + bytes(16) + b"PK\5\6" + b"\xff" * 16 + bytes(2)),
    "fifo": os.mkfifo,
    "socket": listening,
    "folder": lambda path: path.mkdir(),
    "link to a fifo": linked(root / "fifo"),
    "link to zeros": linked("/dev/zero"),
    "link to null": linked("/dev/null"),
    "link to tty": linked("/dev/tty"),
    "link to itself": linked("x.ckpt"),
    "link to nothing": linked("nothing"),
}
for _ in range(60):
    flipped, place = bytearray(WHOLE), rng.randrange(len(WHOLE))
    flipped[place] ^= 1 << rng.randrange(8)
    ARCHIVES[f"bit at {place}"] = raw(bytes(flipped))

# -- folders to pack ------------------------------------------------------------------------------------------------------------------


def instead(name, make):
    def change(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()
        path.parent.mkdir(exist_ok=True)  # a joined checkpoint has no folders
        make(path)

    return change


MAKES = {
    "link out": linked(SECRET),
    "link out of folder": linked(root),
    "fifo": os.mkfifo,
    "link to a fifo": linked(root / "fifo"),
    "link to zeros": linked("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "climbing link": linked("../../../../../../../../etc/passwd"),
    "socket": listening,
}
FOLDERS = {
    f"{what} as {name}": instead(name, make)
    for name in (MODEL, "manifest.json", "state/shared.json", "extra", "model/extra", "weights", "optim")
    for what, make in MAKES.items()
}

# -- pickles --------------------------------------------------------------------------------------------------------------------------


def nested(leaf, wrap, depth):
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def holding_itself(kind):
    value = kind()
    value.append(value) if kind is list else value.update(me=value)
    return value


def pickled(body, deflated=False):
    # A file of torch.save with this pickle.
    def make(path):
        with zipfile.ZipFile(path, "w", 8 if deflated else 0) as file:
            file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
            file.writestr("archive/version", b"3")
            file.writestr("archive/byteorder", b"little")

    return make


def legacy(body):
    def make(path):
        parts = [
            pickle.dumps(0x1950A86A20F9469CFC6C, 2),
            pickle.dumps(1001, 2),
            pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2),
        ]
        path.write_bytes(b"".join(parts) + b"\x80\x02" + body + b"." + pickle.dumps([], 2))

    return make


def tuples(depth, use):
    # A tuple of twice a tuple of twice ... and how it is used.
    body = b"K\x01\x85q\x00"
    for level in range(depth):
        body += b"0h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1])
    return body + b"0" + use.replace(b"<T>", b"h" + bytes([depth]))


SHARED = {
    "lists": nested([0], lambda x: [x] * 10, 9),
    "more lists": nested([0], lambda x: [x, x], 60),
    "dicts": nested({}, lambda x: {"a": x, "b": x}, 40),
    "tuples": nested((0,), lambda x: (x, x), 40),
    "mixed": nested([0], lambda x: {"a": [x, (x, x)]}, 40),
    "deep": nested([], lambda x: [x], 900),
    "itself": holding_itself(list),
    "itself in a dict": holding_itself(dict),
    "wide": [[list(range(1000))] * 1000] * 1000,
    "expanded": torch.zeros(1).expand(10**10),
    "expanded many": {str(i): torch.zeros(1).expand(10**9) for i in range(9)},
}
PLACES = {
    "hyper_parameters": lambda value: {"hyper_parameters": {"width": value}},
    "an entry": lambda value: {"mine": value},
    "loops": lambda value: {"loops": value},
    "optimizer": lambda value: {
        "optimizer_states": [{"state": {0: {"step": value}}, "param_groups": [{"params": [0], "lr": value}]}]
    },
    "scheduler": lambda value: {"lr_schedulers": [value]},
    "weights": lambda value: {"state_dict": {"net.weight": torch.zeros(1, 4), "net.bias": value}},
    "scaler": lambda value: {"MixedPrecision": value},
    "average": lambda value: {"current_model_state": {"net.weight": value}},
    "epoch": lambda value: {"epoch": value},
}
PLAIN = {
    "state_dict": {"net.weight": torch.zeros(1, 4), "net.bias": torch.zeros(1)},
    "pytorch-lightning_version": "2.6.0",
    "epoch": 0,
    "global_step": 1,
}


def saved(content, new):
    def make(path):
        sys.setrecursionlimit(10_000)
        torch.save(content, path, _use_new_zipfile_serialization=new)
        sys.setrecursionlimit(1_000)

    return make


KEY, IN_SET, ORDERED = b"}<T>K\x01s", b"cbuiltins\nset\n]<T>a\x85R", b"ccollections\nOrderedDict\n]<T>K\x01\x86a\x85R"
COUNTED, MANY, KEY_AGAIN = (
    b"ccollections\nCounter\n]<T>a\x85R",
    b"}" + b"<T>K\x01s" * 50,
    b"}(" + b"<T>K\x01" * 400 + b"u",
)
PICKLES = {
    **{
        f"{what} in {where}": saved({**PLAIN, **put(value)}, new=what != "mixed")
        for what, value in SHARED.items()
        for where, put in PLACES.items()
    },
    **{
        f"{name} {depth}": make(tuples(depth, use))
        for name, make in (("zip", pickled), ("old", legacy))
        for depth in (40, 200)
        for use in (KEY, IN_SET, ORDERED, COUNTED, MANY)
    },
    **{f"often {name}": make(tuples(19, KEY_AGAIN)) for name, make in (("zip", pickled), ("old", legacy))},
    "an old one with the end of an archive": lambda path: (
        legacy(tuples(60, KEY))(path),
        path.write_bytes(path.read_bytes() + b"PK\5\6" + bytes(18)),
    ),
    "deep pickle": pickled(b"]" * 30_000 + b"a" * 29_999),
    "old deep pickle": legacy(b"]" * 30_000 + b"a" * 29_999),
    "deep tuple": pickled(b")" + b"\x85" * 100_000),
    "deflated": pickled(b"]" + b"]a" * 20_000_000, deflated=True),
    "deflated text": pickled(b"X" + struct.pack("<L", 150_000_000) + b"a" * 150_000_000, deflated=True),
    "bytearray": pickled(b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R"),
    "no stop": pickled(b"]" * 10),
    "pops": pickled(b"0" * 100),
    "marks": pickled(b"(" * 100_000 + b"t"),
    "memo": pickled(b"]r\xff\xff\xff\x7f"),
    "no memo": pickled(b"h\x07"),
    "a tuple of itself": pickled(b"]q\0h\0\x85a"),
    "fifo": os.mkfifo,
    "link to zeros": linked("/dev/zero"),
    "link to a fifo": linked(root / "fifo"),
    "socket": listening,
}

# -- the index of a torch.distributed.checkpoint directory -----------------------------------------------------------------------------------


def index(**changes):
    properties = TensorProperties(dtype=torch.float32)
    known = {
        "w": TensorStorageMetadata(
            properties, torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
        )
    }
    places = {MetadataIndex("w", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 10)}
    return Metadata(**{"state_dict_metadata": known, "planner_data": {"w": ("w",)}, "storage_data": places, **changes})


def indexed(make):
    def change(path):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(bytes(10))
        (path / ".metadata").write_bytes(make() if callable(make) else pickle.dumps(make))

    return change


BOMB = nested([0], lambda x: [x] * 10, 30)
INDICES = {
    "planner": indexed(index(planner_data={"w": BOMB})),
    "path": indexed(index(planner_data={"w": ("w", BOMB)})),
    "place": indexed(index(storage_data={MetadataIndex("w", torch.Size([0]), 0): _StorageInfo(BOMB, 0, 10)})),
    "name": indexed(lambda: pickle.dumps(index()).replace(b"__0_0.distcp", b"__0_0.distcq")),
    "size": indexed(
        index(state_dict_metadata={"w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), BOMB, [])})
    ),
    "offsets": indexed(
        index(
            state_dict_metadata={
                "w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), BOMB)
            }
        )
    ),
    "huge": indexed(
        index(
            state_dict_metadata={
                "w": TensorStorageMetadata(
                    TensorProperties(dtype=torch.float32),
                    torch.Size([10**15]),
                    [ChunkStorageMetadata(torch.Size([0]), torch.Size([10**15]))],
                )
            }
        )
    ),
    "key": indexed(lambda: b"\x80\x02" + tuples(60, KEY) + b"."),
    "bytes": indexed(index(state_dict_metadata={"w": BytesStorageMetadata()}, planner_data=BOMB)),
    "fifo": lambda path: (path.mkdir(), os.mkfifo(path / ".metadata")),
}

# -- what reports read ----------------------------------------------------------------------------------------------------------------


def run_with(files):
    def change(path):
        path.mkdir()
        for name, data in {"metrics.csv": b"step,loss\n1,2\n", **files}.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            data(path / name) if callable(data) else (path / name).write_bytes(data)

    return change


START = b'{"event": "start", "time": 1, "stage": "fit"}\n'
LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [" % (c, c) + b", ".join([b"*%c" % (c - 1)] * 10) + b"]\n" for c in range(98, 118)
)
MERGES = b"a: &a {k: 1}\n" + b"".join(
    b"%c: &%c {<<: [" % (c, c) + b", ".join([b"*%c" % (c - 1)] * 10) + b"]}\n" for c in range(98, 118)
)
REPORTS = {
    **{
        f"config {name}": run_with({"config.yaml": data})
        for name, data in {
            "aliases": LAUGHS,
            "merges": MERGES,
            "itself": b"a: &a [*a]",
            "deep": b"[" * 2000,
            "deep blocks": b"".join(b" " * i + b"a:\n" for i in range(500)),
            "no text": b"\xff\xfe",
            "object": b"a: !!python/object/apply:os.system ['touch ran']",
            "fifo": os.mkfifo,
            "zeros": linked("/dev/zero"),
            "link to a fifo": linked(root / "fifo"),
            "number": b"a: " + b"9" * 10_000,
            "key": b"? {a: b}\n: c",
            "tab": b"a:\t- b\n\t- c",
            "endless": endless(b"a: "),
            "socket": listening,
            "folder": lambda path: path.mkdir(),
            "time": b"a: 9999-99-99",
        }.items()
    },
    **{
        f"manifest {name}": run_with({"checkpoints/x/manifest.json": data})
        for name, data in {
            "fifo": os.mkfifo,
            "zeros": linked("/dev/zero"),
            "deep": b"[" * 100_000,
            "endless": endless(b"{"),
            "folder": lambda path: path.mkdir(),
            "list": b"[]",
            "socket": listening,
            "numbers": b'{"saved_at": 1e400, "counters": {"step": 1e300}, "score": {"value": -1e400}, "scored_with": ["a"], "files": [1]}',
            "names": b'{"saved_at": "now", "counters": [], "score": 3, "scored_with": "<script>alert(1)</script>", "files": {"weights/": 1}}',
        }.items()
    },
    **{
        f"record {name}": run_with({"report.jsonl": data})
        for name, data in {
            "fifo": os.mkfifo,
            "deep": b"[" * 100_000 + b"\n",
            "no text": b"\xff\n\0\n",
            "endless": endless(START),
            "braces": b"{\n" * (8 << 20),
            "zeros": linked("/dev/zero"),
            "socket": listening,
            "checkpoint": START + b'{"event": "checkpoint", "time": 2, "path": "/dev/zero\\u0000", "step": 1}\n',
            "device": START + b'{"event": "checkpoint", "time": 2, "path": "/dev", "step": 1}\n',
        }.items()
    },
    "csv field": run_with({"metrics.csv": b"step,loss\n1," + b"9" * 200_000 + b"\n"}),
    "csv endless": run_with({"metrics.csv": endless(b"step,loss\n")}),
    "csv nul": run_with({"metrics.csv": b"step,loss\n1,\0\n"}),
    "csv quotes": run_with({"metrics.csv": b'step,loss\n"1,2\n'}),
}

# -- the doors ------------------------------------------------------------------------------------------------------------------------

RAW = (
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    AssertionError,
    MemoryError,
    NameError,
    UnicodeError,
    NotImplementedError,
    EOFError,
    zipfile.BadZipFile,
    struct.error,
    csv.Error,
)


class TooLong(BaseException):
    pass


def stop(*_):
    raise TooLong


signal.signal(signal.SIGALRM, stop)
ran = []
sys.addaudithook(
    lambda event, arguments: ran.append(event) if event in ("os.system", "subprocess.Popen", "os.exec") else None
)
bad, counts = [], {}


def attempt(label, function, path):
    began = time.process_time()
    signal.alarm(20)
    faulthandler.dump_traceback_later(45, exit=True)  # where a loop in C does not see the signal
    try:
        function(path)
        outcome = "taken"
    except RAW as error:
        outcome = "RAW"
        bad.append((label, "".join(traceback.format_exception(error)[-3:])))
    except TooLong:
        outcome = "HANGS"
        bad.append((label, "hangs"))
    except Exception as error:
        outcome = type(error).__name__
        if any(not c.isprintable() and c != "\n" for c in str(error)) or len(str(error)) > 20_000:
            bad.append((label, f"says {str(error)[:300]!r}"))
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    if time.process_time() - began > LIMIT_S:
        bad.append((label, f"takes {time.process_time() - began:.1f} s"))
    counts[outcome] = counts.get(outcome, 0) + 1
    return outcome


def told(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(["checkpoint", *map(str, arguments)])
    if any(not c.isprintable() and c != "\n" for c in out.getvalue()):
        raise AssertionError("control characters reach the terminal")


def torchs_own(path):
    with contextlib.suppress(LookupError):  # torch raises it for what is no pickle
        lightning.utilities._load(path)


def empty():
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()


def unpacked_bytes():
    return sum(path.lstat().st_size for path in (root / "temporary").rglob("*") if not path.is_dir())


place, total = root / "place", 0
DOORS = {
    "archive": (
        ARCHIVES,
        "x.ckpt",
        [
            lambda path: Net.load_from_checkpoint(path),
            lambda path: train(place / "run", path),
            lambda path: told("verify", path),
            lambda path: told("export", path, place / "out"),
            lambda path: Theirs.load_from_checkpoint(path),
        ],
    ),
    "folder": (FOLDERS, "step=00000002", [lambda path: told("pack", path, place / "out.ckpt")]),
    "pickle": (
        PICKLES,
        "x.ckpt",
        [
            lambda path: convert(path, place / "out", trust_pickle=True),
            lambda path: Theirs.load_from_checkpoint(path),
            torchs_own,
        ],
    ),
    "index": (INDICES, "x", [lambda path: convert(path, place / "out", trust_pickle=True)]),
    "report": (
        REPORTS,
        "x",
        [
            lambda path: write_report([path], path / "page.html"),
            lambda path: logged_until(path, 1),
            lambda path: told("list", path),
        ],
    ),
}
chosen = sys.argv[3].split(",")
for kind in chosen:
    cases, name, doors = DOORS[kind]
    for label, make in cases.items():
        empty()
        path = place / name
        if kind == "folder":
            shutil.copytree(BASE, path)
        make(path)
        before = path.lstat().st_size
        for number, door in enumerate(doors):
            shutil.rmtree(place / "out", ignore_errors=True)
            outcome = attempt(f"{kind}, door {number}: {label}", door, path)
            if unpacked_bytes() > before + 1_000_000:
                bad.append((label, f"unpacked {unpacked_bytes()} bytes of {before}"))
            shutil.rmtree(root / "temporary")
            (root / "temporary").mkdir()
            if kind == "folder" and (place / "out.ckpt").exists():
                with zipfile.ZipFile(place / "out.ckpt") as file:
                    if any(b"secret" in file.read(entry) for entry in file.namelist()):
                        bad.append((label, "packed a file from outside"))
            if (root / "outside").exists() or (place / "outside").exists():
                bad.append((label, "wrote outside"))
        total += 1
for label, why in bad:
    print("BAD", label, why, flush=True)
print(total, counts)
assert not bad, len(bad)
assert not ran, ran
assert SECRET.read_text() == "secret"
assert not Path("ran").exists()
print("inputs:", total)
