"""The test files that execute a module of the library, the most relevant first::

    python tests/tools/tests_of.py engine/loop/setup.py callbacks/pruning.py
    python tests/tools/tests_of.py --write             # run the suite and rewrite the map, tests/tools/tests_of.json
    python tests/tools/tests_of.py --write tests/step  # run these tests only, and add the modules that the map does not know

A number is the test file's share of all that tests execute in the module, in percent: a part of a function that one test file alone executes
belongs to it, a part that four execute is a quarter of each. A file that tests the module comes before the many that only pass through.
An import executes nothing in this sense. The processes that a test starts count; the slow tests are not in the map. The library has to be installed
(``pip install -e .``). Some tests of ``torch.compile`` fail in such a run, since dynamo traces the notes too; the map does not mind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = Path(__file__).with_suffix(".json")
PLUGIN = Path(__file__).with_name("executed")
LONGEST = 10
"""Test files that the map keeps for a module."""

Shares = dict[str, dict[str, float]]
"""For each module the shares of test files (percent), the largest first."""


def shares(executed: Mapping[str, set[int]], numbers: Mapping[str, range]) -> Shares:
    """The map.

    Args:
        executed: the parts of functions that each test file has executed.
        numbers: the parts of each module.
    """
    files_of_part = Counter(part for parts in executed.values() for part in parts)
    result: Shares = {}
    for module, parts in numbers.items():
        total = sum(part in files_of_part for part in parts)
        of_files = {
            file: 100 / total * sum(1 / files_of_part[part] for part in parts if part in own)
            for file, own in executed.items()
            if any(part in own for part in parts)
        }
        best = sorted(of_files.items(), key=lambda item: (-item[1], item[0]))[:LONGEST]
        result[module] = {file: round(share, 1) for file, share in best}
    return result


def measure(test_files: Iterable[str], workers: int) -> Shares:
    """Run tests, and note what they execute."""
    sys.path.insert(0, str(PLUGIN))
    import marked

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        numbers = marked.write(ROOT, folder)
        path = os.pathsep.join([str(PLUGIN), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = os.environ | {"PYTHONPATH": path, "EXECUTED_FOLDER": place}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "executed_plugin",
            "--ignore=tests/house",
            f"-n{workers}",
            "--dist=loadfile",
        ]
        ran = subprocess.run([*command, *test_files], cwd=ROOT, env=variables, check=False)
        if ran.returncode > 1:  # 1: some tests have failed, for which the map is right up to there
            sys.exit(f"pytest has ended with {ran.returncode}: {MAP.name} is not written")
        executed: dict[str, set[int]] = defaultdict(set)
        for lines in folder.glob("*.executed"):
            for line in lines.read_text().splitlines():
                file, parts = json.loads(line)
                executed[file].update(parts)
    return shares(executed, numbers)


def text_of(found: Shares) -> str:
    """The map as JSON, a line for each module."""
    lines = (f"{json.dumps(module)}: {json.dumps(files)}" for module, files in sorted(found.items()) if files)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def with_new_modules(found: Shares, measured: Shares, root: Path = ROOT) -> Shares:
    """The map with the ``measured`` shares of modules that it does not know, or knows only by test files that are gone."""
    known = {module for module, files in found.items() if any((root / file).exists() for file in files)}
    return found | {module: files for module, files in measured.items() if files and module not in known}


def answer(module: str, found: Shares, root: Path = ROOT) -> tuple[str, bool]:
    """What the tool prints for a module (a path or a dotted name), and whether it knows a test. The module may be new, moved or gone."""
    path = Path(os.path.abspath(module if os.path.exists(module) else root / module))
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else module
    if not name.endswith(".py"):
        name = name.replace(".", "/") + ".py"
    files = {file: share for file, share in found.get(name, {}).items() if (root / file).exists()}
    if files:
        return "\n".join(f"{file:<60} {share:5.1f} %" for file, share in files.items()), True
    is_there = (root / name).exists()
    state = (
        "is executed by no test in the map (tests/tools/tests_of.json)"
        if is_there
        else "is not a file of this checkout"
    )
    folder = Path("tests", *Path(name).parts[1 if name.startswith("engine/") else 0 : -1])
    hints = [f"the tests of its folder: python -m pytest {folder}"] * (root / folder).is_dir()
    hints += ["rewrite the map: python tests/tools/tests_of.py --write"]
    return f"{name} {state}; {', or '.join(hints)}", False


def main() -> int:
    """Answer, or write the map.

    Returns:
        1 if no test is known for a module.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="modules; with --write tests, for modules that the map does not know (all)",
    )
    parser.add_argument("--write", action="store_true", help="run the tests and write the map")
    parser.add_argument("--map", type=Path, default=MAP, help="the map (tests/tools/tests_of.json)")
    parser.add_argument("-n", type=int, default=3, dest="workers", help="with --write: workers of pytest (3)")
    options = parser.parse_args()
    if options.write:
        begun = time.monotonic()
        found = measure(options.paths, options.workers)
        if options.paths and options.map.exists():
            found = with_new_modules(json.loads(options.map.read_text()), found)
        options.map.write_text(text_of(found))
        print(
            f"{options.map}: {sum(map(bool, found.values()))} modules, in {(time.monotonic() - begun) / 60:.0f} minutes"
        )
        return 0
    if not options.paths:
        parser.error("name a module, as engine/loop/setup.py")
    found = json.loads(options.map.read_text())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for ``| head``
    answers = [answer(path, found) for path in options.paths]
    for path, (text, _) in zip(options.paths, answers, strict=True):
        print(f"{path}:\n{text}" if len(answers) > 1 else text)
    return int(not all(is_known for _, is_known in answers))


if __name__ == "__main__":
    sys.exit(main())
