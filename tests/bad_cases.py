"""Cases of bad input for every command: command lines that work, and what spoils them.

A case is a function of its seed and index. A family is a function of a generator of random numbers
and a ``Place`` to put files in; most begin with a command that works and spoil one thing of it.
The families whose files are spoilt are in ``bad_files.py``.
"""

import gzip
import importlib
import json
import lzma
import os
import pickle
import random
import shutil
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from damage import damage_text

ROOT = Path(__file__).resolve().parents[1]
LAB = ("finetune", "sweep", "bench")
COMMANDS = ("pretrain", "prepare", "fill", "plot", "doctor", *LAB)


class Case(NamedTuple):
    """A command."""

    command: str
    """One of COMMANDS."""
    argv: list[str]
    is_long: bool = False
    """It may work longer than there is time for, and is interrupted then."""


class Place:
    """The files of one case, below ``folder``, and those that all cases share."""

    def __init__(self, folder, assets):
        self.folder, self.assets, self.out = folder, assets, folder / "out"

    def copy(self, name, target=None):
        """A copy of an asset that may be spoiled; among the inputs without a ``target``."""
        source = self.assets / name
        target = target or self.folder / "inputs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, target))

    def file(self, name, content):
        """An input with this content; where it lies."""
        path = self.folder / "inputs" / name
        content = (
            content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        )
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(content))
        return path

    def special(self, path, rng):
        """Something at a path where a file or a directory is expected."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.folder / "bystander"
        way = rng.randrange(9)
        if way < 4:
            targets = ("text.txt", "folder", "folder/data.json", "not-there")
            path.symlink_to(beside / targets[way])
        elif way == 4:
            path.symlink_to(path.name)
        elif way == 5:
            os.mkfifo(path)
        elif way == 6:
            path.mkdir()
        elif way == 7:
            try:
                with socket.socket(socket.AF_UNIX) as end:
                    end.bind(str(path))
            except OSError:  # the name is too long for a socket
                path.write_bytes(b"")
        else:
            try:  # never the device of the machine, which a rename would replace
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
            except PermissionError:
                path.mkdir()
        return path


FAMILIES = {}


def family(weight):
    """A function that makes cases; of so many in all."""

    def enter(function):
        FAMILIES[function.__name__] = (function, weight)
        return function

    return enter


def family_of(index):
    """Name of the family of a case; every stretch of cases has the same mixture."""
    importlib.import_module("bad_files")
    names = [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    random.Random(0).shuffle(names)
    return names[index % len(names)]


def make(seed, index, place):
    """The case of an index, its files written."""
    rng = random.Random(f"{seed} {index}")
    case = FAMILIES[family_of(index)][0](rng, place)
    return case._replace(argv=[os.fsdecode(os.fsencode(clean(word))) for word in case.argv])


def clean(word):
    """A word that a command line can hold."""
    word = str(word).replace("\0", "\N{SYMBOL FOR NULL}")
    return word.encode("utf-8", "surrogateescape" if "\udcff" in word else "replace").decode(
        "utf-8", "surrogateescape"
    )


def module_of(command):
    """Dotted name of the module of a command."""
    package = "exlm_lab" if command in LAB else "exlm_mini"
    return f"{package}.{command}"


def main_of(command):
    """The function of a command."""
    return importlib.import_module(module_of(command)).main


def words(text):
    """Words of a command line."""
    return text.split()


# ---- what works ----

MODEL = words("""--model.num_layers 1 --model.width 16 --model.num_heads 2 --model.ffn_width 16
    --model.max_positions 128""")
TRAIN = words("""--train.steps 2 --train.batch_size 4 --train.warmup_steps 1
    --train.validation_rows 4 --train.save_every 1 --train.log_every 1 --train.validate_every 1
    --train.num_threads 1 --train.device cpu""")
TUNE = words("--train.epochs 1 --train.batch_size 8 --seeds 1 --device cpu --threads 1")
KINDS = ("text", "smiles", "toy")
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
TASKS = {
    **dict.fromkeys(GLUE, ("text", "glue")),
    "squad_v2": ("text", "squad"),
    "bbbp": ("smiles", "moleculenet"),
    "clintox": ("smiles", "moleculenet"),
}
"""Kind of the model, and folder of the files."""
BENCHES = [
    "dag --shape 2,4,8 --device cpu",
    "step --shape 1,4,8 --threads 1 --device cpu",
]


def pretraining(kind, place, *more):
    """A run of two steps."""
    data = ["--data.num_sentences", "64", "--objective", "exlm"]
    if kind != "toy":
        data = ["--data.pack", place.assets / "corpora" / kind]
    recipe = "toy-pairs" if kind == "toy" else f"{kind}-tiny"
    return ["--recipe", recipe, *MODEL, *TRAIN, *data, "--output", place.out, *more]


def preparing(source, place, *more):
    """A corpus of a few rows."""
    sizes = ["--workers", "1", "--data.vocab_size", "300", "--data.block_length", "16"]
    return ["--source", source, "--output", place.out, *sizes, *more]


def tuning(task, place, *more):
    """Fine-tuning on a task whose files lie among the assets."""
    kind, folder = TASKS[task]
    checkpoint, data = place.assets / "runs" / kind, place.assets / folder
    argv = ["--task", task, "--checkpoint", checkpoint, "--data", data, *TUNE]
    return [*argv, "--max-unknown", "1", "--output", place.out, *more]


def filling(kind, place, *more):
    """A text with a mask for the run of a kind."""
    text = {"text": "the [MASK] of", "smiles": "CC[MASK]O", "toy": "[MASK] [MASK]"}[kind]
    return [text, "--run", place.assets / "runs" / kind, *more]


def working(rng, place, command):
    """A command line that works."""
    runs = place.assets / "runs"
    if command == "pretrain":
        dry = ["--dry-run"] if rng.random() < 0.5 else []
        return pretraining(rng.choice(KINDS), place, *dry)
    if command == "prepare":
        dry = ["--dry-run"] if rng.random() < 0.3 else []
        return preparing(place.assets / rng.choice(["t.txt", "m.smi"]), place, *dry)
    if command == "finetune":
        dry = ["--dry-run"] if rng.random() < 0.3 else []
        return tuning(rng.choice([*TASKS]), place, *dry)
    if command == "fill":
        return filling(rng.choice(KINDS), place)
    if command == "plot":
        return [runs / "toy", runs / "text", "--output", f"{place.out}.svg"]
    if command == "sweep":
        sweeps = ("repeated-mlm", "ablations", "saddle", "cost", "k-and-p")
        task = rng.choice([["--report"], ["--list"]])
        return [rng.choice(sweeps), *task, "--output", place.assets / "sweeps"]
    if command == "bench":
        return words(rng.choice(BENCHES))
    return []


def options_of(command, argv):
    """Options of a command."""
    if command == "bench":
        from exlm_lab import bench

        commands = bench._parser()._subparsers._group_actions[0]
        return list(commands.choices[argv[0]]._option_string_actions)
    if command == "doctor":
        return ["--help"]
    module = "exlm_mini.config.options" if command == "pretrain" else module_of(command)
    parser = importlib.import_module(module)._parser()
    return list(parser._option_string_actions)


def import_all():
    """All modules a case may need, so that none has to wait for them."""
    for command in COMMANDS:
        main_of(command)
    for name in (
        "exlm_lab.benchmarks.command", "exlm_lab.downstream.results",
        "exlm_lab.experiments.running", "exlm_mini.training.checkup",
        "datasets", "lmdb", "matplotlib.pyplot", "pandas",
        "pyarrow.parquet", "rdkit.Chem", "scipy.stats", "seaborn", "sklearn.metrics", "tokenizers",
        "torch._dynamo", "yaml",
    ):  # fmt: skip
        importlib.import_module(name)


def build(assets):
    """What the cases share: runs, corpora, tasks, sweeps and one file of each format."""
    import lmdb
    import pyarrow
    import pyarrow.parquet
    from glue_files import write_task
    from test_squad import PETS

    texts = [
        f"The {w} of the cell is {w} and the dog of {n}." for n, w in enumerate("abcde" * 12)
    ]
    rings = ["C1CCCCC1", "C1CCNCC1", "c1ccccc1", "C1CC1", "C1CCOC1", "c1ccncc1", "C1CCC1"]
    molecules = ["C" * (1 + n // 7) + "(=O)N" * (n % 2) + rings[n % 7] for n in range(70)]
    (assets / "t.txt").write_text("\n\n".join(texts))
    (assets / "m.smi").write_text("\n".join(molecules))
    place = Place(assets / "building", assets)
    (place.folder / "inputs").mkdir(parents=True)
    for name, column, rows in (("t", "text", texts), ("m", "smiles", molecules)):
        (assets / f"{name}.csv").write_text("\n".join([column, *rows]) + "\n")
        lines = [json.dumps({column: row}) for row in rows]
        (assets / f"{name}.jsonl").write_text("\n".join(lines))
        table = pyarrow.table({column: rows})
        pyarrow.parquet.write_table(table, assets / f"{name}.parquet")
        kind = "text" if name == "t" else "smiles"
        output = assets / "corpora" / kind
        source = assets / ("t.txt" if name == "t" else "m.smi")
        run(
            "prepare",
            preparing(source, place, "--output", output, "--data.validation_share", 0.2),
        )
    write_lmdb(
        assets / "m.lmdb", [pickle.dumps({"smi": m, "target": [0]}) for m in molecules], lmdb
    )
    for kind in KINDS:
        run("pretrain", pretraining(kind, place, "--output", assets / "runs" / kind))
    for name in GLUE:
        write_task(assets / "glue", name)
    (assets / "squad").mkdir()
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (assets / "squad" / name).write_text(json.dumps(PETS))
    (assets / "moleculenet").mkdir()
    rows = [f"{n},m{n},{n // 7 % 2},{smiles}" for n, smiles in enumerate(molecules)]
    (assets / "moleculenet" / "BBBP.csv").write_text("\n".join(["num,name,p_np,smiles", *rows]))
    rows = [f"{smiles},{n // 7 % 2},{n % 2}" for n, smiles in enumerate(molecules)]
    rows = "\n".join(["smiles,FDA_APPROVED,CT_TOX", *rows])
    (assets / "moleculenet" / "clintox.csv").write_text(rows)
    run("finetune", tuning("rte", place, "--output", assets / "tuned"))
    for sweep in ("repeated-mlm", "ablations", "saddle", "cost", "k-and-p"):
        (assets / "sweeps").mkdir(exist_ok=True)
        shutil.copy(ROOT / "book" / "results" / f"{sweep}.jsonl", assets / "sweeps")
    import yaml

    tiny = {"model": {"num_layers": 1, "width": 16, "num_heads": 2, "ffn_width": 16}}
    tiny |= {"data": {"kind": "smiles"}, "train": {"batch_size": 2, "num_threads": 1}}
    (assets / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    shutil.rmtree(place.folder)
    (assets / "complete").write_text("")


def run(command, argv):
    """Run a command that must work."""
    code = main_of(command)([str(word) for word in argv])
    if code:
        raise RuntimeError(f"{command} ended with {code}")


def write_lmdb(path, values, lmdb):
    """A file as Uni-Mol writes it."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, value in enumerate(values):
            transaction.put(b"%d" % i, value)


# ---- the command line ----

NUMBERS = words("""0 -1 1 2 3 7 64 1000 65536 2147483647 2147483648 9223372036854775807
    9223372036854775808 1e9 1e30 1e39 1e308 1e400 1e-30 1e-308 -0.0 0.5 0.999999 1.0 nan inf -inf .5
    1_000 0x10 1e3 \u0661\u0662 1/1 0/0 2/1 1/99999999999999999999 1,2,3 0,0,0 1,99999,99999
    2147483648,2,4 1:30 1-2""")
TEXTS = [
    "", " ", "x", "a\nb", "\t", "é", "\U0001f600", "\u202e", "\udcff", "x" * 5000, "9" * 5000,
    "../..", "-", "--", "=", "[]", "{}", "null", "None", "true", "auto", "cpu", "cuda:99", "cpu:1",
    "meta", "fp16", "bf16", "mlm", "exlm", "repeated-mlm", "none", "*", "[a", "%s",
    "{0}", "$HOME", "~root", "C", "[MASK]", "[MASK] " * 200, "C[MASK]", "(" * 3000, "hub:x",
    "hub:x,y,z,w,v", "zinc", "toy-pairs", "text-large", "slots", "steps=3", "seeds=-1", "ctc",
    "uniform", "paper", "chunked", "1d", "large", "town", "deepchem",
    "dag,step", "float64",
]  # fmt: skip
LONG = (
    "steps", "epochs", "num_sentences", "seconds", "tokens", "epoch-rows",
    "seeds", "only", "extra-backend", "backend", "against",
)  # fmt: skip
"""Ends of options that ask for work."""


def odd_path(rng, place):
    """A path that is not what an option needs; never one outside."""
    inputs = place.folder / "inputs"
    suffix = rng.choice(
        ["", ".yaml", ".json", ".jsonl", ".csv", ".txt", ".py", ".lmdb", ".smi"]
    )
    way = rng.randrange(6)
    if way == 0:
        return inputs / "not-there" / f"a{suffix}"
    if way == 1:
        return place.special(inputs / f"odd{suffix}", rng)
    if way == 2:
        return inputs / rng.choice(["n" * 300, "/".join(["d" * 100] * 60)])
    if way == 3:
        return place.file(f"bytes{suffix}", rng.randbytes(rng.choice([0, 1, 100, 5000])))
    if way == 4:
        names = ["a\nb.txt", "é.txt", "a b.yaml", "-x.txt"]
        return place.file(rng.choice(names), "some text\n")
    return place.copy(rng.choice(["t.txt", "runs/toy", "corpora/text", "tuned"]))


def odd_word(rng, place):
    """Anything that a person may type for a value."""
    way = rng.random()
    if way < 0.55:
        return rng.choice(NUMBERS)
    return rng.choice(TEXTS) if way < 0.8 else str(odd_path(rng, place))


@family(20)
def options(rng, place):
    """One or two options of any command with an odd value, behind a command line that works."""
    most = ["pretrain"] * 8 + ["finetune"] * 5 + ["prepare"] * 4 + ["bench"] * 4
    command = rng.choice([*most, *COMMANDS, "sweep", "plot", "fill"])
    argv, is_long = working(rng, place, command), False
    # Tracebacks are what this one is for.
    known = [option for option in options_of(command, argv) if option != "--debug"]
    for _ in range(rng.choice([1, 1, 1, 2])):
        option, value = rng.choice(known), odd_word(rng, place)
        is_long |= option.endswith(LONG)
        way = rng.random()
        if way < 0.05:
            argv.append(option)
        elif way < 0.1:
            argv.insert(rng.randrange(len(argv) + 1), value)
        else:
            argv += [f"{option}={value}"] if way < 0.5 else [option, value]
    return Case(command, argv, is_long)


@family(8)
def numbers(rng, place):
    """A number that is no number of its setting, in a run that is really made."""
    values = words("""0 1 2 1e-30 1e-8 0.5 1 10 1000 1e4 1e6 1e9 1e18 1e30 3e38 1e39 1e300
        65536 1000000 2147483647 2147483648 4294967297 1099511627776 9223372036854775807""")
    if rng.random() < 0.7:
        command, argv = "pretrain", pretraining(rng.choice(KINDS), place)
        if rng.random() < 0.2:
            argv += ["--objective", rng.choice(["mlm", "repeated-mlm"])]
        names = """model.num_layers model.width model.ffn_width model.num_heads model.max_positions
            model.states_per_mask model.clone_embedding_std model.emission_chunk model.init_std
            model.expand_at masking.mask_ratio masking.num_copies data.vocab_size data.block_length
            data.max_documents data.num_sentences train.batch_size train.micro_batch_size
            train.batch_tokens train.learning_rate train.warmup_steps train.adam_eps
            train.weight_decay train.clip_norm train.chain_warmup train.save_every
            train.keep_last train.validation_rows train.num_threads train.max_skipped seed"""
    else:
        command, argv = "finetune", tuning(rng.choice([*TASKS]), place)
        names = """train.batch_size train.micro_batch_size train.learning_rate train.warmup_share
            train.adam_eps train.weight_decay train.clip_norm train.dropout train.pooler_dropout
            threads seeds max-unknown data.split_seed"""
    name = rng.choice(names.split())
    number = rng.choice(values)
    if name == "train.batch_tokens":
        argv = [word for word in argv if word != "--train.batch_size"]
    return Case(command, [*argv, f"--{name}", number], name.endswith("num_sentences"))


@family(6)
def settings(rng, place):
    """A recipe or the stored settings of a run, damaged."""
    from exlm_lab.downstream.grid import RECIPES as TUNING
    from exlm_mini.config.recipes import RECIPES

    way = rng.randrange(4)
    if way == 0:
        path = rng.choice(sorted(RECIPES.glob("*.yaml")))
        recipe = place.file("mine.yaml", damage_text(path.read_text(), rng))
        return Case("pretrain", ["--recipe", recipe, "--dry-run", "--output", place.out])
    if way == 1:
        recipe = place.file(
            "mine.yaml", damage_text((place.assets / "tiny.yaml").read_text(), rng)
        )
        files = ["--data.source", place.assets / "m.smi", "--data.block_length", "16"]
        return Case("pretrain", ["--recipe", recipe, *files, *TRAIN, "--output", place.out])
    if way == 2:
        path = rng.choice(sorted(TUNING.glob("*.yaml")))
        recipe = place.file("mine.yaml", damage_text(path.read_text(), rng))
        return Case("finetune", tuning("rte", place, "--recipe", recipe, "--dry-run", "--grid"))
    kind = rng.choice(KINDS)
    copy_run(place, kind)
    stored = place.out / "config.yaml"
    stored.write_bytes(damage_text(stored.read_text(), rng))
    return Case("pretrain", pretraining(kind, place))


def copy_run(place, kind, is_half=True):
    """A run in the output of the case, by default without its last step."""
    place.copy(f"runs/{kind}", place.out)
    if is_half:
        shutil.rmtree(place.out / "checkpoints" / "step-000002")
    return place.out
