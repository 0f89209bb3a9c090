"""The figures of the architecture, each with the most that it may be.

Promises allow no place at all. Other figures have room for a contributor's work: a commit that makes one smaller changes nothing here, and one that
raises a limit says why in its message. Figures without a limit describe the implementation, and only ``figures.py`` prints them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from figures import CHECKS, ROOT, Figure, Tree, measured

PROMISES = (
    *("layers", "callbacks", "cycles", "inner_imports", "core_imports", "core_names", "annexes"),
    *("private_torch", "any", "protocols", "docstrings", "stale", "bare_names"),
)
"""Figures that are 0 at every commit."""

LIMITS = dict.fromkeys(PROMISES, 0) | {
    "callables": 20,
    "run_assignments": 7,
    "names": 10,
    "tests_reach": 126,
    "units_by_name": 110,
    "closure": 218,
    "walk frames": 6,
    "walk window": 70,
    "any by type": 5,
}
"""The last ones protect a user: the time that an import takes, the library's lines in a traceback, the calls of a step."""

UNLIMITED = ("walk files", "walk switches", "walk calls")
"""How the way to the first step is built. Whoever adds a call there owes nobody a number."""

REPORTED = ("planted_faults", "sizes", "thin_files")
"""Checks that are not run here: the first has a file of its own, the others have no limit."""


def problem(figure: Figure) -> str:
    """Why a figure is above its limit, or nothing."""
    if figure.name in UNLIMITED or figure.value <= LIMITS[figure.name]:
        return ""
    return "\n".join((f"{figure.name}: {figure.value} {figure.unit}, at most {LIMITS[figure.name]}", *figure.places))


CHECKED = [check for check in CHECKS if check not in REPORTED]


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Future[list[Figure]]]]:
    """The figures by check. The two that run the library do so in processes of their own, beside the others."""
    tree = Tree(ROOT)
    assert tree.imports  # parsed once, before several threads ask for it
    with ThreadPoolExecutor() as pool:
        yield {
            check: pool.submit(measured, tree, check)
            for check in sorted(CHECKED, key=("annexes", "walk").count, reverse=True)
        }


@pytest.mark.parametrize("check", CHECKED)
def test_no_figure_is_above_its_limit(figures: dict[str, Future[list[Figure]]], check: str) -> None:
    problems = [problem(figure) for figure in figures[check].result()]
    assert not any(problems), "\n".join(filter(None, problems))


def test_only_a_figure_above_its_limit_is_a_problem() -> None:
    assert problem(Figure("names", 0, "pronouns")) == problem(Figure("names", 10, "pronouns")) == ""
    assert problem(Figure("names", 11, "pronouns", ("a.py:1 found",))) == "names: 11 pronouns, at most 10\na.py:1 found"
    assert problem(Figure("cycles", 1, "import cycles")) == "cycles: 1 import cycles, at most 0"
    assert problem(Figure("walk calls", 10**6, "calls")) == ""


LOGIC = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.comprehension)


def test_shared_internals_are_few_and_only_built() -> None:
    """``tests/support/internals.py`` must not become a second library."""
    nodes = list(ast.walk(ast.parse((ROOT / "tests" / "support" / "internals.py").read_text())))
    assert sum(isinstance(node, ast.FunctionDef) for node in nodes) <= 25
    assert [node for node in nodes if isinstance(node, LOGIC)] == []


@dataclass
class Broken:
    """A small package that breaks a rule."""

    files: dict[str, str]
    places: list[str]
    """What the check says of it."""


TABLE = "| 0 | `low` | |\n| 1 | `middle` | |\n| 2 | `callbacks` | |\n| 3 | `top` | |\n"
BROKEN = {
    "layers": Broken(
        {
            "engine/README.md": TABLE + "| 3 | `gone` | |\n",
            "engine/low.py": "import engine.middle\n",
            "engine/middle.py": "import engine.low\nfrom engine import Fit\nfrom callbacks import Bar\n",
            "engine/callbacks.py": "from callbacks import *\n",
            "engine/top.py": "import engine\nimport engine.callbacks\n",
            "engine/new.py": "",
            "callbacks/__init__.py": "",
        },
        [
            "gone: a row in the table of layers, and no such file or folder",
            "low.py:1 imports engine.middle",
            "middle.py:2 imports engine",
            "middle.py:3 imports callbacks",
            "new: no row in the table of layers",
        ],
    ),
    "callbacks": Broken(
        {
            "callbacks/__init__.py": "from engine.utils.lazy_names import a\nfrom engine import Callback\nfrom callbacks.bar import Bar\n",
            "callbacks/bar.py": "from .other import x\nif TYPE_CHECKING:\n    from callbacks.other import y\n",
            "callbacks/other.py": "from engine.low import z\n",
        },
        ["callbacks/__init__.py:3 imports callbacks.bar", "callbacks/other.py:1 imports engine.low"],
    ),
    "cycles": Broken(
        {
            "engine/low.py": "import engine.middle\n",
            "engine/middle.py": "from engine import top\n",
            "engine/top.py": "if TYPE_CHECKING:\n    from engine.middle import x\n",
        },
        ["engine.middle engine.top"],
    ),
    "inner_imports": Broken(
        {
            "engine/low.py": "import torch\ndef f():\n    import torch\n    from engine.middle import x\n",
            "engine/middle.py": "",
        },
        ["low.py:4 imports engine.middle"],
    ),
    "core_imports": Broken(
        {
            "engine/low.py": "from engine.planning import plan\nimport engine.middle\n",
            "engine/middle.py": "",
            "engine/planning/plan.py": "import engine.low\n",
        },
        ["low.py:1 imports engine.planning.plan"],
    ),
    "core_names": Broken(
        {
            "engine/low.py": '"""Unlike Lightning."""\nx = "as Lightning does"\ndeepspeed_stage = 1\ny.accelerate = 1  # accelerate\n',
            "engine/interop/a.py": 'x = "lightning"\n',
            "engine/config/strategy_names.py": 'x = "deepspeed"\ny = "lightning"\n',
        },
        ["config/strategy_names.py:2 lightning", "low.py:2 Lightning", "low.py:3 deepspeed", "low.py:4 accelerate"],
    ),
    "private_torch": Broken(
        {
            "engine/low.py": "from torch._C import x\nfrom torch.utils import _pytree\ntorch._foreach_norm(y)\nself._torch = torch.__version__\n"
            "import torch._dynamo, torch.fx\n",
            "engine/utils/torch_private.py": "import torch\ntorch._C.x\n",
        },
        [
            "low.py:1 torch._C.x",
            "low.py:2 torch.utils._pytree",
            "low.py:3 torch._foreach_norm",
            "low.py:5 torch._dynamo",
        ],
    ),
    "any": Broken(
        {"engine/low.py": "def f(run: Any, *, group: object, window: Window, batch: Any): ...\n"},
        ["low.py:1 f(group: Any)", "low.py:1 f(run: Any)"],
    ),
    "callables": Broken(
        {
            "engine/low.py": (
                "class A:\n    agree: Callable[[], bool]\n    collate_fn: Callable[[], bool]\n"
                "    def __init__(self, done: Callable[[], None]):\n        self.done = done\n        self.agree = lambda: True\n"
                "    def attach(self, other):\n        other.close = self.attach\n        other.size = self.size\n"
                "def f(window):\n    window.clock = lambda: 0\n"
            )
        },
        [
            "low.py:11 window.clock = lambda: 0",
            "low.py:2 A.agree: Callable",
            "low.py:4 A(..., done: Callable)",
            "low.py:8 other.close = self.attach",
        ],
    ),
    "protocols": Broken(
        {
            "engine/low.py": (
                "class Steps(Protocol):\n    def step(self): ...\nclass Saves(Protocol):\n    '''As Writer does.'''\n    def save(self): ...\n"
                "class Moves(Protocol):\n    def move(self): ...\n"
            ),
            "engine/middle.py": (
                "class Only:\n    def step(self): ...\nclass Writer:\n    def save(self): ...\n"
                "class Left:\n    def move(self): ...\nclass Right:\n    def move(self): ...\n"
            ),
        },
        ["low.py:1 Steps: engine.middle.Only"],
    ),
    "run_assignments": Broken(
        {
            "engine/low.py": "run.stop = 1\nx, run.reason = 1, 2\nrun.step += 1\nother.run = run.step\n",
            "engine/loop/run.py": "run.stop = 1\n",
        },
        ["low.py:1 run.stop", "low.py:2 run.reason", "low.py:3 run.step"],
    ),
    "docstrings": Broken(
        {
            "engine/low.py": '"""A file."""\ndef f():\n    """Of the values."""\nx = 1\n"""The same, but less."""\ny = 1\n"""The sameness."""\n',
            "callbacks/bar.py": '"""Whether this is rank 0."""\nx = 1\n"""Whether this process is rank 0."""\n',
        },
        ["callbacks/bar.py:1 Whether this is rank 0.", "low.py:2 Of the values.", "low.py:5 The same, but less."],
    ),
    "stale": Broken(
        {
            "engine/__init__.pyi": "from .fit import Fit as Fit\n",
            "engine/low.py": '"""As :class:`engine.Fit` and :func:`engine.low.f`, not :class:`engine.Fat` or engine/lower.py."""\ndef f(): ...\n',
        },
        ["low.py:1 engine.Fat", "low.py:1 engine/lower.py"],
    ),
    "names": Broken(
        {"engine/low.py": "def told(given, optimizer):\n    found = given\n    self.found = each\ndef put(): ...\n"},
        ["low.py:1 def told", "low.py:1 parameter given", "low.py:2 variable found", "low.py:4 def put"],
    ),
    "tests_reach": Broken(
        {
            "engine/__init__.pyi": "from .fit import Fit as Fit\n",
            "engine/data/order.py": "",
            "tests/data/test_order.py": "from engine.data.order import a\nfrom engine.low import b\nfrom engine.fit import Fit\n",
            "tests/data/test_deal.py": "from engine.data import order\n",
            "tests/planning/test_plan.py": "from engine.low import c\n",
            "tests/support/internals.py": "from engine.low import d\n",
        },
        ["tests/data/test_deal.py:1 engine.data.order.order", "tests/data/test_order.py:2 engine.low.b"],
    ),
    "units_by_name": Broken(
        {
            "engine/data/order.py": "",
            "tests/data/test_order.py": "from engine.data.order import a\nfrom engine.data import order\n",
            "tests/data/test_deal.py": "from engine.low import b\nfrom engine.data.order import a\nfrom engine.data import order\n",
            "tests/planning/test_plan.py": "from engine.low import c\n",
        },
        ["tests/data/test_deal.py: data.order, low", "tests/planning/test_plan.py: low"],
    ),
    "sizes": Broken(
        {
            "engine/low.py": '"""A file."""\nx = 1\nif x:\n    x = 2\n',
            "engine/planning/plan.py": "x = 1\ny = 2\n",
            "engine/interop/a.py": "x = 1\n",
        },
        ["compat: 1 in 1 files", "core: 3 in 2 files", "planning: 2 in 1 files"],
    ),
    "thin_files": Broken(
        {
            "engine/low.py": "x = 1\n",
            "engine/middle.py": "import engine.low\nimport engine.top\n",
            "engine/top.py": "x = 1\n" * 40,
            "engine/shared.py": "import engine.middle\n",
            "engine/other.py": "import engine.middle\n",
        },
        ["low.py <- engine.middle"],
    ),
}


def write(root: Path, files: dict[str, str]) -> Tree:
    for package in ("engine", "callbacks"):
        files = {f"{package}/__init__.py": "", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


@pytest.mark.parametrize("check", BROKEN)
def test_a_check_finds_what_it_is_for(check: str, tmp_path: Path) -> None:
    (figure,) = measured(write(tmp_path, BROKEN[check].files), check)
    assert sorted(figure.places) == BROKEN[check].places
    assert figure.value == (len(figure.places) if check != "sizes" else 3)


TOY = {
    "engine/__init__.py": "from engine.fit import Fit\nfrom engine.module import Callback, DataModule, TrainModule\n",
    "engine/module.py": "class TrainModule:\n    def log(self, name, value): ...\nCallback = DataModule = TrainModule\n",
    "engine/fit.py": """
from engine.loop import train
class Fit:
    step = 32
    def __init__(self, **settings): ...
    def run(self, module, loader=None, **arguments):
        train(self, module)
        return self
    def predict(self, module, loader): ...
    validate = predict
""",
    "engine/loop.py": """
from typing import Any
def train(fit: Any, module: Any):
    for number in [number for number in range(16)]:
        micro(module, number)
def micro(module, number: Any):
    module.training_step([1], number)
""",
    "callbacks/__init__.py": "CSVLogger = EarlyStopping = ModelCheckpoint = lambda *arguments: None\n",
    # Stand-ins, so that nothing loads torch.
    "torch/__init__.py": "class Stub:\n    __call__ = __getattr__ = lambda self, *arguments: self\nnn = optim = ones = Stub()\n",
    "torch/utils/__init__.py": "",
    "torch/utils/data.py": "DataLoader = TensorDataset = lambda *arguments, **options: None\n",
}
"""A library of two files to ``training_step``: ``fit.py`` calls ``loop.py``, which calls itself for each micro-batch."""


def test_the_walk_is_counted(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in measured(write(tmp_path, TOY), "walk")}
    assert figures["closure"].places == ("engine.fit", "engine.loop", "engine.module")
    assert {name: figure.value for name, figure in figures.items()} == {
        "closure": 3,
        "walk files": 2,
        "walk switches": 1,
        "walk calls": 3,
        "walk frames": 3,
        "walk window": 4,
        "any by type": 1,
    }
    assert figures["any by type"].places == ("loop.py:3 train(fit: Any) takes engine.fit.Fit",)


def test_a_core_that_needs_an_annex_is_found(tmp_path: Path) -> None:
    annex = {"engine/planning/__init__.py": "", "engine/planning/plan.py": "import engine.loop\n"}
    assert measured(write(tmp_path / "free", TOY | annex), "annexes")[0].value == 0
    needy = (
        TOY
        | annex
        | {"engine/loop.py": "import engine.planning.plan\nimport engine.planning\n" + TOY["engine/loop.py"]}
    )
    (figure,) = measured(write(tmp_path / "needy", needy), "annexes")
    assert figure.value == 2
    assert figure.places[:2] == ("loop.py:1 imports engine.planning.plan", "loop.py:2 imports engine.planning")
    assert "No module named 'engine.planning" in figure.places[2]
    broken = TOY | {"engine/fit.py": TOY["engine/fit.py"].replace("32", "31")}
    assert measured(write(tmp_path / "broken", broken), "annexes")[0].value == 1
