"""Every block of every document runs, every link leads somewhere, and a command that is only shown has options that its parser takes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from documents import LANGUAGES, ROOT, Block, anchors, blocks_of, documents, prose, wrong_links, wrong_rows
from processes import PATIENCE_S, clean_environment, nursery
from test_layers import LAYERS

from engine.cli.main import COMMANDS

RUNNER = Path(__file__).with_name("document_runner.py")
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in documents()}
BLOCKS = {name: blocks_of(path.read_text()) for name, path in DOCUMENTS.items() if not name.startswith(".github")}
RUN = [name for name, blocks in BLOCKS.items() if any(block.language != "text" for block in blocks)]
_SLOW_CHAPTERS = ("checkpoint", "config", "launch", "strategies")
SLOW = (
    "README.md",
    "callbacks/README.md",
    "examples/README.md",
    *(f"engine/{each}/README.md" for each in _SLOW_CHAPTERS),
)
"""More than 5 s."""


def commands(block: Block) -> list[str]:
    """The lines of a block, with those that a backslash continues in one."""
    return block.text.replace("\\\n", " ").splitlines()


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
    process = nursery().fork([str(RUNNER), str(order)], environment, out, err)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{err.read_text()[-4000:]}"
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.returncode == 0, f"{out.read_text()[-6000:]}\n{err.read_text()[-6000:]}"


@pytest.mark.parametrize("name", BLOCKS)
def test_the_languages_are_known(name: str) -> None:
    unknown = [f"{name}:{block.line}: {block.language!r}" for block in BLOCKS[name] if block.language not in LANGUAGES]
    assert not unknown, f"{unknown}; known: {LANGUAGES}"
    hidden = [line for line in prose(DOCUMENTS[name].read_text()) if "```" in line or "~~~" in line]
    assert not hidden, f"a block starts on a line of its own: {hidden}"


@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_document_writes_to_a_file_is_used_after_it(name: str) -> None:
    blocks = BLOCKS[name]
    for number, block in enumerate(blocks):
        if block.file:
            after = "\n".join(each.text for each in blocks[number + 1 :] if each.language != "text")
            used = Path(block.file).stem in after or block.language == "yaml"
            assert used, f"{name}:{block.line}: nothing runs {block.file}"


@pytest.mark.parametrize("name", BLOCKS)
def test_the_commands_that_are_shown_have_these_options(name: str) -> None:
    for block in BLOCKS[name]:
        for line in commands(block) if block.language == "text" else ():
            words = shlex.split(line, comments=True) if line.startswith("fit ") else []
            if len(words) > 1 and words[1] in COMMANDS:
                make = importlib.import_module(COMMANDS[words[1]][0].partition(":")[0]).parser
                try:
                    (make(words[1]) if inspect.signature(make).parameters else make()).parse_args(words[2:])
                except SystemExit:
                    pytest.fail(f"{name}:{block.line}: {line}")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_links_lead_somewhere(name: str) -> None:
    assert wrong_links(DOCUMENTS[name], DOCUMENTS[name].read_text()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_rows_of_a_table_have_the_same_cells(name: str) -> None:
    assert wrong_rows(DOCUMENTS[name].read_text()) == []
    assert wrong_rows("| a | b |\n|---|---|\n| 1 | `x \\| y` |\n| 1 | 2 | 3 |\n") == ["| 1 | 2 | 3 |"]


def test_the_table_of_folders_is_the_table_of_layers() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENTS["engine/README.md"].read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (number, name) for number, names in enumerate(LAYERS) for name in names
    ]


def test_the_landing_page_is_short() -> None:
    assert DOCUMENTS["README.md"].read_text().count("\n") <= 150


SAMPLE = """\
# A head, with `code`

- an item:

  ```python
  # net.py
  x = 1
  ```

```rust
fn
```

[one](#a-head-with-code), [two](#nothing), [three](nowhere.md "title"), [four](https://example.com), `[five](no.md)`, ![six](none.png)

~~~text
[seven](shown.md)
~~~

[eight]: gone.md
"""


def test_a_document_is_read_as_it_stands(tmp_path: Path) -> None:
    named, rust = Block("python", 5, "# net.py\nx = 1\n", "net.py"), Block("rust", 10, "fn\n")
    assert blocks_of(SAMPLE) == [named, rust, Block("text", 16, "[seven](shown.md)\n")]
    assert anchors(SAMPLE) == {"a-head-with-code"}
    path = tmp_path / "x.md"
    path.write_text(SAMPLE)
    assert wrong_links(path, SAMPLE) == ["#nothing", "nowhere.md", "none.png", "gone.md"]
    with pytest.raises(ValueError, match="line 2 has no end"):
        blocks_of("text\n```python\n")


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
