"""The simulated accelerator finds what it is for, counts, and leaves correct programs alone."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import build_device
import pytest
from scenario import play, scenarios
from support.ranks import clean_environment, forkserver, run_ranks


@scenarios("tool")
def test_the_device(scenario: str) -> None:
    play("tool", scenario)


@scenarios("collectives")
def test_the_process_group(scenario: str) -> None:
    play("collectives", scenario, world_size=2)


_COMPILER = """#!{python}
import pathlib, sys, time
place = pathlib.Path({place!r})
if "--version" in sys.argv:
    sys.exit(print((place / "version").read_text()))
(place / "calls").open("a").write("x")
while not (place / "go").exists():
    time.sleep(0.01)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("built")
"""

_BUILD = """
import os, sys
os.environ["CXX"], os.environ["XDG_CACHE_HOME"], folder = sys.argv[1:]
sys.path.insert(0, folder)
import build_device
report(str(build_device.library()))
"""


class _Compiler:
    """A script in the compiler's place, which counts its calls and ends when it may: the real one takes a minute."""

    def __init__(self, place: Path) -> None:
        self.place, self.path = place, place / "g++"
        self.path.write_text(_COMPILER.format(python=sys.executable, place=str(place)))
        self.path.chmod(0o755)
        self.version("1")

    def version(self, text: str) -> None:
        (self.place / "version").write_text(text)

    def let_go(self) -> None:
        (self.place / "go").touch()

    @property
    def calls(self) -> int:
        return len((self.place / "calls").read_text()) if (self.place / "calls").exists() else 0

    def build(self, processes: int) -> list[str]:
        """What so many processes get at the same time."""
        args = (self.path, self.place / "cache", Path(build_device.__file__).parent)
        return [ran.value for ran in run_ranks(_BUILD, processes, *args)]


def test_the_first_of_several_processes_builds_for_all(tmp_path: Path) -> None:
    compiler = _Compiler(tmp_path)
    compiler.let_go()
    (path,) = set(compiler.build(3))
    assert Path(path).read_text() == "built"
    assert compiler.calls == 1
    assert compiler.build(1) == [path]
    assert compiler.calls == 1
    compiler.version("2")
    assert compiler.build(1) != [path]
    assert compiler.calls == 2


def test_a_killed_build_stops_nobody(tmp_path: Path) -> None:
    compiler = _Compiler(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(_BUILD.replace("report", "print"))
    args = [str(script), str(compiler.path), str(tmp_path / "cache"), str(Path(build_device.__file__).parent)]
    killed = forkserver().fork(args, clean_environment(), tmp_path / "out", tmp_path / "err")
    while not compiler.calls:
        assert killed.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    (tmp_path / "calls").unlink()  # its compiler still runs, and will write into a folder that nobody reads
    compiler.let_go()
    assert Path(compiler.build(1)[0]).read_text() == "built"
    assert compiler.calls == 1


def test_a_machine_without_a_compiler_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "g++ (or CXX), which is not installed" in str(build_device.missing())
