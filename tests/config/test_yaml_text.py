"""Files of settings that may be anybody's: nothing in them is run, and every error names the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.internals import resolved_settings
from support.ranks import run_script

from engine.config import yaml_text
from engine.config.yaml_text import flow

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "!!python/object/apply:os.system ['touch pwned']",
    "!!python/object/new:subprocess.Popen [['touch', 'pwned']]",
    "!!python/name:os.system",
    "!!python/module:pwned",
    "{a: [!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['pwned']]]}",
    "!local x",
)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("setting", ["seed", "strategy", "precision", "compile", "root_dir"])
@pytest.mark.parametrize("text", HOSTILE)
def test_objects_are_refused_wherever_yaml_is_read(in_tmp: Path, setting: str, text: str) -> None:
    (in_tmp / "hostile.yaml").write_text(f"max_steps: 1\n{setting}: {text}\n")
    with pytest.raises(ValueError, match=r"file hostile.yaml:2: the tag .* is refused"):
        resolved_settings({}, {}, Path("hostile.yaml"))
    with pytest.raises(ValueError, match=rf"environment FIT_{setting.upper()}: the tag .* is refused"):
        resolved_settings({}, {f"FIT_{setting.upper()}": text})
    with pytest.raises(ValueError, match=rf"command line {setting}=.*: the tag .* is refused"):
        resolved_settings({}, {}, None, [f"{setting}={text}"])
    assert [path.name for path in in_tmp.iterdir()] == ["hostile.yaml"]


@pytest.mark.parametrize("section", ["model", "data"])
def test_sections_of_fit_run_are_read_alike(in_tmp: Path, section: str) -> None:
    Path("hostile.yaml").write_text(f"{section}:\n  x: {HOSTILE[0]}\n")
    with pytest.raises(ValueError, match=r"hostile.yaml:2: the tag"):
        resolved_settings({}, {}, Path("hostile.yaml"), (), ("model", "data", "callbacks"))


@pytest.mark.parametrize(
    "command", [["env"], ["config", "--check", "fit.yaml"], ["run", "os:getcwd"], ["launch", "script.py"]]
)
def test_no_command_runs_what_a_file_names(in_tmp: Path, command: list[str]) -> None:
    Path("fit.yaml").write_text(f"max_steps: 1\nseed: {HOSTILE[0]}\n")
    Path("script.py").write_text("open('pwned', 'w')")
    code = "import sys; from engine.cli.main import main; sys.exit(main())"
    done = run_script(code, *command, check=False, forked=True)
    assert done.returncode != 0
    assert "fit.yaml:2: the tag '!!python/object/apply:os.system' is refused" in done.stdout + done.stderr
    assert not Path("pwned").exists()


def bomb() -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for one, two in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{two}: &{two} [{', '.join([f'*{one}'] * 9)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(), r"a.yaml:\d: has more than 20,000 values with aliases expanded"),
        ("compile: &x\n  options: *x", r"a.yaml:1: an alias is inside the value that it refers to"),
        ("compile: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("compile: {mode: a, mode: b}", r"a.yaml:1: 'mode' was given already in file a.yaml:1"),
        ("strategy:\n  name: ddp\n  config:\n    x: 1\n    x: 2", r"a.yaml:5: 'x' was given already in file a.yaml:4"),
        ("? [a]\n: 1", r"a.yaml:1: a sequence as a key"),
        ("seed: 1\nmax_steps: 'x", r"a.yaml:2: is not valid YAML"),
        ("seed: 1\n\tmax_steps: 2", r"a.yaml:2: is not valid YAML"),
        ("seed: 1\n---\nseed: 2", r"a.yaml:2: is not valid YAML"),
        ("seed: *nothing", r"a.yaml:1: is not valid YAML"),
        ("seed: !!int abc", r"a.yaml:1: seed cannot be read"),
        ("seed: " + "9" * 5000, r"a.yaml:1: seed cannot be read"),
        ("<<: 3\nseed: 1", r"a.yaml:1: '<<' merges mappings"),
        ("3", "has a scalar"),
    ],
)
def test_the_place_of_what_is_wrong(in_tmp: Path, text: str, message: str) -> None:
    Path("a.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        resolved_settings({}, {}, Path("a.yaml"))


def test_the_place_of_a_section(in_tmp: Path) -> None:
    Path("a.yaml").write_text("seed: 1\nmodel: !!int abc\n")
    with pytest.raises(ValueError, match=r"a.yaml:2: model cannot be read"):
        resolved_settings({}, {}, Path("a.yaml"), sections=("model",))


def test_files_that_are_none(in_tmp: Path) -> None:
    Path("latin.yaml").write_bytes("seed: 1\nroot_dir: caf\xe9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"file latin.yaml:2: is not UTF-8 \(byte 0xe9\)"):
        resolved_settings({}, {}, Path("latin.yaml"))
    Path("huge.yaml").write_text("# " + "x" * yaml_text.MAX_BYTES)
    with pytest.raises(ValueError, match=r"file huge.yaml: has more than 1,000,000 bytes"):
        resolved_settings({}, {}, Path("huge.yaml"))
    Path("fit.yaml").mkdir()
    with pytest.raises(ValueError, match=r"file fit.yaml: is a directory"):
        resolved_settings({}, {})
    assert resolved_settings({}, {"FIT_CONFIG": os.devnull}).origins["seed"] == "default"
    os.mkfifo("pipe.yaml")
    for endless in ("pipe.yaml", "/dev/zero"):
        with pytest.raises(ValueError, match="is not a regular file"):
            resolved_settings({}, {"FIT_CONFIG": endless})


def test_a_mark_of_byte_order_is_no_content(in_tmp: Path) -> None:
    Path("a.yaml").write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert resolved_settings({}, {}, Path("a.yaml")).settings.seed == 1


def test_anchors_and_merges(in_tmp: Path) -> None:
    Path("a.yaml").write_text(
        "strategy:\n  <<: &s {name: ddp, bucket_cap_mb: 5}\n  name: fsdp\nseed: &n 4\nmax_steps: *n\n"
    )
    found = resolved_settings({}, {}, Path("a.yaml"))
    assert (found.settings.seed, found.settings.max_steps) == (4, 4)
    assert (found.settings.strategy.name, found.settings.strategy.options) == ("fsdp", {"bucket_cap_mb": 5})
    assert (found.settings.strategy.error_prefix("name"), found.settings.strategy.error_prefix("bucket_cap_mb")) == (
        "file a.yaml:3: ",
        "file a.yaml:2: ",
    )
    text = "a: &a {x: 1, y: 1, z: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*b, *a], z: 3}\nd: {z: 4, <<: {<<: *a, y: 5}}\n"
    node = yaml_text.compose(text, "text", lines=True)
    value = yaml_text.construct(node)
    assert value["c"] == {"x": 1, "y": 2, "z": 3}
    assert value["d"] == {"x": 1, "y": 5, "z": 4}
    origins = yaml_text.origins_of_keys(node, "text", lines=True)
    assert [origins[f"c.{key}"] for key in "xyz"] == ["text:1", "text:2", "text:3"]
    assert [origins[f"d.{key}"] for key in "xyz"] == ["text:1", "text:4", "text:4"]


@pytest.mark.parametrize(
    "value",
    [
        *("no", "1e-3", "10:30", "None", "~", "1_000", "<<", "", "a # b", "a: b", "x\ny", "\x07", "\u2028"),
        *(1e-3, 1e20, 5e-324, -float("inf"), None, {"a": ["1e5", {}]}, {4: 2}),
    ],
)
def test_what_is_written_is_read_back(value: object) -> None:
    line = flow(value)
    assert "\n" not in line
    assert yaml_text.construct(yaml_text.compose(f"key: {line}  # why", "text")) == {"key": value}
