"""GLUE's tasks in a few rows each, laid out as on the hub."""

import pandas

ROWS = {
    "cola": (
        ("sentence",),
        [("The sailors rode.", 1), ('Sailors the "rode.', 0)],
    ),
    "sst2": (
        ("sentence",),
        [("a charming journey . ", 1), ("flat ", 0)],
    ),
    "mrpc": (
        ("sentence1", "sentence2"),
        [("He said so.", '"He said so.', 1), ("A bank.", "A shop.", 0)],
    ),
    "stsb": (
        ("sentence1", "sentence2"),
        [("A man.", "A boy.", 3.8), ("A dog.", "The dog.", 5.0)],
    ),
    "qqp": (
        ("question1", "question2"),
        [("How is it?", "How was it?", 0), ('Why "so"?', "Why?", 1)],
    ),
    "mnli": (
        ("premise", "hypothesis"),
        [("It rains.", "It is dry.", 2), ("He ate.", "He was there.", 0)],
    ),
    "qnli": (
        ("question", "sentence"),
        [("When?", "In 1970.", 0), ("Where?", "In 1970.", 1)],
    ),
    "rte": (
        ("sentence1", "sentence2"),
        [("No one came.", "Some came.", 1), ("Three came.", "Some came.", 0)],
    ),
}  # fmt: skip


def table(name: str) -> pandas.DataFrame:
    columns, rows = ROWS[name]
    return pandas.DataFrame(rows, columns=[*columns, "label"]).assign(idx=range(len(rows)))


def write_task(root, name, folder=None):
    """The folder of a task with a parquet file of every split; ``folder`` is its name."""
    halves = ("_matched", "_mismatched") if name == "mnli" else ("",)
    path = root / (folder or name)
    path.mkdir(parents=True, exist_ok=True)
    for split in ("train", *(f"validation{half}" for half in halves)):
        table(name).to_parquet(path / f"{split}-00000-of-00001.parquet")
    return path
