"""The files around the package agree with each other and with what the README promises."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()

CONDA_NAMES = {"lmdb": "python-lmdb", "torch": "pytorch"}
# Only conda brings these: pip users have an interpreter and compilers already.
CONDA_ONLY = {"python", "pip", "cuda-nvcc", "cuda-version", "cxx-compiler"}


def requirements() -> dict[str, Requirement]:
    """Every requirement of the project and its extras, by canonical name."""
    lines = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        lines += extra
    parsed = [Requirement(line) for line in lines]
    # exlm-mini[...] stands for other extras, which are in the list themselves
    return {canonicalize_name(r.name): r for r in parsed if r.name != "exlm-mini"}


def locked() -> dict[str, str]:
    """Version of every pinned package, by canonical name."""
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pins.items()}


def conda() -> tuple[dict[str, Requirement], list[str]]:
    """The conda requirements by name, and the lines of the pip section."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    entries = environment["dependencies"]
    pip_lines = next(e["pip"] for e in entries if isinstance(e, dict))
    # conda writes python=3.12 for 3.12.*
    lines = [re.sub(r"^(\w+)=([\d.]+)$", r"\1==\2.*", e) for e in entries if isinstance(e, str)]
    return {r.name: r for r in map(Requirement, lines)}, pip_lines


def project_files() -> list[Path]:
    """The text files git tracks, or would if they were added."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()]


def test_lock_holds_every_requirement_at_an_allowed_version():
    pins = locked()
    for name, requirement in requirements().items():
        assert name in pins, f"{name} is not in requirements.lock; run make lock"
        assert Version(pins[name]) in requirement.specifier, requirement


def test_lock_serves_cpu_and_gpu_machines():
    # A local version or a hash would tie the lock to one build of torch; the CUDA packages come
    # with the CUDA build by themselves.
    assert "\ntorch==2.13.0\n" in LOCK
    assert "+" not in LOCK
    assert "--hash" not in LOCK
    assert [n for n in locked() if re.match("nvidia|triton|cuda", n)] == []
    assert "exlm-mini" not in locked()
    assert not any(r.startswith("torch") for r in PROJECT["build-system"]["requires"])


@pytest.mark.slow
def test_every_package_of_the_lock_has_a_wheel_for_the_newest_python(tmp_path):
    version = max(re.findall(r"Python :: (3\.\d+)", str(PROJECT)), key=Version)
    command = ["pip", "install", "--dry-run", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", version, "--target", str(tmp_path / "nothing")]
    command += ["--report", f"{tmp_path}/report.json", "-r", f"{ROOT}/requirements.lock"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if "connection" in done.stderr.lower():
        pytest.skip("no package index is within reach")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    assert {canonicalize_name(i["metadata"]["name"]) for i in found} == set(locked())


def test_environment_yml_agrees_with_pyproject():
    packages, pip_lines = conda()
    by_pip = {canonicalize_name(r.name): r for r in map(Requirement, pip_lines[:-1])}
    assert pip_lines[-1] == "-e ."
    for name, requirement in requirements().items():
        theirs = packages.get(CONDA_NAMES.get(name, name)) or by_pip.get(name)
        assert theirs is not None, f"{name} is missing in environment.yml"
        assert theirs.specifier == requirement.specifier, name
    known = {CONDA_NAMES.get(name, name) for name in requirements()} | CONDA_ONLY
    assert set(packages) - known == set()
    assert set(by_pip) - set(requirements()) == set()
    (python,) = packages["python"].specifier
    allowed = Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    assert python.version.removesuffix(".*") in allowed


def test_every_file_names_the_same_repository():
    address = PROJECT["project"]["urls"]["Repository"]
    name = address.rpartition("/")[2]
    for file in project_files():
        for found in re.findall(
            rf"https://github\.com/[\w.-]+/{name}\b", file.read_text(errors="replace")
        ):
            assert found == address, file
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
    assert config["repository"]["url"] == address


def makefile_targets() -> list[str]:
    return re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M)


def test_make_alone_lists_every_target_in_one_line():
    command = ["make", "--no-print-directory"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines] == makefile_targets()
    for line in lines:
        assert re.fullmatch(r"  make [a-z-]+ +\S.{10,80}", line), line


def test_every_command_a_document_names_exists():
    for document in ("README.md", "book/running.md", "CONTRIBUTING.md", ".ci/run", "Makefile"):
        text = (ROOT / document).read_text()
        code = text
        if document.endswith(".md"):  # in a sentence "make" is a word: read what is quoted
            code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
        named = set(re.findall(r"\bmake ([a-z][a-z-]+)", code))
        assert named and named <= set(makefile_targets()), document
        for module in re.findall(r"python -m (exlm_(?:mini|lab)\.\w+)", text):
            assert find_spec(module), module


def test_no_file_names_a_machine_path_or_a_registry():
    host = "|".join([r"pypi\.org", "python[h]osted", r"registry\.npm", r"deb\.debian\."])
    path = r"(?<![\w.])/(work|farm|opt|root|home/\w+|Users/\w+)/"
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for file in project_files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if re.search(f"{host}|{path}", line)
    ]
    assert found == []
