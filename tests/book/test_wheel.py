"""An installed package is complete: modules, recipes, and sources that compile from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from exlm_mini.alignment import build

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("exlm_mini", "exlm_lab")
INSIDE = (
    "*.py", "py.typed", "recipes/*.yaml", "data/*.yaml", "recipes/finetune/*", "recipes/sweep/*",
    "*.css", "*.js", "shipped/*/*.*", "shipped/*/checkpoints/*/*",
)  # fmt: skip


def sources() -> set[str]:
    """Paths of the compiled backend's sources in the installed package."""
    names = {p.name for p in (ROOT / "cuda").iterdir() if p.suffix in build.SUFFIXES}
    return {f"exlm_mini/cuda_src/{name}" for name in names}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory) -> Path:
    """A copy of the files that a wheel is built from, because a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "cuda"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


def pip(*arguments: str | Path) -> None:
    """Run pip; callers turn off its build environment, for which it would fetch packages."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def wheel(source_tree, tmp_path_factory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, source_tree)
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_a_wheel_holds_modules_recipes_and_sources(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(p.relative_to(ROOT))
        for name in PACKAGES
        for pattern in INSIDE
        for p in (ROOT / name).rglob(pattern)
    }
    assert any(name.endswith(".yaml") for name in expected) and len(sources()) >= 6
    assert expected | sources() <= inside
    assert all(n.startswith(("exlm_mini/", "exlm_lab/", "exlm_mini-")) for n in inside)


@pytest.mark.slow
def test_a_source_distribution_makes_the_same_wheel(source_tree, wheel, tmp_path):
    program = "from setuptools import build_meta; build_meta.build_sdist({!r})"
    command = [sys.executable, "-c", program.format(str(tmp_path))]
    subprocess.run(command, cwd=source_tree, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sdist)
    (again,) = tmp_path.glob("*.whl")
    names = [sorted(zipfile.ZipFile(file).namelist()) for file in (again, wheel)]
    assert names[0] == names[1]


PROGRAM = """
import json, torch, exlm_mini
from exlm_mini.alignment import BACKENDS, build, native
graph = (
    -torch.rand(1, 3, 6, dtype=torch.float64), -torch.rand(1, 6, 6, dtype=torch.float64),
    torch.tensor([3]), torch.tensor([6]),
)
ours, exact = native.log_likelihood(*graph), BACKENDS["enumerate"].log_likelihood(*graph)
print(json.dumps({
    "package": exlm_mini.__file__,
    "sources": str(build.SOURCE_DIR),
    "library": str(build.build("cpu")),
    "difference": (ours - exact).abs().item(),
}))
"""


@pytest.mark.slow
def test_an_installed_package_builds_its_sources_and_is_right(wheel, tmp_path):
    try:
        build.cxx()
    except build.BuildError as error:
        pytest.skip(str(error))
    site, cache = tmp_path / "site", tmp_path / "cache"
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)
    environment = os.environ | {"PYTHONPATH": str(site), "TORCH_EXTENSIONS_DIR": str(cache)}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    said = json.loads(run("-c", PROGRAM))
    assert said["package"] == str(site / "exlm_mini" / "__init__.py")
    assert said["sources"] == str(site / "exlm_mini" / "cuda_src")
    assert Path(said["library"]).is_relative_to(cache)
    assert said["difference"] < 1e-12
    report = run("-m", "exlm_mini.doctor")
    assert "all results are right" in report and "  cpu           native\n" in report
    assert ", commit not a git checkout\n" in report
