"""Everything is declared in setup.cfg; here is what setuptools would do wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist


class CleanBuild(build):
    """Starts from an empty ``build_lib``: what lies there from an earlier build, such as a module that was deleted since, would be packed again."""

    def run(self) -> None:
        for folder in (self.build_lib, self.build_scripts):
            if Path(folder).is_dir():
                shutil.rmtree(folder)
        super().run()


class PackagesOnly(sdist):
    """Without ``tests/test_*.py``, which setuptools adds although the modules and the data that they use are not there."""

    def make_distribution(self) -> None:
        self.filelist.prune("tests")
        super().make_distribution()


setup(cmdclass={"build": CleanBuild, "sdist": PackagesOnly})
