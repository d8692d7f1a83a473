"""Run chapters and tests as other machines would, and print how many passed on each.

    python tests/stress/machines.py [--only NAME ...] [--marked EXPRESSION] [PATH ...]

A training depends on the last bits of its sums, which differ between processors with the width of
the vectors, the kernels of the matrix library and the number of threads. The settings below imitate
as much of this as one machine can. The nudges, see ``imitation/sitecustomize.py``, stand in for the
rest: whatever passes with several of them does not depend on the last bits.

Without a path, every chapter and the tests that train are run. For everything in ``make test``, use
``--marked "not slow and not gpu" tests chapters/*.ipynb``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",  # PyTorch's own loops
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",  # NumPy's and SciPy's matrices
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",  # the MKL kernels that every processor can run
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
}
TWO_THREADS = {"OMP_NUM_THREADS": "2", "EXLM_TEST_THREADS": "2"}
FURTHEST = {**PLAIN, **TWO_THREADS, "EXLM_NUDGE": "4"}

MACHINES = {
    "own": {},
    "own, 2 threads": TWO_THREADS,
    "avx2": AVX2,
    "avx2, 2 threads": {**AVX2, **TWO_THREADS},
    "default": PLAIN,
    "default, 2 threads": {**PLAIN, **TWO_THREADS},
    "nudge 1": {"EXLM_NUDGE": "1"},
    "nudge 2": {"EXLM_NUDGE": "2"},
    "nudge 3": {"EXLM_NUDGE": "3"},
    "furthest": FURTHEST,
}
"""Environment variables of each machine. One thread where they set no number of threads."""

TRAINING_CHAPTERS = ("01", "02", "03", "04", "06", "07", "08", "09", "13")
TRAINING_TESTS = (
    "checkpoint", "distributed", "fill", "finetune", "finetuning", "live", "metrics_log",
    "model", "pretrain", "processes", "settings_arrive", "surviving", "sweep", "training",
)  # fmt: skip


class Outcome(NamedTuple):
    passed: int
    failed: list[str]
    """Names of the cells and tests that failed."""
    skipped: int
    output: str


def environment(machine: dict[str, str]) -> dict[str, str]:
    """The environment variables of a process on an imitated machine."""
    path = [ROOT / "tests" / "stress" / "imitation", ROOT, os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        **machine,
    }


def run(
    machine: dict[str, str], paths: list[Path], *options: str, marked: str = "not gpu"
) -> Outcome:
    """Run notebooks and test files with pytest on an imitated machine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        command += ["--nbval", "-m", marked, f"--junitxml={report}"]
        told = subprocess.run(
            [*command, *map(str, paths)],
            cwd=ROOT,
            # A cache of its own: Inductor would reuse code compiled for another machine.
            env={**environment(machine), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            how = f"pytest failed with exit code {told.returncode}"
            return Outcome(0, [how], 0, told.stdout + told.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if {child.tag for child in c} & {"failure", "error"}]
    skipped = [c for c in cases if c.find("skipped") is not None]
    names = [f"{c.get('classname')} {c.get('name')}" for c in failed]
    return Outcome(len(cases) - len(failed) - len(skipped), names, len(skipped), told.stdout)


def main() -> int:
    """Run the command line; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--workers", default="2", help="number of pytest processes")
    parser.add_argument("--marked", default="not gpu", help="expression for pytest's -m")
    parser.add_argument("--output", type=Path, help="directory for the output of pytest")
    parser.add_argument("path", nargs="*", type=Path)
    asked = parser.parse_args()
    tests = [p for name in TRAINING_TESTS for p in (ROOT / "tests").glob(f"*/test_{name}.py")]
    paths = asked.path or [*sorted((ROOT / "chapters").glob("*.ipynb")), *tests]
    is_bad = False
    print(f"{'machine':20} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for name in asked.only:
        outcome = run(MACHINES[name], paths, "-n", asked.workers, marked=asked.marked)
        numbers = f"{outcome.passed:7} {len(outcome.failed):7} {outcome.skipped:8}"
        print(f"{name:20} {numbers}", *outcome.failed, sep="\n    ", flush=True)
        is_bad |= bool(outcome.failed) or not outcome.passed
        if asked.output:
            asked.output.mkdir(parents=True, exist_ok=True)
            (asked.output / f"{name}.txt".replace(", ", "-")).write_text(outcome.output)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
