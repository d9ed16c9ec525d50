"""Packaging that pyproject.toml cannot say: mapped folders, and two files at the root of site-packages.

`csrc/` and `patches/` become `openjev_fast_plugin.csrc` and `openjev_fast_plugin.patches`, so nothing but
`openjev_fast_plugin` is importable. The startup files run `openjev_fast_plugin.bootstrap`: the `.pth` in
Python up to 3.17, the `.start` (PEP 829) from 3.15 on, where it replaces the `.pth` of the same name. Both
are wheel files, so they are listed in RECORD and go when the package goes.
"""

import os

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# The names sort after `__editable__`: site reads these files in order, and an editable install has to be
# importable.
STARTUP_FILES = ("openjev_fast_plugin.pth", "openjev_fast_plugin.start")


class BuildWithStartupFiles(build_py):
    """build_py that also places the startup files beside the package, in wheels and in editable installs."""

    def run(self):
        super().run()
        for name in STARTUP_FILES:
            self.copy_file(name, os.path.join(self._site_root(), name), preserve_mode=False)

    def _site_root(self):
        # An editable wheel is assembled where `install` would write to; build_lib is no part of it.
        if self.editable_mode:
            return self.get_finalized_command("install").install_lib
        return self.build_lib

    def get_outputs(self, include_bytecode=True):
        outputs = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return outputs + [os.path.join(self.build_lib, name) for name in STARTUP_FILES]

    def get_source_files(self):
        return super().get_source_files() + list(STARTUP_FILES)


setup(
    packages=[
        *find_packages(include=["openjev_fast_plugin", "openjev_fast_plugin.*"]),
        "openjev_fast_plugin.csrc",
        "openjev_fast_plugin.patches",
    ],
    package_dir={
        "openjev_fast_plugin": "openjev_fast_plugin",
        "openjev_fast_plugin.csrc": "csrc",
        "openjev_fast_plugin.patches": "patches",
    },
    package_data={
        "openjev_fast_plugin": ["py.typed", "*.json", "*.txt"],
        "openjev_fast_plugin.csrc": ["*.cu", "*.cuh", "*.cpp", "*.h"],
    },
    cmdclass={"build_py": BuildWithStartupFiles},
)
