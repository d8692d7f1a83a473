"""Kill commands at random moments, run them again, and compare with an undisturbed run.

    python tests/stress/kills.py --kills 100

A command runs in a process forked from this one, in which everything is imported already, so that
its time is spent on its work. It is killed (SIGKILL) at a moment drawn uniformly from the time an
undisturbed run takes, either with all its processes or alone, so that its workers are left behind.
Or it is killed just before one of its changes of the disk, each equally likely, because the
critical windows there are narrow. Half of the commands are started again and killed a second time.
Then the same command runs to its end.

Every file of the output must be equal byte for byte, except for the lock, which holds a pid, the
JSON fields in ``FREE`` and the seconds in ``table.md``. No other file or directory may be left.
The exit code is 1 if anything differs.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

FREE = {
    "seconds", "tokens_per_second", "model_flops_per_second", "peak_memory_mib", "commit", "seal",
}  # fmt: skip
"""JSON fields that may differ: measurements, the commit, and the seal that covers them."""
LOCK = ".lock"
SECONDS = 900
"""Time limit of a command, longer than any takes."""

MODEL = ["--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"]
PRETRAIN = [
    *("--recipe", "toy-pairs", "--train.grow_at", "0.5", "--data.num_sentences", "64", *MODEL),
    *("--train.steps", "40", "--train.batch_size", "4", "--train.validation_rows", "16"),
    *("--train.validate_every", "10", "--train.save_every", "3", "--train.keep_last", "2"),
    *("--train.log_every", "1", "--train.device", "cpu"),
]


# ---- the commands ----


def pretrain(common, output, rng):
    """An MLM that grows into an ExLM, on sentences that the command draws."""
    from exlm_mini import pretrain

    return pretrain.main([*PRETRAIN, "--output", str(output)])


def prepare_text(common, output, rng):
    return _prepare(common / "text.txt", output, rng, "--data.vocab_size", "300")


def prepare_molecules(common, output, rng):
    options = "--data.kind", "smiles", "--canonical"
    return _prepare(common / "molecules.smi", output, rng, *options)


def _prepare(source, output, rng, *options):
    """Use a random number of processes, because the packs must not depend on it."""
    from exlm_mini import prepare
    from exlm_mini.data import shards

    argv = ["--source", source, "--output", output, "--workers", rng.choice((1, 1, 2, 3))]
    argv += ["--data.block_length", "64", "--data.validation_share", "0.2"]
    shards.SHARD_BYTES = 10_000
    return prepare.main([str(word) for word in [*argv, *options]])


def finetune(common, output, rng):
    """Two seeds on forty molecules."""
    from exlm_lab import finetune

    argv = ["--task", "bbbp", "--checkpoint", common / "run", "--data", common]
    argv += ["--seeds", "1", "2", "--train.epochs", "10", "--output", output]
    argv += ["--device", "cpu", "--threads", "1"]
    return finetune.main([str(word) for word in argv])


def sweep(common, output, rng):
    """The sweep ``ablations`` with two tiny cells in place of its own."""
    from tiny_runs import CELL, TASK

    from exlm_lab import sweep
    from exlm_lab.experiments.catalogue import EXPERIMENTS
    from exlm_lab.experiments.cells import Cell, Experiment

    mlm = {**CELL, "train.steps": 30}
    exlm = {**mlm, "objective": "exlm", "model.states_per_mask": 2, "masking.mask_ratio": 0.3}
    cells = tuple(
        Cell(name, "toy", "sweep/toy", settings, TASK, seeds=(1,))
        for name, settings in (("toy-exlm", exlm), ("toy-mlm", mlm))
    )
    EXPERIMENTS["ablations"] = Experiment("ablations", "", cells)
    folders = ["--output", str(output / "results"), "--work", f"{output}-work"]
    return sweep.main(["ablations", *folders, "--device", "cpu"])


COMMANDS = {
    function.__name__.replace("_", " "): function
    for function in (pretrain, prepare_text, prepare_molecules, finetune, sweep)
}


def make_common(common, output, rng):
    """Write the inputs that several commands read."""
    from tiny_runs import tiny_run, write_molecules

    from exlm_mini.data.molecules import embedded_molecules
    from exlm_mini.data.toy_grammars import grammar

    words = grammar("pairs").words
    lines = [" ".join(rng.choices(words, k=30)) for _ in range(1000)]
    (common / "text.txt").write_text("\n".join(lines))
    (common / "molecules.smi").write_text("\n".join(list(embedded_molecules())[:1000]))
    write_molecules(common)
    tiny_run(common / "run", "smiles", max_positions=128)


def import_all():
    """Import what the commands use, including what they would import only when they need it."""
    for name in (
        "datasets", "exlm_mini.prepare", "exlm_mini.pretrain", "rdkit.Chem",
        "sklearn.linear_model", "tokenizers", "torch._dynamo", "yaml",
    ):  # fmt: skip
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # fork needs a single thread


# ---- processes ----


def start(function, common, output, seed, change=math.inf):
    """Run a command in a new process, the leader of its own group, and return its pid.

    The process kills itself just before change number ``change`` of the disk. If it comes to its
    end, it writes down how many changes it made.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        changes = Changes(output, change)
        sys.addaudithook(changes)
        code = function(common, output, random.Random(seed)) or 0
        Path(f"{output}.changes").write_text(str(changes.count))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Changes:
    """An audit hook that counts changes below a folder and kills the process at number ``last``."""

    NAMES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

    def __init__(self, folder, last):
        self.folder, self.last, self.count = str(folder), last, 0

    def __call__(self, event, arguments):
        if event not in self.NAMES:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        place = str(arguments[0])
        # Count relative names too, which shutil.rmtree uses, and files named by descriptor.
        if os.path.isabs(place) and not place.startswith(self.folder):
            return
        self.count += 1
        if self.count >= self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def ended(pid, seconds):
    """Exit code of a process, negative for a signal; None if it still runs after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def finish(function, common, output, seed):
    """Run a command to its end; return its seconds and its number of changes of the disk."""
    began = time.monotonic()
    code = ended(start(function, common, output, seed), SECONDS)
    if code != 0:
        said = Path(f"{output}.log").read_text()
        raise AssertionError(f"the command failed with exit code {code}:\n{said[-2000:]}")
    return time.monotonic() - began, int(Path(f"{output}.changes").read_text())


def kill(function, common, output, rng, seconds, changes):
    """Start a command and kill it; return the moment in words, or None if it had ended before."""
    seed, how = rng.random(), rng.choice(("all", "alone", "change"))
    if how == "change":
        moment = rng.randint(1, changes)
        code = ended(start(function, common, output, seed, moment), SECONDS)
        told = f"change {moment}"
    else:
        moment = rng.uniform(0, seconds)
        pid = start(function, common, output, seed)
        code, told = ended(pid, moment), f"{moment:.2f} s {how}"
        if code is None:
            (os.killpg if how == "all" else os.kill)(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), Path(f"{output}.log").read_text()[-2000:]
    return told if code else None


# ---- what is compared ----


def contents(directory):
    """Every file and directory below ``directory``, by path, without the fields that may differ."""
    return {
        str(path.relative_to(directory)): _content(path)
        for path in sorted(directory.rglob("*"))
        if path.name != LOCK
    }


def _content(path):
    match path.suffix:
        case _ if path.is_dir():
            return "directory"
        case ".json":
            return _settled(json.loads(path.read_text()))
        case ".jsonl":
            return [_settled(json.loads(line)) for line in path.read_text().splitlines()]
        case ".md":
            return re.sub(r"in [\d,]+ s", "in some seconds", path.read_text())
    return path.read_bytes()


def _settled(value):
    if isinstance(value, dict):
        return {key: _settled(item) for key, item in value.items() if key not in FREE}
    return [_settled(item) for item in value] if isinstance(value, list) else value


def trial(name, folder, whole, effort, rng, log):
    """Kill a command once or twice, then let it end; return the kills and whether all is equal."""
    function, common, output = COMMANDS[name], folder / "common", folder / "killed" / "output"
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir()
    told = [kill(function, common, output, rng, *effort) for _ in range(rng.choice((1, 2)))]
    finish(function, common, output, rng.random())
    told, left = [moment for moment in told if moment], contents(output)
    other = sorted(f for f in left.keys() | whole.keys() if left.get(f) != whole.get(f))
    if other:
        log(f"{name}: killed at {', '.join(told)}: these files differ: {', '.join(other[:5])}")
    return len(told), not other


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=int(os.environ.get("EXLM_KILLS", 8)))
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    log = partial(print, flush=True)
    import_all()
    rng, num_other = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        folder = Path(place)
        common, output = folder / "common", folder / "whole" / "output"
        common.mkdir()
        finish(make_common, common, folder / "made", asked.seed)
        log(f"{'command':20}{'kills':>8}{'same':>8}{'other':>8}")
        for i, name in enumerate(asked.only):
            wanted = asked.kills // len(asked.only) + (i < asked.kills % len(asked.only))
            output.parent.mkdir()
            effort = finish(COMMANDS[name], common, output, 0)
            whole = contents(output)
            shutil.rmtree(output.parent)
            kills = same = 0
            while kills < wanted:
                more, is_same = trial(name, folder, whole, effort, rng, log)
                kills, same = kills + more, same + more * is_same
            log(f"{name:20}{kills:8}{same:8}{kills - same:8}")
            num_other += kills - same
    return int(num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
