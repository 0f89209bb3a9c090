"""Every link of every document leads somewhere, and a command that is only shown has options that its parser takes."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch.utils.data
from support.documents import (
    LANGUAGES,
    ROOT,
    Block,
    anchors,
    blocks_of,
    documents,
    prose,
    sentences,
    wrong_links,
    wrong_rows,
)

import callbacks
import engine
import engine.huggingface
from engine.cli.main import COMMANDS

DOCUMENTS = {str(path.relative_to(ROOT)): path for path in documents()}
BLOCKS = {name: blocks_of(path.read_text()) for name, path in DOCUMENTS.items() if not name.startswith(".github")}


def commands(block: Block) -> list[str]:
    """The lines of a block, with those that a backslash continues in one."""
    return block.text.replace("\\\n", " ").splitlines()


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
                try:
                    COMMANDS[words[1]].parser().parse_args(words[2:])
                except SystemExit:
                    pytest.fail(f"{name}:{block.line}: {line}")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_links_lead_somewhere(name: str) -> None:
    assert wrong_links(DOCUMENTS[name], DOCUMENTS[name].read_text()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_rows_of_a_table_have_the_same_cells(name: str) -> None:
    assert wrong_rows(DOCUMENTS[name].read_text()) == []
    assert wrong_rows("| a | b |\n|---|---|\n| 1 | `x \\| y` |\n| 1 | 2 | 3 |\n") == ["| 1 | 2 | 3 |"]


def test_the_life_of_a_step_names_what_is_there() -> None:
    """Files of ``engine``, and functions, classes and methods that stand in one of them."""
    page = DOCUMENTS["engine/README.md"].read_text().partition("## The life of a step")[2].partition("\n## ")[0]
    code = re.findall(r"`([\w./]+)`", page)
    code = [name for name in code if not name.endswith(".yaml")]
    files = [name for name in code if name.endswith(".py")]
    assert len(files) > 30
    assert [name for name in files if not any((ROOT / each / name).is_file() for each in ("engine", "."))] == []
    declared: dict[str, list[str]] = {}
    for path in (ROOT / "engine").rglob("*.py"):
        text = path.read_text()
        for name in set(re.findall(r"\b(?:def|class) (\w+)", text)) | set(re.findall(r"\b(\w+)(?: =|: )", text)):
            declared.setdefault(name, []).append(text)
    names = {name for name in code if re.fullmatch(r"[A-Z]\w+[a-z]\w+(\.\w+)?|[a-z]+(_[a-z]+)+", name)}
    assert len(names) > 40
    unknown = []
    for name in names:
        owner, _, method = name.partition(".")
        if not any(not method or f"def {method}(" in text for text in declared.get(owner, ())):
            unknown.append(name)
    assert unknown == []


def unknown_names(cell: str) -> list[str]:
    """Public names, arguments of ``Fit`` and commands in a cell of a table that are not there."""
    unknown = []
    for code in re.findall(r"`([^`]+)`", cell):
        command = re.fullmatch(r"fit (\w+)( \w+)?", code)
        settings = re.match(r"Fit\(([^)]*)\)", code)
        if command:
            right = command[1] in COMMANDS
        elif settings:
            arguments = re.findall(r"(\w+)=", settings[1])
            right = set(arguments) <= set(inspect.signature(engine.Fit).parameters)
        else:
            owner, _, member = code.partition(".")
            places = (engine, callbacks, engine.huggingface, torch.utils.data)
            found = [getattr(place, owner) for place in places if hasattr(place, owner)]
            right = bool(found) and (not member or hasattr(found[0], member))
        unknown += [] if right else [code]
    return unknown


def test_the_index_for_those_who_come_from_elsewhere_names_what_is_here() -> None:
    rows = [line.split(" | ") for line in (ROOT / "engine/compat/where_is.md").read_text().splitlines() if "|" in line]
    assert [name for row in rows[2:] for name in unknown_names(row[-1])] == []
    assert len(rows) > 30
    assert unknown_names("`Fit(epochs=)`, `Engine.nothing`, `fit nothing`, `Fit().run(x)`") == [
        *("Fit(epochs=)", "Engine.nothing", "fit nothing"),
    ]


def test_figures_of_examples_are_those_of_their_page() -> None:
    """How long an example takes, and what it ends with, stands in one place."""
    page = (ROOT / "examples" / "README.md").read_text()
    rows = {match[1]: match[0] for match in re.finditer(r"^\| \[(\w+\.py)\].*$", page, re.MULTILINE)}
    for path in sorted((ROOT / "examples").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert not re.search(r"\b(minutes?|seconds?|\d+ s)\b", about), path.name
        for percent in re.findall(r"(\d+) ?%", about):
            assert any(round(float(figure)) == int(percent) for figure in re.findall(r"([\d.]+)%", rows[path.name])), (
                path.name
            )


def test_sentences_are_short() -> None:
    """The list of changes is not read as prose."""
    counts: dict[str, int] = {}
    for name, path in DOCUMENTS.items():
        if path.name != "CHANGELOG.md":
            counts |= {f"{name}: {text}": len(text.split()) for text in sentences(path.read_text())}
    assert [text for text, words in counts.items() if words > 40] == []
    assert sum(words > 35 for words in counts.values()) < 30


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


def test_a_sentence_ends_where_an_item_a_cell_or_a_paragraph_does() -> None:
    text = "One `two. three` four. ![Six](x.svg) Five\nsix?\n\n- seven [eight nine](x.md)\n  ten\n- eleven\n\n| a b | `c \\| d` |\n\n## A head\n"
    whole = ["One CODE four.", "Five six?", "seven eight nine ten", "eleven", "a b", "CODE"]
    assert list(sentences(text)) == whole


def test_a_document_is_read_as_it_stands(tmp_path: Path) -> None:
    named, rust = Block("python", 5, "# net.py\nx = 1\n", "net.py"), Block("rust", 10, "fn\n")
    assert blocks_of(SAMPLE) == [named, rust, Block("text", 16, "[seven](shown.md)\n")]
    assert anchors(SAMPLE) == {"a-head-with-code"}
    path = tmp_path / "x.md"
    path.write_text(SAMPLE)
    assert wrong_links(path, SAMPLE) == ["#nothing", "nowhere.md", "none.png", "gone.md"]
    with pytest.raises(ValueError, match="line 2 has no end"):
        blocks_of("text\n```python\n")
