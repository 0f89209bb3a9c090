"""What a release contains, and how it is published."""

from __future__ import annotations

import configparser
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PACKAGES = ("engine", "callbacks")


def build(copy: Path, *commands: str) -> None:
    epoch = {"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": "1700000000", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *commands]
    subprocess.run(command, cwd=copy, check=True, env=epoch, capture_output=True)


def copy_of_the_tree(copy: Path) -> set[str]:
    """Copy what a release is built from; return the names of the packages' own files."""
    for name in ("setup.py", "setup.cfg", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    for name in (*PACKAGES, "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "tests").mkdir()
    for path in (ROOT / "tests").glob("test_*.py"):
        shutil.copy(path, copy / "tests" / path.name)
    return {str(path.relative_to(copy)) for name in PACKAGES for path in (copy / name).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A copy in which an earlier build has left a module that was deleted since; both archives are built in it."""
    copy = tmp_path_factory.mktemp("copy")
    files = copy_of_the_tree(copy)
    stale = copy / "build" / "lib" / "engine" / "deleted.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("raise SystemExit('an old version')\n")
    build(copy, "sdist", "bdist_wheel")
    return copy, files


def test_a_wheel_has_the_packages_files_and_no_others(built: tuple[Path, set[str]]) -> None:
    copy, files = built
    (wheel,) = (copy / "dist").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files


def test_an_sdist_has_no_tests_and_builds_the_same_wheel(built: tuple[Path, set[str]], tmp_path: Path) -> None:
    copy, files = built
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    subprocess.run(["tar", "-xf", sdist, "-C", tmp_path], check=True)  # tarfile has its filters from Python 3.11.4 on
    assert not [name for name in names if name.startswith("tests")]
    assert files <= names
    (source,) = tmp_path.iterdir()
    build(source, "bdist_wheel")
    (first,), (second,) = ((place / "dist").glob("*.whl") for place in (copy, source))
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (first, second)]
    assert digests[0] == digests[1]


def test_the_lower_ends_that_a_job_installs_are_those_of_the_ranges() -> None:
    ranges = configparser.ConfigParser(interpolation=None)
    ranges.read(ROOT / "setup.cfg")
    required = ranges["options"]["install_requires"].split("\n")
    least = {re.split(r"[\[>]", line)[0]: re.search(r">=([\d.]+)", line) for line in required if line}
    pinned = dict(line.split("==") for line in (ROOT / ".ci" / "lowest.txt").read_text().splitlines() if line[0] != "#")
    assert set(pinned) - set(least) == {"pyarrow"}, "only of the tests"
    assert set(least) - set(pinned) == {"safetensors"}
    for name in set(pinned) & set(least):
        bound = least[name]
        assert bound is not None
        assert (pinned[name] + ".").startswith(bound[1] + "."), name


def test_the_torch_versions_between_the_lowest_and_the_newest_run_every_week() -> None:
    lowest, above = map(int, re.findall(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "setup.cfg").read_text())[0])
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    assert "schedule" in weekly[True]  # YAML 1.1 reads the key "on" as a truth value
    job = weekly["jobs"]["torch"]
    assert job["strategy"]["matrix"]["torch"] == [f"2.{minor}.0" for minor in range(lowest + 1, above - 1)]
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    script, version = command.removeprefix("python ").split(maxsplit=1)
    assert (ROOT / script).is_file()
    assert version == '"${{ matrix.torch }}"'


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash(path: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text())
    others = [(name, comment) for name, comment in uses if not name.startswith("./")]
    assert others
    for name, comment in others:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name), name
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), name


def test_only_the_upload_may_sign() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    writing = [name for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()]
    assert writing == ["publish"]
    publish = workflow["jobs"]["publish"]
    assert publish["environment"] == "pypi"
    assert set(publish["needs"]) == {"checks", "build"}
    assert publish["if"] == "github.event_name == 'release'"
    assert not [step for step in publish["steps"] if "run" in step]  # what it signs was built without its rights
    assert "secrets" not in str(workflow)
    assert {"run": "twine check --strict dist/*"} in steps(workflow)
