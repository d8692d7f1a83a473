"""The files around the package agree with each other and with what the README promises."""

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

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def requirements() -> dict[str, Requirement]:
    """Every requirement of the project, its extras and its groups, by canonical name."""
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    lists += [[line for line in g if isinstance(line, str)] for g in groups.values()]
    parsed = [Requirement(line) for lines in lists for line in lines]
    # exlm-mini[...] refers to other extras, whose requirements are in the lists anyway
    return {canonicalize_name(r.name): r for r in parsed if r.name != "exlm-mini"}


def locked() -> dict[str, str]:
    """Version of every pinned package, by canonical name."""
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pins.items()}


def project_files() -> list[Path]:
    """The text files that git tracks, or would track if they were added."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()]


def test_readme_has_a_row_for_every_extra():
    table = (ROOT / "README.md").read_text().partition("| extra | for |\n|---|---|\n")[2]
    rows = re.findall(r"\| `(\w+)` \|", table.partition("\n\n")[0])
    assert sorted(rows) == sorted(PROJECT["project"]["optional-dependencies"])


def test_lock_holds_every_requirement_at_an_allowed_version():
    pins = locked()
    for name, requirement in requirements().items():
        assert name in pins, f"{name} is not in requirements.lock; run make lock"
        assert Version(pins[name]) in requirement.specifier, requirement


def test_lock_serves_cpu_and_gpu_machines():
    # A local version or a hash would tie the lock to one build of torch. The CUDA packages need no
    # pins, because the CUDA build of torch requires them itself.
    assert "\ntorch==2.13.0\n" in LOCK
    assert "+" not in LOCK
    assert "--hash" not in LOCK
    assert [n for n in locked() if re.match("nvidia|triton|cuda", n)] == []
    assert "exlm-mini" not in locked()
    assert not any(r.startswith("torch") for r in PROJECT["build-system"]["requires"])


@pytest.mark.slow
def test_every_package_of_the_lock_has_a_wheel_for_the_newest_python(tmp_path):
    version = max(re.findall(r"Python :: (3\.\d+)", str(PROJECT)), key=Version)
    command = ["uv", "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", version, "--target", str(tmp_path)]
    command += ["-r", str(ROOT / "requirements.lock")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if "Failed to fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    installed = dict(re.findall(r"^ \+ (\S+)==(\S+)$", done.stderr, re.M))
    assert installed == locked()


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


def test_every_command_a_document_names_exists():
    for document in ("README.md", "book/running.md", "CONTRIBUTING.md", ".ci/run", "Makefile"):
        text = (ROOT / document).read_text()
        code = text
        if document.endswith(".md"):  # in prose "make" is a word: read only code
            code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
        named = set(re.findall(r"\bmake ([a-z][a-z-]+)", code))
        assert named and named <= set(makefile_targets()), document
        for module in re.findall(r"python -m (exlm_(?:mini|lab)\.\w+)", text):
            assert find_spec(module), module


def test_workflows_run_phases_that_exist():
    cases = re.findall(r"^ +(\w+)\)", (ROOT / ".ci" / "run").read_text(), re.M)
    for file in (ROOT / ".github" / "workflows").iterdir():
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            phases = [i["phases"] for i in matrix.get("include", ())] + matrix.get("phase", [])
            phases += [s["run"] for s in job["steps"] if "run" in s]
            names = re.sub(r"\.ci/run|\$\{\{.*?\}\}", "", " ".join(phases)).split()
            assert names and set(names) <= {*cases, *makefile_targets()}, file


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
