"""Runs the cases of ``bad_cases.py`` and judges what became of each. ::

    python tests/bad_input.py --cases 5000 --seed 1
    python tests/bad_input.py --cases 5000 --seed 1 --family lmdb
    python tests/bad_input.py --seed 1 --only 1234 --keep DIR

Every case is a child of one process that has imported everything, in a session, a home and a
working directory of its own. What it may do is end with a documented exit code; an error is one
line. It sees a machine of 4 GB.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 6 << 30
"""A batch of 65,536 rows takes 4.3 GB, and is what was asked for."""
MOST_SECONDS = 60
"""Of the processor; twice what the longest honest command takes beside other work. As long without
any use of it is a hang, too."""
SECONDS_OF_LONG_WORK = 2
"""A case that asks for more work than there is time for is interrupted then."""
CODES = {0: "done", 2: "told", 130: "interrupted"}
MORE_CODES = {"doctor": {1: "done"}}
"""Some result is wrong."""
GOOD = ("done", "told", "interrupted")
BAD = ("traceback", "hang", "death", "memory", "outside", "not finite", "badly told", "unmade")


class Ending(NamedTuple):
    """What became of a case."""

    index: int
    family: str
    outcome: str
    """One of GOOD or of BAD."""
    why: str
    command: str
    seconds: float
    """Of the processor."""


# ---- one case, in a process of its own ----


def snapshot(folder):
    """Everything below a folder that a command might change, without following links."""
    found = {}
    for directory, names, files in os.walk(folder):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            about = os.lstat(path)
            seen = [about.st_mode, about.st_ino]
            if stat.S_ISREG(about.st_mode):
                seen += [about.st_size, about.st_mtime_ns]
            found[os.path.relpath(path, folder)] = seen
    return found


def live(seed, index, assets, folder):
    """Make the case and run its command as ``python -m`` would; ends the process."""
    from bad_cases import Place, main_of, make

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("work", "home", "inputs", "bystander/folder"):
        (folder / name).mkdir(parents=True)
    (folder / "bystander" / "text.txt").write_text("not yours\n")
    (folder / "bystander" / "folder" / "data.json").write_text('{"not": "yours"}\n')
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder / "home")
    tempfile.tempdir = None
    try:
        case = make(seed, index, Place(folder, assets))
    except BaseException:
        (folder / "broken.txt").write_text(traceback.format_exc())
        os._exit(99)
    about = {"command": case.command, "argv": case.argv, "is_long": case.is_long}
    about["before"] = {name: snapshot(folder / name) for name in ("bystander", "inputs")}
    (folder / "case.tmp").write_text(json.dumps(about))
    (folder / "case.tmp").rename(folder / "case.json")
    os.chdir(folder / "work")
    for number, name in ((0, os.devnull), (1, folder / "stdout"), (2, folder / "stderr")):
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(name, mode), number)
    # As Python opens them, for the runner's own have been written to.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    imitate_a_small_machine()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If nobody watches any more.
    resource.setrlimit(resource.RLIMIT_CPU, (4 * MOST_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    sys.argv = [case.command, *case.argv]
    code = 1
    try:
        code = main_of(case.command)(case.argv)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
    os._exit(code if isinstance(code, int) else 1)


def imitate_a_small_machine():
    """Have the number of pages of memory be that of the memory a case may take."""
    real = os.sysconf
    pages = MOST_BYTES // real("SC_PAGE_SIZE")
    os.sysconf = lambda name: min(real(name), pages) if name == "SC_PHYS_PAGES" else real(name)


# ---- watching ----


def uses(pid):
    """(bytes, seconds of the processor) of a process and those it has started."""
    num_bytes, seconds = 0, 0.0
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        num_bytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        # Its own, and of children that have ended.
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    more_bytes, more_seconds = uses(child)
                    num_bytes, seconds = num_bytes + more_bytes, seconds + more_seconds
    return num_bytes, seconds


class Child:
    """A case that is running."""

    def __init__(self, seed, index, assets, folder):
        self.index, self.folder = index, folder
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                live(seed, index, assets, folder)
            finally:
                os._exit(98)
        self.own_bytes = None
        self.last, self.idle_since = -1.0, time.monotonic()
        self.seconds, self.stopped_at, self.verdict = 0.0, None, None

    def look(self):
        """Judge what it uses; its wait status once it has ended, else none."""
        pid, status, spent = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.seconds = spent.ru_utime + spent.ru_stime
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what it may have left behind
            return status
        num_bytes, seconds = uses(self.pid)
        if self.own_bytes is None and num_bytes:
            self.own_bytes = num_bytes  # what it shares with this process
        now = time.monotonic()
        if seconds > self.last:
            self.last, self.idle_since = seconds, now
        is_idle = now - self.idle_since > MOST_SECONDS
        if num_bytes - (self.own_bytes or 0) > MOST_BYTES:
            self.end("memory", f"{num_bytes - self.own_bytes:,} bytes")
        elif seconds > MOST_SECONDS + (self.stopped_at or 0) or is_idle:
            self.end("hang", "waits" if is_idle else f"{seconds:.0f} s of work")
        elif seconds > SECONDS_OF_LONG_WORK and self.stopped_at is None:
            self.stopped_at = 0.0
            about = self.folder / "case.json"
            if about.exists() and json.loads(about.read_text())["is_long"]:
                self.stopped_at = seconds
                os.kill(self.pid, signal.SIGINT)
        return None

    def end(self, outcome, why):
        """Stop it for what it does."""
        self.verdict = outcome, why
        os.killpg(self.pid, signal.SIGKILL)


def judged(child, status, assets, assets_before):
    """The ending of a child that is gone."""
    from bad_cases import family_of

    folder, family, command = child.folder, family_of(child.index), ""
    broken = folder / "broken.txt"
    if not (folder / "stderr").exists():
        outcome, why = "unmade", broken.read_text() if broken.exists() else "died"
    else:
        about = json.loads((folder / "case.json").read_text())
        command = " ".join([about["command"], *map(shown, about["argv"])])
        outcome, why = child.verdict or verdict(folder, status, about)
        changed = differences(assets_before, snapshot(assets))
        for name, before in about["before"].items():
            found = differences(before, snapshot(folder / name))
            # What --output names is locked before anything in it is looked at.
            changed += [f for f in found if name != "inputs" or not f.endswith("/.lock")]
        if changed and outcome in GOOD:
            outcome, why = "outside", ", ".join(changed[:3])
    return Ending(child.index, family, outcome, why, command, child.seconds)


def differences(before, after):
    """Names of what is not as it was."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def verdict(folder, status, about):
    """The outcome by exit code and by what was said."""
    stderr = (folder / "stderr").read_bytes().decode(errors="backslashreplace")
    stdout = (folder / "stdout").read_bytes().decode(errors="backslashreplace")
    tail = shown(" / ".join(stderr.split("\n")[-4:]), 300)
    if os.WIFSIGNALED(status):
        return "death", f"signal {os.WTERMSIG(status)}; {tail}"
    code = os.WEXITSTATUS(status)
    codes = CODES | MORE_CODES.get(about["command"], {})
    if "Traceback (most recent call last)" in stderr or code not in codes:
        return "traceback", f"exit code {code}; {tail}"
    last = stderr.rstrip("\n").split("\n")[-1]
    num_errors = len(re.findall("^error: ", stderr, re.MULTILINE))
    if code == 2 and not (
        num_errors == 1 and last.startswith("error: ") and last.isprintable()
    ):
        return "badly told", tail
    if code == 2 and len(last) >= 2000:
        return "badly told", f"{len(last):,} characters: {shown(last)}"
    if code in (0, 130) and num_errors:
        return "badly told", f"exit code {code}; {tail}"
    # A pack may be called inf.
    number = r"(?<!--data\.pack )(?<!\w)(nan|inf)(?!\w)"
    if code == 0 and (found := re.search(number, stdout)):
        return "not finite", shown(stdout[max(0, found.start() - 100) :], 200)
    return codes[code], tail


def shown(text, most=120):
    """Any text on one line."""
    text = ascii(text)[1:-1]
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


# ---- all of them ----


class Nursery:
    """Runs cases; everything is imported and built once.

    Args:
        folder: of everything; what it already holds of an earlier call is used again.
    """

    def __init__(self, folder):
        self.folder, self.assets = Path(folder), Path(folder) / "assets"
        prepare_process(self.folder)
        import bad_cases

        bad_cases.import_all()
        if not (self.assets / "complete").exists():
            shutil.rmtree(self.assets, ignore_errors=True)
            self.assets.mkdir(parents=True)
            # In a child, so that no pool of threads is there when the others are forked.
            pid = os.fork()
            if pid == 0:
                try:
                    bad_cases.build(self.assets)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError("the inputs cannot be built; see above")

    def run(self, seed, indices, jobs=2, keep=False, tell=lambda ending: None):
        """The endings of some cases, in the order they ended."""
        left, running, endings = list(indices)[::-1], [], []
        before = snapshot(self.assets)
        try:
            while left or running:
                while left and len(running) < jobs:
                    index = left.pop()
                    folder = self.folder / f"case-{seed}-{index}"
                    shutil.rmtree(folder, ignore_errors=True)
                    running.append(Child(seed, index, self.assets, folder))
                time.sleep(0.03)
                for child in list(running):
                    status = child.look()
                    if status is None:
                        continue
                    running.remove(child)
                    ending = judged(child, status, self.assets, before)
                    if not keep:
                        shutil.rmtree(child.folder, ignore_errors=True)
                    endings.append(ending)
                    tell(ending)
        finally:
            for child in running:
                os.killpg(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
        return endings


def prepare_process(folder):
    """Few threads, no network, caches of its own; before anything large is imported."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "huggingface")}
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # built extensions
    root = Path(__file__).resolve().parents[1]
    for folder in (root, root / "tests", root / "book"):
        sys.path.append(str(folder))


def table(endings):
    """Families and outcomes."""
    counts = Counter((e.family, e.outcome) for e in endings)
    columns = [*GOOD, *(name for name in BAD if any(e.outcome == name for e in endings))]
    yield f"{'':<14}" + "".join(f"{name:>13}" for name in columns)
    for family in sorted({e.family for e in endings}):
        numbers = [counts[family, outcome] for outcome in columns]
        yield f"{family:<14}" + "".join(f"{number:>13}" for number in numbers)


def main():
    """Exit code 1 if any case ended badly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", help="of all cases only these")
    parser.add_argument("--only", type=int, nargs="+", help="indices")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a directory for the cases; they stay there")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="bad-input-"))
    nursery = Nursery(folder.resolve())
    from bad_cases import family_of

    indices = options.only or range(options.cases)
    indices = [i for i in indices if options.family in (None, family_of(i))]
    start = time.monotonic()

    def tell(ending):
        if ending.outcome in BAD or options.only:
            name = f"{ending.family} --seed {options.seed} --only {ending.index}"
            print(f"{name}: {ending.outcome}, {ending.seconds:.1f} s: {ending.why}")
            print(f"    {shown(ending.command, 600)}", flush=True)

    endings = nursery.run(options.seed, indices, options.jobs, bool(options.only), tell)
    print("\n".join(table(endings)))
    spent = sum(ending.seconds for ending in endings)
    print(f"{len(endings)} cases, {spent:.0f} s of work, {time.monotonic() - start:.0f} s")
    if not options.keep:
        shutil.rmtree(folder)
    return any(ending.outcome in BAD for ending in endings)


if __name__ == "__main__":
    sys.exit(main())
