"""Everything is declared in setup.cfg; here is what setuptools would do wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist


class CleanBuild(build):
    """Starts from empty folders: setuptools would pack what an earlier build has left there, such as a module that was deleted since."""

    def run(self) -> None:
        for folder in (self.build_lib, self.build_scripts):
            if Path(folder).is_dir():
                shutil.rmtree(folder)
        super().run()


class PackagesOnly(sdist):
    """Leaves out ``tests/test_*.py``, which setuptools adds without the modules and the data that they use."""

    def make_distribution(self) -> None:
        self.filelist.prune("tests")
        super().make_distribution()


setup(cmdclass={"build": CleanBuild, "sdist": PackagesOnly})
