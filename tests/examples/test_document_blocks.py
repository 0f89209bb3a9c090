"""Every block of every document runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from support.documents import ROOT, Block, blocks_of, documents
from support.ranks import PATIENCE_S, clean_environment, forkserver

RUNNER = documents.__code__.co_filename
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in documents()}
_ELSEWHERE = (".github", "engine/data/sources.md")
"""Documents whose blocks another test runs: those of the recipes over data, each alone."""
BLOCKS = {name: blocks_of(path.read_text()) for name, path in DOCUMENTS.items() if not name.startswith(_ELSEWHERE)}
RUN = [name for name, blocks in BLOCKS.items() if any(block.language != "text" for block in blocks)]
_SLOW_CHAPTERS = ("checkpoint", "config", "launch", "losses", "planning", "strategies")
SLOW = (
    "README.md",
    "callbacks/README.md",
    "examples/README.md",
    *(f"engine/{each}/README.md" for each in _SLOW_CHAPTERS),
)
"""More than 5 s."""


def imported(blocks: list[Block]) -> set[str]:
    """The packages that the Python blocks import."""
    nodes = [node for block in blocks if block.language == "python" for node in ast.walk(ast.parse(block.text))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.split(".")[0] for name in names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    }


def prepared(folder: Path) -> dict[str, str]:
    """Lay out a folder as a checkout's, with a ``fit`` of this interpreter; the environment to run in it."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "fit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m engine.cli.main "$@"\n')
    (programs / "fit").chmod(0o755)
    for name in ("examples", "tests", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    environment = clean_environment(COLUMNS="160")
    return environment | {"PATH": f"{programs}:{Path(sys.executable).parent}:{environment['PATH']}"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUN])
def test_the_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCKS[name]
    written = {Path(block.file).stem for block in blocks if block.file}
    for package in (imported(blocks) - written) | {"sklearn"}:  # which has the images of examples/digits.py
        if package != "examples" and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    work = tmp_path / "work"
    work.mkdir()
    environment = prepared(work)
    order, out, err = (tmp_path / each for each in ("blocks.json", "out", "err"))
    order.write_text(json.dumps({"document": str(DOCUMENTS[name]), "blocks": [asdict(block) for block in blocks]}))
    monkeypatch.chdir(work)
    process = forkserver().fork([RUNNER, str(order)], environment, out, err)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{err.read_text()[-4000:]}"
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.returncode == 0, f"{out.read_text()[-6000:]}\n{err.read_text()[-6000:]}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "AssertionError"),
        ("```bash\ntrue\nfalse\n```\n", "exit status 1"),
        ("```yaml\nmax_epoch: 3\n```\n", "max_epochs"),
    ],
)
def test_a_wrong_block_is_found(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "wrong.md", blocks_of(text))
    monkeypatch.setitem(DOCUMENTS, "wrong.md", tmp_path / "wrong.md")
    with pytest.raises(AssertionError, match=said):
        test_the_blocks_run("wrong.md", tmp_path, monkeypatch)
