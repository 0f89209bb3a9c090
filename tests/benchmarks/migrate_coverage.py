"""How many classes of published packages that use Lightning run with only their imports changed, as ``fit migrate`` reports it.

    python tests/benchmarks/migrate_coverage.py [--cache DIR] [--package NAME | --demos] [--reasons N] [--json] [--check]

The packages' wheels (or source archives) are fetched by pip without their dependencies, once, into ``--cache``; nothing in them is installed,
imported or run. The demos of the installed Lightning come first. A class that only inherits from one that needs a change counts as "inherited": it
does not work yet, but has no line to change. Classes of tests are left out. The last line is one vote a package: the mean of the packages' shares.
With ``--check`` the exit status is 1 when fewer than ``GOAL`` of the LightningModules, one vote a package, work as is or through
``engine.interop``. ``--demos`` fetches nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP
from engine.compat.migrate.report import INHERITED, Report, migration

GOAL = 0.90
PACKAGES = {
    "anomalib": "2.7.0",
    "asteroid": "0.7.0",
    "careamics": "0.3.5",
    "cellarium-ml": "0.0.15",
    "chemprop": "2.3.1",
    "darts": "0.41.0",
    "deeptab": "2.1.0",
    "gluonts": "0.17.0",
    "kraken": "7.1.1",
    "lightly": "1.6.0",
    "lightning-bolts": "0.7.0",
    "lightning-pose": "2.4.3",
    "lightning-uq-box": "0.4.0",
    "matgl": "4.1.2",
    "neuralforecast": "3.3.0",
    "neuralprophet": "0.9.0",
    "pina-mathlab": "0.3.2.post2610",
    "ptlflow": "0.4.2",
    "pyannote-audio": "4.0.7",
    "pytorch-forecasting": "1.8.0",
    "pytorch-tabular": "1.2.0",
    "replay-rec": "0.22.0",
    "rl4co": "0.7.0",
    "rslearn": "0.1.19",
    "schnetpack": "2.2.0",
    "scvi-tools": "1.4.2",
    "sleap-nn": "0.3.5",
    "solo-learn": "1.0.2",
    "terratorch": "1.2.13",
    "torch-uncertainty": "0.13.0",
    "torchgeo": "0.8.1",
    "torchmd-net": "3.1.0",
}
"""Published packages with LightningModules, and their versions."""
EXCLUDED = ("tests", "test", "docs", "examples")


@dataclass(frozen=True)
class Row:
    """One package's result."""

    name: str
    report: Report
    lightning_1: bool = False
    """Whether the package does not admit Lightning 2."""

    @property
    def votes(self) -> bool:
        """Whether it counts in the vote: it has LightningModules, for Lightning 2."""
        return sum(self.report.counts("module").values()) > 0 and not self.lightning_1

    @property
    def shares(self) -> tuple[float, float]:
        """The share of LightningModules that work as is, and that work as is or through interop."""
        found = self.report.counts("module")
        total = sum(found.values())
        return found[AS_IS] / total, (found[AS_IS] + found[INTEROP]) / total

    def reasons(self) -> Counter[str]:
        """For each name that needs a change, the LightningModules that use it themselves; their heirs are not counted."""
        found: Counter[str] = Counter()
        for each in self.report.classes:
            if each.kind == "module":
                found.update({use.name for use in each.uses if use.verdict == CHANGE})
        return found


def fetched(name: str, version: str, cache: Path) -> Path:
    """The folder with a package's sources; downloads and unpacks them when they are not there."""
    folder = cache / f"{name}-{version}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        # Sources are read, not run: another Python's package will do.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "--dest", place, f"{name}=={version}"], check=True)
        (archive,) = Path(place).iterdir()
        unpacked = Path(place) / "sources"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                file.extractall(unpacked)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(unpacked, filter="data")
        os.rename(unpacked, folder)
    return folder


def requires_lightning_1(folder: Path) -> bool:
    """Whether the package's own metadata admits no release of Lightning 2."""
    releases = [f"2.{minor}.{patch}" for minor in range(10) for patch in range(10)]
    for path in folder.glob("*.dist-info/METADATA"):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(": ")
            if name == "Requires-Dist":
                requirement = Requirement(value)
                if requirement.name.lower().replace("_", "-") in ("lightning", "pytorch-lightning"):
                    return not any(requirement.specifier.contains(each) for each in releases)
    return False


def demos() -> Path | None:
    """The demos of the installed Lightning."""
    spec = importlib.util.find_spec("lightning")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "pytorch" / "demos"


def rows(names: Sequence[str], cache: Path, only_demos: bool) -> Iterator[Row]:
    """The results, as they come."""
    if (own := demos()) is not None and not names:
        yield Row("lightning's demos", migration([own]))
    for name, version in PACKAGES.items():
        if not only_demos and (not names or name in names):
            folder = fetched(name, version, cache)
            yield Row(f"{name} {version}", migration([folder], EXCLUDED), requires_lightning_1(folder))


def table(found: Sequence[Row], reasons: int) -> Table:
    """One line a package, and one vote a package."""
    made = Table(
        "package",
        "LightningModules",
        "as is",
        "interop",
        "change",
        "inherited",
        "data modules",
        "callbacks",
        "what stops most",
    )
    for row in found:
        modules = row.report.counts("module")
        others = [
            f"{counts[AS_IS] + counts[INTEROP]}/{sum(counts.values())}"
            for counts in (row.report.counts("data"), row.report.counts("callback"))
        ]
        worst = "; ".join(f"{name} ({count})" for name, count in row.reasons().most_common(reasons))
        made.add_row(
            row.name + (" (Lightning 1)" if row.lightning_1 else ""),
            *map(str, (sum(modules.values()), *modules.values())),
            *others,
            worst,
        )
    votes = [row.shares for row in found if row.votes]
    total = [
        sum(row.report.counts("module")[verdict] for row in found) for verdict in (AS_IS, INTEROP, CHANGE, INHERITED)
    ]
    made.add_section()
    made.add_row("all classes", *map(str, (sum(total), *total)), "", "", "")
    as_is, works = vote(votes)
    made.add_row(
        "one vote a package",
        str(len(votes)),
        f"{as_is:.1%}",
        f"{works - as_is:.1%}",
        f"{1 - works:.1%}",
        "",
        "",
        "",
        "",
    )
    return made


def vote(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of the packages' shares: as is, and as is or through interop."""
    return sum(each[0] for each in shares) / len(shares), sum(each[1] for each in shares) / len(shares)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--cache", type=Path, default=home / "fit-trainer" / "migrate_coverage", metavar="DIR")
    parser.add_argument("--package", action="append", default=[], choices=PACKAGES, metavar="NAME")
    parser.add_argument("--demos", action="store_true", help="only the demos of the installed Lightning")
    parser.add_argument("--reasons", type=int, default=3, metavar="N", help="names that are shown for each package")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    found = list(rows(arguments.package, arguments.cache, arguments.demos))
    as_is, works = vote([row.shares for row in found if row.votes])
    if arguments.json:
        counts = {
            row.name: {**row.report.counts("module"), "Lightning 1": row.lightning_1, "reasons": dict(row.reasons())}
            for row in found
        }
        print(json.dumps({"packages": counts, "as is": as_is, "works": works}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 220).print(table(found, arguments.reasons))
    return 1 if arguments.check and works < GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
