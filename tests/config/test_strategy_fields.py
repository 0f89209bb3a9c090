"""A strategy or a precision with settings of its own: in the file, in FIT_STRATEGY, on the command line, in code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from support.internals import resolved_settings
from support.ranks import clean_environment

from engine import DDP, FP8, FSDP, DeepSpeed, Engine, Fit, MeshParallel, Precision, Strategy, strategies
from engine.config.named_options import NamedOptions
from engine.config.typed_values import construct, converted


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(*overrides: str, environ: dict[str, str] | None = None, file: str = "") -> Fit:
    Path("fit.yaml").write_text(file)
    return Fit.from_resolved(resolved_settings({}, environ or {}, None, overrides))


def strategy(*overrides: str, environ: dict[str, str] | None = None, file: str = "") -> Strategy:
    return strategies.get(built(*overrides, environ=environ, file=file).settings.strategy)


def same(a: Strategy, b: Strategy) -> bool:
    return type(a) is type(b) and strategies.describe(a, None) == strategies.describe(b, None)


def test_everywhere_the_same() -> None:
    expected = FSDP(cpu_offload=True, dp_replicate=2, blocks=["Block"], reduce_dtype=torch.bfloat16)
    options = "{name: fsdp, cpu_offload: true, dp_replicate: 2, blocks: [Block], reduce_dtype: bf16}"
    assert same(strategy(file=f"strategy: {options}"), expected)
    assert same(strategy(environ={"FIT_STRATEGY": options}), expected)
    assert same(strategy(f"strategy={options}"), expected)
    parts = [
        "strategy.cpu_offload=1",
        "strategy.dp_replicate=2",
        "strategy.blocks=[Block]",
        "strategy.reduce_dtype=bfloat16",
    ]
    assert same(strategy(*parts, file="strategy: fsdp"), expected)
    given = {
        "name": "fsdp",
        "cpu_offload": True,
        "dp_replicate": 2,
        "blocks": ["Block"],
        "reduce_dtype": torch.bfloat16,
    }
    assert same(strategies.get(Fit(strategy=given).settings.strategy), expected)
    assert same(
        Engine(strategy={"name": "fsdp", "cpu_offload": True}, accelerator="cpu").strategy, FSDP(cpu_offload=True)
    )


def test_a_name_alone_in_a_mapping_is_the_name() -> None:
    assert built(file="strategy: {name: ddp}\nprecision: {name: no}").settings.strategy == "ddp"
    assert built(file="precision: {name: no}").settings.precision == "32-true"


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        (
            "strategy: {name: deepspeed, stage: 2, overlap_comm: true}",
            ["strategy.stage=3"],
            DeepSpeed(stage=3, overlap_comm=True),
        ),
        ("strategy: ddp", ["strategy.bucket_cap_mb=5"], DDP(bucket_cap_mb=5.0)),
        ("strategy: {name: ddp, bucket_cap_mb: 5}", ["strategy=fsdp"], FSDP()),
        (
            "strategy: {name: ddp, bucket_cap_mb: 5}",
            ["strategy.cpu_offload=true", "strategy=fsdp"],
            FSDP(cpu_offload=True),
        ),  # whole ones first
        (
            "",
            ["strategy.bucket_cap_mb=1", "strategy=ddp", "strategy.bucket_cap_mb=2"],
            DDP(bucket_cap_mb=2.0),
        ),  # the last one of a name
        (
            "",
            ["strategy=deepspeed_stage_2_offload", "strategy.overlap_comm=yes"],
            DeepSpeed(stage=2, offload_optimizer=True, overlap_comm=True),
        ),
        (
            "",
            ["strategy=mesh", "strategy.plan={'a.*': colwise}", "strategy.tp=2"],
            MeshParallel(tp=2, plan={"a.*": "colwise"}),
        ),
        (
            "strategy: {name: deepspeed, config: {zero_optimization: {stage: 1, reduce_scatter: true}}}",
            ["strategy.config.zero_optimization.stage=2"],
            DeepSpeed(config={"zero_optimization": {"stage": 2, "reduce_scatter": True}}),
        ),
    ],
)
def test_one_key_on_the_command_line(file: str, overrides: list[str], expected: Strategy) -> None:
    assert same(strategy(*overrides, file=file), expected)


def test_other_mappings_on_the_command_line() -> None:
    settings = built(
        "compile.mode=max-autotune", "accumulate_grad_batches.4=2", file="compile: blocks\naccumulate_grad_batches: 3"
    ).settings
    assert settings.compile == {"blocks": True, "mode": "max-autotune"}
    assert settings.accumulate_grad_batches == {0: 3, 4: 2}
    assert Precision.parse(built("precision.recipe=rowwise", file="precision: fp8").settings.precision).fp8 == FP8(
        recipe="rowwise"
    )


def test_each_key_has_its_origin() -> None:
    fit = built("strategy.stage=3", file="strategy:\n  name: deepspeed\n  overlap_comm: true\n  stage: 1\n")
    assert fit.origins["strategy"] == "file fit.yaml:1"
    origins = fit.settings.strategy.origins
    assert [origins[key] for key in ("name", "overlap_comm", "stage")] == [
        "file fit.yaml:2",
        "file fit.yaml:3",
        "command line strategy.stage=3",
    ]
    assert built("max_epochs=3").origins["max_epochs"] == "command line max_epochs=3"
    fit = built("compile.mode=default", file="compile: {dynamic: false}")
    assert fit.origins["compile"] == "command line compile.mode=default, over file fit.yaml:1"


def test_the_command_line_is_above_code() -> None:
    found = resolved_settings(
        {"max_steps": 3, "strategy": "ddp"}, {"FIT_MAX_STEPS": "2"}, None, ["max_steps=4", "strategy.bucket_cap_mb=3"]
    )
    assert (found.settings.max_steps, found.settings.strategy) == (4, NamedOptions("ddp", {"bucket_cap_mb": 3}))
    assert found.settings.strategy.origins["name"] == "code"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "strategy:\n  name: deepspeed\n  stagee: 3",
            r"file fit.yaml:3: 'deepspeed' has no setting 'stagee'; did you mean 'stage'\?",
        ),
        (
            "strategy:\n  name: depspeed\n  stage: 3",
            r"file fit.yaml:2: strategy='depspeed' is unknown; did you mean 'deepspeed'",
        ),
        ("strategy:\n  stage: 3", r"file fit.yaml:1: strategy=.* has no 'name'"),
        ("strategy:\n  name: [a]\n  stage: 3", r"file fit.yaml:1: strategy.name=\['a'\] is of type list"),
        (
            "strategy:\n  name: deepspeed\n  stage: three",
            r"file fit.yaml:3: strategy.stage='three' is of type str: give int or None",
        ),
        ("strategy:\n  name: deepspeed\n  stage: true", r"file fit.yaml:3: strategy.stage=True is of type bool"),
        ("strategy:\n  name: deepspeed\n  stage: 7", r"file fit.yaml:3: strategy 'deepspeed': stage=7"),
        ("strategy:\n  name: deepspeed\n  config:\n    zero_optimization: 3", r"file fit.yaml"),
        (
            "strategy:\n  name: deepspeed\n  config: nowhere.json",
            r"file fit.yaml:3: strategy 'deepspeed': .*nowhere.json",
        ),
        (
            "strategy:\n  name: ddp\n  comm_hook: fp17",
            r"file fit.yaml:3: strategy 'ddp': DDP\(comm_hook='fp17'\) is unknown; did you mean 'fp16'",
        ),
        (
            "strategy:\n  name: ddp\n  comm_hook: 16",
            r"file fit.yaml:3: strategy.comm_hook=16 is of type int: give str or None .*in quotes",
        ),
        ("strategy:\n  name: fsdp\n  ignore: [a, 1]", r"file fit.yaml:3: strategy.ignore.1=1 is of type int"),
        (
            "strategy:\n  name: fsdp\n  reduce_dtype: fp15",
            r"file fit.yaml:3: strategy.reduce_dtype='fp15': unknown dtype; did you mean 'fp16'",
        ),
        ("strategy:\n  name: mesh\n  plan:\n    a: 1", r"file fit.yaml:4: strategy.plan.a=1 is of type int"),
        (
            "strategy:\n  name: deepspeed_stage_2\n  stage: 3",
            r"file fit.yaml:3: strategy.stage=3 contradicts the name .*'deepspeed'",
        ),
        ("strategy:\n  name: auto\n  stage: 3", r"file fit.yaml:3: strategy 'auto' takes no settings"),
        ("\nstrategy: dpd", r"strategy='dpd' is unknown; did you mean 'ddp'.*\[strategy: file fit.yaml:2\]"),
        ("strategy: [ddp]", r"file fit.yaml:1: strategy=\['ddp'\] is of type list"),
        ("precision: [bf16]", r"file fit.yaml:1: precision=\['bf16'\] is of type list"),
        ("strategy:\n  name: single\n  stage: 3", r"file fit.yaml:3: 'single' has no setting 'stage'; it takes none"),
        ("precision:\n  name: bf16\n  recipe: rowwise", r"file fit.yaml:3: precision 'bf16' takes no settings"),
        (
            "precision:\n  name: fp8\n  recipe: rowwize",
            r"file fit.yaml:3: precision 'fp8-mixed': FP8\(recipe='rowwize'\) is unknown",
        ),
        (
            "compile:\n  dynamic: true\n  mod: x",
            r"file fit.yaml:3: compile has the key 'mod', which is unknown; did you mean 'mode'",
        ),
        ("callbacks: []", r"file fit.yaml:1: 'callbacks' is a section that 'fit run' reads.*in code only"),
        (
            "model:\n  width: 3",
            r"file fit.yaml:1: 'model' is a section that 'fit run' reads.* Rename the file, and give it to 'fit run' with --config NAME",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_line(file: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        built(file=file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_epochs", "command line max_epochs: write name=value"),
        ("=3", "write name=value"),
        ("strategy..stage=3", "write name=value"),
        ("max_epoch=3", "'max_epoch' is not a Fit setting; did you mean 'max_epochs'"),
        ("max_epochs=", "command line max_epochs=: max_epochs is empty"),
        ("max_epochs=three", "command line max_epochs=three: max_epochs='three' is of type str"),
        ("strategy.stage=", "strategy.stage is empty"),
        ("seed.x=1", "seed is not a mapping and has no keys"),
        ("callbacks=[]", "only be given in code"),
        ("compile.options.x.y=1", ""),
    ],
)
def test_what_is_wrong_on_the_command_line(override: str, message: str) -> None:
    if not message:
        assert built(override).settings.compile == {"options": {"x": {"y": 1}}}
        return
    with pytest.raises((ValueError, TypeError), match=message):
        built(override)


def test_an_object_of_the_code_has_its_own_settings() -> None:
    with pytest.raises(ValueError, match="strategy was given as an object in code"):
        resolved_settings({"strategy": DDP()}, {}, None, ["strategy.bucket_cap_mb=1"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "single", "devices": 2}, "one process cannot use 2 devices"),
        (
            {"strategy": {"name": "fsdp", "dp_replicate": 3}, "devices": 4},
            r"needs a multiple of 3 processes, this job has 4",
        ),
        (
            {"strategy": {"name": "mesh", "tp": 2, "dp_shard": 1}, "devices": 2, "num_nodes": 2},
            "needs 2 processes, this job has 4",
        ),
        ({"strategy": "pp", "devices": 2, "compile": True}, "no rank runs the whole model; use compile='blocks'"),
        ({"strategy": "deepspeed", "precision": "64-true"}, "whose master copies are fp32"),
        ({"strategy": "deepspeed", "precision": "16-mixed", "accelerator": "cpu"}, "its fp16 needs CUDA"),
        (
            {"strategy": "deepspeed", "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            r"gradient_clip_algorithm='value' \(code\)",
        ),
    ],
)
def test_what_cannot_work_together_is_said_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fit(**settings)


def test_and_where_it_comes_from() -> None:
    with pytest.raises(
        ValueError,
        match=r"this job has 2: .*\[devices: environment FIT_DEVICES; strategy.dp_replicate: file fit.yaml:3\]$",
    ):
        built(file="strategy:\n  name: fsdp\n  dp_replicate: 3\n", environ={"FIT_DEVICES": "2"})


def test_strategies_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True)
    class Theirs(Strategy):
        every: int = 8

    class Plain(Strategy):
        def __init__(self, *, rate: float, mode: Literal["a", "b"] = "a") -> None:
            super().__init__()
            self.rate, self.mode = rate, mode

    points = [SimpleNamespace(name="theirs", load=lambda: Theirs), SimpleNamespace(name="plain", load=lambda: Plain)]
    monkeypatch.setattr(strategies, "entry_points", lambda group: points)
    assert strategies.get({"name": "theirs", "every": 2}).every == 2  # type: ignore[attr-defined]
    assert strategies.get({"name": "plain", "rate": 2}).rate == 2.0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"strategy.mode='c' is unknown.*possible: 'a', 'b'"):
        strategies.get({"name": "plain", "rate": 1, "mode": "c"})
    with pytest.raises(ValueError, match=r"'theirs' has no setting 'evry'; did you mean 'every'"):
        strategies.get({"name": "theirs", "evry": 2})
    with pytest.raises(TypeError, match="rate"):
        strategies.get({"name": "plain", "mode": "b"})


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (int | None, None, None),
        (float, 2, 2.0),
        (int | float, 2, 2),
        (bool | int | None, 1, 1),
        (bool | None, 1, True),
        (Path, "~/x", Path("~/x").expanduser()),
        (str | Path, "x", "x"),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[float], [1], [1.0]),
        (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
        (Any, object, object),
    ],
)
def test_conversions(hint: Any, given: Any, expected: Any) -> None:
    found = converted(hint, given, "x")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("hint", "given"),
    [
        *((int, 1.5), (int, True), (float, "1"), (bool, 2), (bool, "yes"), (str, 3)),
        *((list[int], "ab"), (dict[str, int], [1]), (int | None, ""), (tuple[int, int], 3)),
    ],
)
def test_no_conversion(hint: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"x=.* is of type"):
        converted(hint, given, "x")


IMPORTS = """
import sys
from engine import FSDP, Fit, strategies
fit = Fit()
strategy = strategies.get(Fit(strategy={"name": "fsdp", "reduce_dtype": "bf16", "cpu_offload": 1}).settings.strategy)
named = strategies.get(Fit(strategy={"name": "fsdp", "blocks": ["evil.Block", "evil.Block"]}).settings.strategy)
assert named.blocks == ["evil.Block", "evil.Block"], named.blocks
print([name for name in ("jsonargparse", "evil") if name in sys.modules])
"""


def test_options_import_nothing(in_tmp: Path) -> None:
    # A file of settings may come from anyone; and nobody pays for what is not used.
    (in_tmp / "evil.py").write_text("class Block: ...\n")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_an_error_of_a_json_file_keeps_its_place() -> None:
    Path("broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"^here: strategy 'deepspeed': .*broken.json"):
        construct("strategy", NamedOptions("deepspeed", {"config": "broken.json"}, {"config": "here"}), DeepSpeed)
