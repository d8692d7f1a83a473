"""Cases whose files are spoilt: documents, tables, and what the project itself wrote."""

import contextlib
import gzip
import json
import pickle
from pathlib import Path

from bad_cases import (
    KINDS,
    MODEL,
    TASKS,
    TRAIN,
    Case,
    copy_run,
    family,
    filling,
    preparing,
    pretraining,
    tuning,
    words,
    write_lmdb,
)
from damage import damage_bytes, damage_json, damage_log, damage_text

# ---- documents ----


def molecule(rng):
    """SMILES that are hard to read, or none."""
    n = rng.choice([1, 30, 300, 5000, 100_000])
    few = min(n, 3000)
    some = rng.choice(["C", "c1ccccc1", "C=C", "O=C(O)", "[nH]1cccc1", "[C@@H](F)(Cl)", "."])
    return rng.choice(
        [
            "C" * n, some * few, "C(" * n + "C" + ")" * n, "(" * n, "C" + ")" * n, "[" * n,
            "C1" * n, "".join(f"C%({i})" for i in range(few)), "C" + "+" * n, f"[C{'+' * n}]",
            f"[{n}C]", f"[C:{n}]", f"[CH{n}]", f"[C+{'9' * few}]", "/C=C/" * min(n, 300),
            "[C@TH9]", "[Pt@OH31]", "*" * n, "C>>C", "CC |$_AP1$|", "C~C", "[#999]", "[Xx]", "[]",
            "C12345C12345", "c1" + "c" * n + "1", "C1" + "C2" * min(n, 50) + "C21" * min(n, 50),
            "", "=" * n, "C==C", "\u0421\u0421\u041e", "C\0C", "C\udcffC", "C\tC", "C\u2028C",
            "[2H]" * few, "C%1", "9" * n, "C(C)(C)" * few, "c1ccc2ccccc2c1" * min(n, 300),
            "[Na+].[Cl-]" * min(n, 999), "".join(rng.choices("CNOcno()[]=#12%+-@./\\H", k=few)),
        ]
    )  # fmt: skip


def documents(rng, kind):
    """Good documents with a few bad ones among them."""
    good = ["CCO", "CCN", "CCC", "C1CC1"] if kind == "smiles" else ["the cell", "of the dog"]
    rows = good * rng.choice([1, 10, 20])
    for _ in range(rng.choice([1, 1, 2, 5])):
        rows.insert(rng.randrange(len(rows)), molecule(rng) if kind == "smiles" else text(rng))
    return rows


def text(rng):
    """Text that nobody wrote."""
    n = rng.choice([1, 10, 1000, 100_000])
    return rng.choice(
        [
            "a" * n, "\0", "\ud800", "\ufeff", "\u2028" * n, "\x85", "\r" * n, "\n" * n,
            "e" + "\u0301" * n, "\U0001f600" * n, "\U0010ffff", "[MASK]" * min(n, 999), "[PAD]",
            "[BOS][EOS]", '"' * n, "a,b", "\\" * n, " " * n, "\t" * n, "\x1b[2J", "\u202e", "{" * n,
            "1" * n, "the " * n, "".join(map(chr, rng.choices(range(32, 55_000), k=min(n, 5000)))),
        ]
    )  # fmt: skip


def odd_bytes(rng, place):
    """Content of a file, as bytes, that is large, compressed too well, or no text."""
    size = rng.choice([1, 1000, 10**6])
    return rng.choice(
        [
            (b"a" * 50 * size, ".txt"),
            (b"ab cd ef\n" * size, ".txt"),
            (rng.randbytes(size), rng.choice([".txt", ".smi", ".csv"])),
            ("the é cell".encode(rng.choice(["latin1", "utf-16", "utf-32"])) * 99, ".txt"),
            (damage_bytes((place.assets / "t.txt").read_bytes(), rng), ".txt"),
            (b'text\n"' + b"x" * size, ".csv"),
            (b"text," * min(size, 10**5) + b"\n1,2\n", ".csv"),
            (b"C" * size + b"\n" + b"CCO\n" * 40, ".smi"),
            (b"\n" * size, rng.choice([".txt", ".smi", ".csv", ".jsonl"])),
        ]
    )


def reading(rng, place, path, kind, *more):
    """A command that reads a file of documents."""
    limits = ["--data.max_rejected", rng.choice(["0.01", "1"]), "--data.max_unknown", "1"]
    if rng.random() < 0.6:
        argv = preparing(path, place, "--data.kind", kind, *limits, *more)
        ways = ("--canonical", "--strip-stereo", "--largest-fragment")
        clean = [way for way in ways if kind == "smiles" and rng.random() < 0.2]
        return Case("prepare", [*argv, *clean])
    sizes = ["--data.block_length", "16", "--data.vocab_size", "300", "--data.kind", kind]
    argv = ["--recipe", f"{kind}-tiny", *MODEL, *TRAIN, "--data.source", path, *sizes, *limits]
    return Case("pretrain", [*argv, "--output", place.out, *more])


@family(10)
def smiles(rng, place):
    """Molecules that RDKit or a model cannot take."""
    way = rng.random()
    if way < 0.15:
        return Case("fill", [f"{molecule(rng)}[MASK]{molecule(rng)}"[:100_000], "--run",
                             place.assets / "runs" / "smiles"])  # fmt: skip
    rows = documents(rng, "smiles")
    if way < 0.3:
        data = ["p_np,smiles", *(f"{n % 2},{row}" for n, row in enumerate(rows * 3))]
        path = place.file("BBBP.csv", "\n".join(data))
        split = ["--data.split", rng.choice(["unimol", "deepchem", "random"])]
        split += ["--data.canonical", rng.choice(["true", "false"])]
        return Case("finetune", tuning("bbbp", place, "--data", path, *split))
    suffix = rng.choice([".smi", ".smi", ".txt", ".csv", ".smi.gz", ".smi.xz"])
    head = ["smiles"] if suffix == ".csv" else []
    return reading(rng, place, place.file(f"m{suffix}", "\n".join([*head, *rows])), "smiles")


@family(8)
def texts(rng, place):
    """Text of bytes, lines and characters that do not belong there."""
    way = rng.random()
    if way < 0.15:
        words = f"{text(rng)} [MASK] {text(rng)}"[:100_000]
        return Case("fill", [words, "--run", place.assets / "runs" / rng.choice(KINDS),
                             *rng.choice([[], ["--json"], ["--html", place.out]])])  # fmt: skip
    if way < 0.5:
        content, suffix = odd_bytes(rng, place)
        suffix += rng.choice(["", "", "", ".gz", ".xz"])
        path = place.file(f"t{suffix}", content)
    elif way < 0.6:  # one of many gigabytes, once unpacked
        path = place.file("t.txt.gz", b"")
        path.write_bytes(gzip.compress(b"a" * (1 << 24)) * 400)
    else:
        rows = documents(rng, "text")
        content = {
            ".txt": "\n\n".join(rows),
            ".csv": "\n".join(["text", *rows]),
            ".jsonl": "\n".join(json.dumps({"text": row}) for row in rows),
        }
        suffix = rng.choice([*content])
        path = place.file(f"t{suffix}{rng.choice(['', '.gz', '.xz'])}", content[suffix])
    if path.suffix in (".gz", ".xz") and rng.random() < 0.3:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
    return reading(rng, place, path, rng.choice(["text", "text", "smiles"]))


# ---- tables ----

CELLS = [
    None, 0, -1, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", " ", "x" * 5000,
    "\n", "\ud800", [], [0], ["a"], {}, {"a": 1}, [[[[]]]], True, "1e400", "\0", "é",
    "9" * 5000,
]  # fmt: skip


def odd_table(rng):
    """A table of pyarrow whose column is of text in name only."""
    from decimal import Decimal

    import pyarrow as pa

    values, kind = rng.choice(
        [
            ([2**62], pa.timestamp("ms")), ([2**62], pa.duration("s")), ([10**9], pa.date32()),
            ([1], pa.time64("ns")), ([Decimal("9" * 38)], None), ([b"\xff\xfe", b"a"], None),
            ([["a"], None], None), ([{"a": 1}], None), ([1.5, float("nan")], None),
            ([None] * 3, None), ([True], None), (["a", None, "b"] * 20, None),
            (["a"] * 9, pa.dictionary(pa.int8(), pa.string())), (["a" * 10**6], None),
            ([], pa.string()), ([2**63], pa.uint64()), (["a"] * 20, pa.large_string()),
        ]
    )  # fmt: skip
    column = pa.array(values, kind)
    if rng.random() < 0.2:
        ends, content = b"\0\0\0\0\1\0\0\0\2\0\0\0", b"\xff\xfe"
        column = pa.StringArray.from_buffers(2, pa.py_buffer(ends), pa.py_buffer(content))
    return pa.table({rng.choice(["text"] * 5 + ["Text", "", "te\nxt"]): column})


@family(8)
def tables(rng, place):
    """Tables of documents and of tasks with other values, columns and types."""
    way = rng.random()
    if way < 0.25:
        import pyarrow.parquet

        path = place.folder / "inputs" / "t.parquet"
        pyarrow.parquet.write_table(odd_table(rng), path)
        if rng.random() < 0.3:
            path.write_bytes(damage_bytes(path.read_bytes(), rng))
        return reading(rng, place, path, "text")
    if way < 0.45:
        rows = [{"text": rng.choice(["the cell", "of a dog", *CELLS])} for _ in range(30)]
        lines = [json.dumps(row) for row in rows]
        odd = ['{"text": ' + "9" * 5000 + "}", '{"text": NaN}', "[" * 99_999, '{"text": "a"} x',
               '{"text": "a", "text": 5}', '{"text": "\\ud800"}', '"text"', "5", "{}"]  # fmt: skip
        lines.insert(rng.randrange(len(lines)), rng.choice([*odd, *lines]))
        return reading(rng, place, place.file("t.jsonl", "\n".join(lines)), "text")
    if way < 0.6:
        table = place.assets / rng.choice(["t.csv", "m.csv", "t.jsonl", "m.parquet"])
        path = place.file(table.name, damage_bytes(table.read_bytes(), rng))
        return reading(rng, place, path, "smiles" if path.name[0] == "m" else "text")
    task = rng.choice([*TASKS, "squad_v2", "squad_v2", "bbbp"])
    folder = place.copy(TASKS[task][1])
    pattern = {"squad_v2": "*.json", "bbbp": "BBBP.csv", "clintox": "clintox.csv"}.get(
        task, "*/*.parquet"
    )
    path = rng.choice(sorted(folder.glob(pattern)))
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        for _ in range(rng.choice([1, 1, 3])):
            content = damage_json(content, rng)
        path.write_text(json.dumps(content).replace('"odd"', "9" * 5000))
        if rng.random() < 0.2:
            path.write_bytes(damage_bytes(path.read_bytes(), rng))
    elif path.suffix == ".parquet":
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
    else:
        rows = [line.split(",") for line in path.read_text().splitlines()]
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = str(rng.choice([*CELLS, '"', "a\tb", "a,b"]))
        if rng.random() < 0.3:
            rng.choice(rows).append("more")
        content = "\n".join(",".join(row) for row in rows)
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        if rng.random() < 0.4:
            path.write_bytes(damage_text(path.read_text(errors="replace"), rng))
    return Case("finetune", tuning(task, place, "--data", folder))


@family(7)
def lmdb(rng, place):
    """Odd pickles in a file of LMDB."""
    import lmdb

    path = place.copy("m.lmdb")
    odd = [
        b"", b"x" * 100, pickle.dumps({"smi": 5}), pickle.dumps({}), pickle.dumps(["smi"]),
        pickle.dumps({"smi": molecule(rng)}), pickle.dumps({"smi": "C" * 10**6}),
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\x00\x00.", b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02" + b"]" * 100_000 + b".", b"\x80\x02(" * 9000 + b".", b"cos\nsystem\n.",
        b"\x80\x02]" + b"2" * 100_000 + b"l.", b"I" + b"9" * 5000 + b"\n.",
        b"\x80\x04]r\xff\xff\xff\x7f0.", b"\x80\x05\x96\xff\xff\xff\xff\x0f\0\0\0.",
        damage_bytes(pickle.dumps({"smi": "CCO", "target": [1]}), rng),
    ]  # fmt: skip
    path.unlink()
    good = [pickle.dumps({"smi": "CC" + "O" * (n % 3)}) for n in range(30)]
    write_lmdb(path, [*good, *rng.choices(odd, k=rng.choice([1, 1, 3]))], lmdb)
    return Case("prepare", preparing(path, place, "--data.max_rejected", "1"))


# ---- what the project itself wrote ----


@family(9)
def checkpoints(rng, place):
    """Checkpoints that are damaged."""
    kind, use = rng.choice(KINDS), rng.choice(["resume", "tune", "read", ""])
    if use == "resume":
        folder = copy_run(place, kind)
    elif use == "tune":
        (folder,) = place.copy("tuned", place.out).glob("running/*/*/seed-1")
        for path in place.out.rglob("seed-1.json"):
            path.unlink()
        path = rng.choice(sorted(folder.glob("checkpoint-*/*")))
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
        return Case("finetune", tuning("rte", place, "--keep"))
    else:
        folder = place.copy(f"runs/{kind}")
    paths = sorted((folder / "checkpoints").glob("step-*/*"))
    for path in rng.sample(paths, rng.choice([1, len(paths)])):
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
    if use == "resume":
        return Case("pretrain", pretraining(kind, place))
    if kind == "toy" or use == "read":
        return Case("fill", filling(kind, place, "--run", folder))
    task = "bbbp" if kind == "smiles" else "rte"
    return Case("finetune", tuning(task, place, "--checkpoint", folder))


@family(9)
def places(rng, place):
    """Links, pipes, sockets, devices and directories where the output has or gets a file."""
    command = rng.choice(words("pretrain pretrain pretrain prepare finetune sweep plot fill"))
    if command == "pretrain":
        kind = rng.choice(KINDS)
        if rng.random() < 0.7:
            folder = copy_run(place, kind)
            there = [path.relative_to(folder) for path in folder.rglob("*")]
        else:
            place.out.mkdir()
            there = []
        more = words(""".lock config.yaml config.yaml.tmp metrics.jsonl metrics.jsonl.tmp
            versions.json versions.json.tmp data data/corpus.json data/shards
            data/train.bin data/train.json data/tokenizer.json checkpoints
            checkpoints/step-000002 checkpoints/step-000002.tmp
            checkpoints/step-000002.replaced checkpoints/step-000003 tensorboard""")
        for name in rng.sample([*there, *map(Path, more)], rng.choice([1, 1, 2])):
            with contextlib.suppress(OSError):  # the second may lie below the first
                place.special(place.out / name, rng)
        return Case("pretrain", pretraining(kind, place))
    if command == "prepare":
        place.out.mkdir()
        names = words(""".lock .shards .shards/plan.json corpus.json train.bin train.bin.partial
            train.json tokenizer.json tokenizer.json.partial validation.bin
            .shards/tokenizer.json .shards/s0-u0000.unit.json train.offsets.bin""")
        place.special(place.out / rng.choice(names), rng)
        return Case(command, preparing(place.assets / rng.choice(["t.txt", "m.smi"]), place))
    if command == "finetune":
        place.copy("tuned", place.out)
        there = [path.relative_to(place.out) for path in place.out.rglob("*")]
        more = words(".lock results.json results.json.tmp table.md cells cells/rte running")
        place.special(place.out / rng.choice([*there, *map(Path, more)]), rng)
        return Case(command, tuning("rte", place, "--seeds", "1", "2"))
    if command == "sweep":
        names = words("out out/ablations out/ablations/toy-mlm-seed1.json out-work models")
        target = place.folder / rng.choice(names)
        place.special(target, rng)
        is_named = target in (place.out, place.folder / "models")
        if is_named and target.is_symlink():  # it is written through
            target.unlink()
            target.symlink_to("not-there")
        argv = ["ablations", "--only", "toy-mlm", "--seeds", "1", "--output", place.out]
        argv += rng.choice([[], ["--work", place.folder / "models"]])
        return Case(command, argv, True)
    target = Path(f"{place.out}.{'png' if command == 'plot' else 'html'}")
    place.special(target, rng)
    if not target.is_dir():  # what a person names, a link or a pipe, is written through
        target.unlink()
        target.symlink_to(rng.choice([target.name, "not-there/x"]))
    if command == "plot":
        return Case("plot", [place.assets / "runs" / "toy", "--output", target])
    return Case("fill", filling(rng.choice(KINDS), place, "--html", target))


@family(7)
def records(rng, place):
    """Logs and records: of runs, of fine-tuning, of sweeps."""
    way = rng.randrange(4)
    if way == 0:
        folder = place.copy("runs/toy")
        log = folder / "metrics.jsonl"
        log.write_bytes(damage_log(log.read_bytes(), rng))
        return Case("plot", [folder, "--output", f"{place.out}.svg"])
    if way == 1:
        folder = copy_run(place, "toy")
        log = folder / "metrics.jsonl"
        log.write_bytes(damage_log(log.read_bytes(), rng))
        return Case("pretrain", pretraining("toy", place))
    if way == 2:
        place.copy("tuned", place.out)
        damage_file(rng.choice(sorted(place.out.rglob("*.json*"))), rng)
        return Case("finetune", tuning("rte", place))
    folder = place.copy("sweeps")
    records = rng.choice(sorted(folder.iterdir()))
    records.write_bytes(damage_log(records.read_bytes(), rng))
    task = rng.choice([["--report"], ["--dry-run"]])
    return Case("sweep", [records.stem, *task, "--output", folder])


def damage_file(path, rng):
    """A value of a JSON file, or some bytes of any."""
    if path.suffix == ".json" and rng.random() < 0.8:
        content = json.loads(path.read_text())
        for _ in range(rng.choice([1, 1, 4])):
            content = damage_json(content, rng)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
