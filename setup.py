"""Put the course's package into the wheel, in a folder of its own: nobody else's ``cs336_basics`` is overwritten."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCourse(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "cs336-basics/cs336_basics",
                Path(self.build_lib, "cs336sys/course/cs336_basics"),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithCourse})
