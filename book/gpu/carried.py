"""What is carried to a GPU machine: packs and tasks as ids, made before by ``carry.py``.

One directory, a folder for each study::

    STUDY/study.json            what is studied: settings, tasks, hashes
    STUDY/train.json            a pack, its binary files compressed (NAME.bin.xz)
    STUDY/validation.json
    STUDY/tasks/NAME.safetensors
"""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.encoded import EncodedTask, load_encoded_task
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import UserError
from exlm_mini.data.files import read_json, reading
from exlm_mini.data.packs import Pack

FORMAT = "exlm-mini carried study 1"
PACKS = ("train", "validation")
NEEDED = {
    "kind", "row_length", "vocab_size", "max_positions", "states_per_mask", "mask_ratio",
    "block_length", "tokenizer_sha256", "tasks", "recipe", "report", "changed",
}  # fmt: skip
"""Of ``study.json``, to train and to fine-tune."""
REMEDY = "make it again with python book/gpu/carry.py"


class Study(NamedTuple):
    """One of the folders."""

    path: Path
    about: dict[str, Any]
    """What ``study.json`` holds."""

    @property
    def tasks(self) -> list[str]:
        """In the order in which they are fine-tuned."""
        return list(self.about["tasks"])

    def task(self, name: str) -> EncodedTask:
        """One of the tasks.

        Raises:
            UserError: its file is damaged, or was made for another vocabulary.
        """
        path = self.path / "tasks" / f"{name}.safetensors"
        encoded, made_for = load_encoded_task(path)
        if made_for.get("tokenizer_sha256") != self.about["tokenizer_sha256"]:
            raise UserError(f"{path} was made for another tokenizer; {REMEDY}")
        return encoded

    def packs(self, folder: Path) -> tuple[Pack, Pack]:
        """Training and validation rows, unpacked into a folder if they are not there yet.

        Raises:
            UserError: a file is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for name in PACKS:
            for source in sorted(self.path.glob(f"{name}.*bin.xz")):
                _unpack(source, folder / source.name.removesuffix(".xz"))
            side = self.path / f"{name}.json"
            shutil.copyfile(side, folder / side.name)
            found.append(Pack.open(folder / side.name))
        return found[0], found[1]


def open_study(carried: Path, name: str) -> Study:
    """A study by name.

    Raises:
        UserError: it is not there, not what ``carry.py`` writes, or lacks a file.
    """
    file = carried / name / "study.json"
    try:
        about = read_json(file)
    except UserError as error:
        raise UserError(f"{str(error).partition(';')[0]}; {REMEDY}") from None
    if about.get("format") != FORMAT:
        raise UserError(f"{file} describes no carried study; {REMEDY}")
    study = Study(file.parent, about)
    # Now, and not when hours of pre-training are over.
    with reading(file, REMEDY):
        if lacking := NEEDED - about.keys():
            raise ValueError(f"{min(lacking)} is missing")
        for settings in about["tasks"].values():
            TuneConfig(**settings)
        wanted = [f"{pack}{suffix}" for pack in PACKS for suffix in (".json", ".bin.xz")]
        wanted += [f"tasks/{task}.safetensors" for task in study.tasks]
    for path in wanted:
        if not (study.path / path).is_file():
            raise UserError(f"{study.path / path} is missing; {REMEDY}")
    return study


def _unpack(source: Path, target: Path) -> None:
    """Decompress a file once; ``Pack.open`` compares its hash each time."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    try:
        with lzma.open(source, "rb") as packed, open(partial, "wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (lzma.LZMAError, EOFError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{source} is damaged ({error}); {REMEDY}") from None
    partial.replace(target)
