"""A name stands for what it was imported as: through aliases, re-exports, star imports and fallbacks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from reported import changes, classes, report_of, uses_of

BODY = "    def training_step(self, batch, batch_idx): ...\n"


@pytest.mark.parametrize(
    ("head", "base"),
    [
        ("import lightning as L", "L.LightningModule"),
        ("import lightning", "lightning.pytorch.LightningModule"),
        ("import lightning.pytorch as pl", "pl.LightningModule"),
        ("import lightning.pytorch", "lightning.pytorch.LightningModule"),
        ("import pytorch_lightning as pl", "pl.core.LightningModule"),
        ("from pytorch_lightning.core.lightning import LightningModule as LM", "LM"),
        ("from lightning.pytorch import LightningModule", "LightningModule"),
        ("from lightning import pytorch as pl", "pl.LightningModule"),
        ("from lightning.pytorch import *", "LightningModule"),
        ("import lightning as L\nBase = L.LightningModule", "Base"),
        (
            "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    import pytorch_lightning as pl",
            "pl.LightningModule",
        ),
        ("import lightning as L\nhas = True", "(L.LightningModule if has else object)"),
        (
            "from typing import Generic, TypeVar\nimport lightning as L\nT = TypeVar('T')",
            "L.LightningModule, Generic[T]",
        ),
    ],
)
def test_aliases_of_a_base(tmp_path: Path, head: str, base: str) -> None:
    assert classes(report_of(tmp_path, net=f"{head}\nclass Net({base}):\n{BODY}")) == {"Net": ("module", "as is")}


def test_classes_of_other_files_of_the_package(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        pkg__base="import lightning as L\nclass Base(L.LightningModule):\n    def training_epoch_end(self, outputs): ...\n",
        pkg__api="from .base import Base\nfrom .base import Base as Renamed\n",
        pkg__star="from pkg.api import *\n",
        pkg__a="from .api import Renamed\nclass A(Renamed): ...\n",
        pkg__b="from pkg import api\nclass B(api.Base): ...\n",
        pkg__c="from pkg.star import Base\nclass Outer:\n    class C(Base): ...\n",
        pkg__d="from pkg.unknown import Base\nclass D(Base): ...\n",
    )
    assert classes(report) == {
        "Base": ("module", "change"),
        "A": ("module", "change"),
        "B": ("module", "change"),
        "Outer.C": ("module", "change"),
    }
    (a,) = [each for each in report.classes if each.cls.name == "A"]
    assert [use.name for use in a.inherited if use.verdict == "change"] == ["def training_epoch_end"]
    assert a.uses[0].name if a.uses else True


def test_a_script_beside_another(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        base="import lightning as L\nclass Base(L.LightningModule): ...\n",
        train="from base import Base\nclass Net(Base): ...\n",
    )
    assert classes(report)["Net"] == ("module", "as is")


def test_a_stand_in_for_a_missing_import_does_not_hide_it(tmp_path: Path) -> None:
    text = "try:\n    from lightning import LightningModule\nexcept ImportError:\n    class LightningModule: ...\nclass Net(LightningModule): ...\n"
    assert classes(report_of(tmp_path, net=text)) == {"Net": ("module", "as is")}


@pytest.mark.parametrize(
    ("first", "second", "use", "expected"),
    [
        (
            "lightning.pytorch.plugins import PLUGIN_INPUT",
            "lightning.pytorch.plugins import _PLUGIN_INPUT as PLUGIN_INPUT",
            "def f(x: PLUGIN_INPUT): ...",
            {"_PLUGIN_INPUT": "interop"},
        ),
        (
            "pytorch_lightning.utilities.cli import LightningCLI",
            "pytorch_lightning.cli import LightningCLI",
            "LightningCLI()",
            {"LightningCLI": "interop"},
        ),
        (
            "pytorch_lightning.loggers.base import LightningLoggerBase as Logger",
            "pytorch_lightning.loggers import Logger",
            "class Mine(Logger): ...",
            {"Logger": "as is"},
        ),
        (
            "lightning.pytorch import nothing",
            "lightning.pytorch import less as nothing",
            "nothing()",
            {"nothing": "change", "import lightning.pytorch.less": "change"},
        ),
        (
            "lightning.pytorch import Trainer",
            "lightning.pytorch import nothing as Trainer",
            "Trainer()",
            {"Trainer": "as is"},
        ),
        ("mine import Callback", "lightning.pytorch import Callback", "class A(Callback): ...", {}),
    ],
)
def test_a_name_whose_import_fails_is_that_of_the_handler(
    first: str, second: str, use: str, expected: dict[str, str], tmp_path: Path
) -> None:
    text = f"try:\n    from {first}\nexcept ImportError:\n    from {second}\n{use}\n"
    assert {name: verdict for _, name, verdict in uses_of(tmp_path, text)} == expected


def test_circles_end(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, a="from b import X\nclass Y(X): ...\n", b="from a import X\nZ = Z\nclass W(Z, W): ...\n"
    )
    assert report.classes == []


def test_a_long_line_of_ancestors_takes_no_minutes(tmp_path: Path) -> None:
    text = "from lightning import LightningModule as A0\n" + "".join(
        f"class A{i + 1}(A{i}):\n    def on_epoch_start(self): ...\n" for i in range(2000)
    )
    began = time.process_time()
    found = report_of(tmp_path, net=text).classes
    assert [each.kind for each in found] == ["module"] * 2000
    assert time.process_time() - began < 15
    assert max(len(each.inherited) for each in found) < 100, "an answer that grows with the square of the classes"


@pytest.mark.parametrize(
    "text",
    [
        f"class Net(lightning{'.a' * 1500}): ...",
        "if a: pass\n" + "elif a: pass\n" * 1500,
    ],
    ids=["dots", "elif"],
)
def test_what_is_nested_too_deeply_costs_its_file_alone(tmp_path: Path, text: str) -> None:
    report = report_of(tmp_path, net=f"import lightning\n{text}\n", other="import lightning\nlightning.Trainer()\n")
    assert [each.message for each in report.unread] == ["an expression in it is nested too deeply"]
    assert [use.name for use in report.uses] == ["Trainer"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from lightning.pytorch.utilities.no_such import thing", "there is no module engine.interop.lightning"),
        ("from lightning.pytorch.callbacks import NoSuch", "has no 'NoSuch'"),
        ("import accelerate.no_such", "there is no module engine.interop.accelerate.no_such"),
        ("import lightning.pytorch as pl\npl.callbacks.NoSuch", ""),
        ("import lightning as L\nL.Fabric()", "use engine.Engine"),
        (
            "if x:\n    from pytorch_lightning.no_such import thing",
            "there is no module engine.interop.lightning.no_such",
        ),
    ],
)
def test_an_import_that_would_fail_is_named(tmp_path: Path, text: str, said: str) -> None:
    ((_, sentence),) = changes(tmp_path, text).items()
    assert said in sentence


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from lightning.no_such import thing\nexcept (ImportError, OSError):\n    thing = None",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning.no_such import thing",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import lightning.no_such",
        "from lightning.pytorch.utilities import rank_zero_only\nrank_zero_only.rank",
        "import accelerate\naccelerate.utils.DistributedType.NO",
    ],
)
def test_an_import_that_may_fail_or_works_needs_no_change(tmp_path: Path, text: str) -> None:
    assert changes(tmp_path, text) == {}


def test_a_name_of_another_library_is_no_use(tmp_path: Path) -> None:
    assert (
        uses_of(
            tmp_path,
            "from torch import nn\nimport lightning_bolts\nclass Net(nn.Module):\n    def log(self): self.log()\n",
        )
        == []
    )


def test_a_namespace_package_and_a_folder_of_sources(tmp_path: Path) -> None:
    for folder in ("space/audio", "src/plain"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
        name = folder.replace("/", ".").removeprefix("src.")
        (tmp_path / folder / "base.py").write_text("import lightning as L\nclass Base(L.LightningModule): ...\n")
        (tmp_path / folder / "net.py").write_text(f"from {name}.base import Base\nclass Net(Base): ...\n")
    found = report_of(tmp_path).classes
    assert sorted((each.cls.source.module, each.cls.name) for each in found) == [
        ("audio.base", "Base"),
        ("audio.net", "Net"),
        ("plain.base", "Base"),
        ("plain.net", "Net"),
    ]
