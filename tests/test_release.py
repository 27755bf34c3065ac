"""A release: one version everywhere, and a README whose links lead somewhere on a package index."""

import re
import runpy
import sys
import types
from pathlib import Path

import cs336sys

REPOSITORY = Path(__file__).parents[1]


def settings_of_setup(monkeypatch):
    """The arguments with which ``setup.py`` calls setuptools, which need not be installed."""
    arguments = {}
    modules = {name: types.ModuleType(name) for name in ("setuptools", "setuptools.command.build_py")}
    modules["setuptools"].setup = lambda **settings: arguments.update(settings)
    modules["setuptools.command.build_py"].build_py = object
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("setup.py")
    return arguments


def test_readme_of_a_release_links_to_its_revision(monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    readme = (REPOSITORY / "README.md").read_text()
    assert settings_of_setup(monkeypatch)["long_description"] == readme
    for name, value in {"REPOSITORY": "someone/cs336sys", "REF_NAME": "v0.2.0", "SERVER_URL": "https://host"}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    settings = settings_of_setup(monkeypatch)
    links = re.findall(r'(?:\]\(|src=")([^)"]+)', settings["long_description"])
    assert len(links) == len(re.findall(r'\]\(|src="', readme)) > 30
    links += settings["project_urls"].values()
    home = re.escape("https://host/someone/cs336sys")
    files = [re.fullmatch(rf"{home}/(raw|blob|tree)/v0\.2\.0/([^#]+).*", link) for link in links]
    outside = [link for link, file in zip(links, files, strict=True) if file is None]
    assert outside == ["https://host/someone/cs336sys/issues", "https://host/someone/cs336sys"]
    for kind, name in (file.groups() for file in files if file):
        path = REPOSITORY / name
        assert path.exists(), name
        assert (kind == "raw") == (path.suffix == ".png")


def test_version_is_the_same_everywhere():
    assert f"\nversion: {cs336sys.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
    released = re.findall(r"^## (.+)", (REPOSITORY / "docs/changelog.md").read_text(), flags=re.M)
    assert cs336sys.__version__ in [heading.split()[0] for heading in released if heading != "Unreleased"][:1]
