"""Plugin of pytest for ``tests_of.py --write``: writes down what each test file has executed, in all of its processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sitecustomize


class Executed:
    """Collects the marks of one worker, test file by test file."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.root, self.test_file = root, ""
        self.lines = folder / f"{os.getpid()}.executed"
        shared = folder / f"{os.getpid()}.marks"
        shared.write_bytes((folder / ".empty").read_bytes())
        os.environ[sitecustomize.FILE] = str(shared)
        self.marks = sitecustomize.share(str(shared))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        test_file = nodeid.partition("::")[0]
        if test_file != self.test_file:
            self.collect()
            self.test_file = test_file

    def pytest_sessionfinish(self) -> None:
        self.collect()

    def collect(self) -> None:
        """Write down the marks of the test file that has ended, and remove them. Those from before the first one are nobody's."""
        marks = self.marks[:]
        self.marks[:] = bytes(len(marks))
        executed = [number for number, mark in enumerate(marks) if mark]
        if self.test_file and executed:
            with self.lines.open("a") as file:
                file.write(json.dumps([self.test_file, executed]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Executed(Path(os.environ[sitecustomize.FOLDER]), config.rootpath))
