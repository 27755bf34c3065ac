"""Put the course's package into the wheel, and make the README's links absolute where the repository is known."""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCourse(build_py):
    """Copies the course's package into a folder of its own: nobody else's ``cs336_basics`` is overwritten."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "cs336-basics/cs336_basics",
                Path(self.build_lib, "cs336sys/course/cs336_basics"),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


readme, urls = Path("README.md").read_text(encoding="utf-8"), {}
# Variables of GitHub Actions, where releases are built. Package indexes show the README without the files beside it.
if os.environ.get("GITHUB_REPOSITORY"):
    home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    revision = os.environ.get("GITHUB_REF_NAME", "HEAD")
    readme = re.sub(r"(?<=\]\()(?!https?:|#)", f"{home}/blob/{revision}/", readme)
    readme = re.sub(r'(?<=src=")(?!https?:)', f"{home}/raw/{revision}/", readme)
    urls = {
        "Changelog": f"{home}/blob/{revision}/docs/changelog.md",
        "Documentation": f"{home}/tree/{revision}/docs",
        "Issues": f"{home}/issues",
        "Source": home,
    }

setup(
    cmdclass={"build_py": BuildWithCourse},
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls=urls,
)
