"""Which files are read, under which names, and what is said of those that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.compat.migrate.sources import read


def test_names_are_those_of_imports(tmp_path: Path) -> None:
    for name in (
        "repo/src/pkg/__init__.py",
        "repo/src/pkg/sub/mod.py",
        "repo/src/pkg/sub/__init__.py",
        "repo/scripts/train.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    sources, unread = read([tmp_path / "repo"])
    assert {each.module: each.is_package for each in sources} == {
        "pkg": True,
        "pkg.sub": True,
        "pkg.sub.mod": False,
        "scripts.train": False,
    }
    assert unread == []
    # a part of a package has its whole name, and a file that is named twice is read once
    sources, _ = read([tmp_path / "repo/src/pkg/sub", tmp_path / "repo/src/pkg/sub/mod.py"])
    assert sorted(each.module for each in sources) == ["pkg.sub", "pkg.sub.mod"]


def test_what_is_left_out(tmp_path: Path) -> None:
    for name in (
        ".git/a.py",
        "__pycache__/b.py",
        "venv/pyvenv.cfg",
        "venv/c.py",
        "tests/d.py",
        "e_test.py",
        "f.py",
        "g.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [each.path.name for each in read([tmp_path], ["tests", "*_test.py"])[0]] == ["f.py"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nclass:\n")
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xff'\n")
    (tmp_path / "null.py").write_bytes(b"x\0")
    (tmp_path / "warned.py").write_text("x = '\\d'\n")
    (tmp_path / "no.ipynb").write_text("{}")
    (tmp_path / "cut.ipynb").write_text('{"cells": [')
    sources, unread = read([tmp_path])
    assert sorted(each.path.name for each in sources) == ["latin.py", "warned.py"]
    found = {each.path.name: (each.line, each.message) for each in unread}
    assert sorted(found) == ["bad.py", "bytes.py", "cut.ipynb", "no.ipynb", "null.py"]
    assert found["bad.py"] == (2, "not valid Python: invalid syntax")
    assert "no list of cells" in found["no.ipynb"][1]


def test_a_notebook(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install lightning\n", "import lightning as L"]},
        {"cell_type": "code", "source": ["%%bash\n", "ls"]},
        {"cell_type": "code", "source": ["class:"]},
        {
            "cell_type": "code",
            "source": "files = !ls\nif files:\n    %time x = 1\nL.Trainer?\nawait f()\ntrainer = L.Trainer()",
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (source,), unread = read([tmp_path / "a.ipynb"])
    assert [each.message for each in unread] == ["cell 4: not valid Python: invalid syntax"]
    places = [source.cell_and_line(each.lineno) for each in source.tree.body]
    assert places == [(2, 1), (2, 2), (2, 3), (5, 1), (5, 2), (5, 4), (5, 5), (5, 6)]


def test_a_malformed_cell_costs_itself_alone(tmp_path: Path) -> None:
    good = {"cell_type": "code", "source": ["import lightning\r\n", "x = 'one\u2028line\x0c'\n", "y = 1"]}
    odd = [
        3,
        None,
        [],
        "x",
        *({"cell_type": "code", "source": value} for value in (5, [1], None, {"a": 1}, "-" * 20_000 + "1", "\ud800")),
    ]
    silent = [{"cell_type": ["x"], "source": 7}, {"cell_type": "markdown", "source": 7}, {"cell_type": "code"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [good, *odd, *silent, good]}))
    (source,), unread = read([tmp_path / "a.ipynb"])
    assert [each.message.split(":")[0] for each in unread] == [f"cell {number}" for number in range(2, 12)]
    assert "cell 2: ValueError: it is of type int, not a mapping" in unread[0].message
    assert "cell 6: ValueError: its source is not text" in unread[4].message
    numbers = [source.cell_and_line(statement.lineno) for statement in source.tree.body]
    assert [numbers[0], numbers[-1]] == [(1, 1), (15, 3)]  # lines as an editor counts them


def test_files_that_no_parser_takes(tmp_path: Path) -> None:
    (tmp_path / "deep.ipynb").write_text("[" * 100_000)
    (tmp_path / "deep2.ipynb").write_text('{"cells": [' + '{"a":' * 50_000)
    (tmp_path / "list.ipynb").write_text("[1, 2]")
    (tmp_path / "mapping.ipynb").write_text('{"cells": {"0": 1}}')
    (tmp_path / "coding.py").write_bytes(b"# -*- coding: nonsense -*-\n")
    (tmp_path / "bytes.py").write_bytes(b"# -*- coding: hex -*-\n00")  # a codec, but not one of text
    with (tmp_path / "huge.py").open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(tmp_path / "fifo.py")
    sources, unread = read([tmp_path, tmp_path / "fifo.py"])  # in a folder it is passed by
    assert (sources, len(unread)) == ([], 8)
    assert unread[-1].message == "ValueError: not a regular file"


def test_files_whose_reading_would_wait(tmp_path: Path) -> None:
    """A link to the kernel's messages counts as a regular file."""
    (tmp_path / "waits.py").symlink_to("/proc/kmsg")
    code = f"from pathlib import Path\nfrom engine.compat.migrate.sources import read\nprint(len(read([Path({str(tmp_path)!r})])[1]))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "1\n"


def test_empty_lines_of_a_notebook_take_no_time(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "\n" * 50_000 + "x = 1\n%time\n"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    began = time.process_time()
    assert [len(found) for found in read([tmp_path])] == [1, 0]
    assert time.process_time() - began < 10  # 0.1 s; 60 s where the time grew with its square


def test_what_would_take_more_than_a_gigabyte_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("a;" * (600 << 10))
    cell = {"cell_type": "code", "source": f"{'a' * (600 << 10)}\n"}
    (tmp_path / "code.ipynb").write_text(json.dumps({"cells": [cell, cell, {**cell, "source": "a"}]}))
    with (tmp_path / "pictures.ipynb").open("wb") as file:
        file.truncate((32 << 20) + 1)
    sources, unread = read([tmp_path])
    assert [each.path.name for each in sources] == ["code.ipynb"]
    assert [(each.path.name, each.message) for each in unread] == [
        (
            "code.ipynb",
            "cell 2: ValueError: more than 1 MiB of code: its syntax tree can take more than 1 GB of memory",
        ),
        (
            "code.ipynb",
            "cell 3: ValueError: more than 1 MiB of code: its syntax tree can take more than 1 GB of memory",
        ),
        ("large.py", "ValueError: larger than 1 MiB: its syntax tree can take more than 1 GB of memory"),
        ("pictures.ipynb", "ValueError: larger than 32 MiB: its JSON can take more than 1 GB of memory"),
    ]


def test_folders_of_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line of folders has paths that are longer than the system takes."""
    try:
        for name, depth in (("d", 1200), ("x" * 200, 30)):
            monkeypatch.chdir(tmp_path)
            for _ in range(depth):
                os.mkdir(name)
                os.chdir(name)
            Path("a.py").write_text("")
        sources, unread = read([tmp_path])
    finally:
        monkeypatch.chdir(tmp_path)
        subprocess.run(["rm", "-rf", "d", "x" * 200], check=True)  # Python's own removal is recursive
    assert [each.module for each in sources] == ["d." * 1200 + "a"]
    assert [each.message.partition("/")[0] for each in unread] == ["OSError: [Errno 36] File name too long: '"]


def test_a_lack_of_memory_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = " + "not " * 20_000 + "1")
    (unread,) = read([tmp_path])[1]
    assert unread.message in (
        "MemoryError: an expression is nested too deeply, or memory is short",
        "not valid Python: too many nested parentheses",  # later versions of Python
    ) or unread.message.startswith("RecursionError: ")


def test_places_in_a_notebook_take_time_that_grows_with_its_cells(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "x = 1"}] * 10_000
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    ((source,), _) = read([tmp_path])
    began = time.process_time()
    assert [source.cell_and_line(line) for line in range(1, 10_001)] == [(number, 1) for number in range(1, 10_001)]
    assert len({source for _ in range(10_000)}) == 1
    assert time.process_time() - began < 1  # 0.02 s; 9 s where each place and each hash walked over all cells
