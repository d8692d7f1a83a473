"""Record the two runs that the chapter on reading the DAG shows but does not train.

    python -m exlm_mini.pretrain --recipe toy-pairs --objective exlm --data.grammar quartets \\
        --model.states_per_mask 4 --model.boundary paper \\
        --train.num_threads 1 --output runs/quartets
    python -m exlm_mini.pretrain --recipe toy-pairs --objective exlm --data.grammar town \\
        --model.states_per_mask 4 --model.boundary paper --model.max_positions 128 \\
        --train.num_threads 1 --output runs/town
    python book/case_study.py runs/quartets runs/town --to book/results/case-study.json

Each becomes a record of ``book/record.py`` with what the chapter needs besides::

    quartets  text    the sentence that was read, with [MASK]
              scene   what an explorer shows of it (``Scene.to_json``)
    town      num_sentences       how many were read, all slots of the language masked
              state_entropy_bits  for each mask, ``path_entropy(reading).word_S``, their mean

The file holds these two records and no other; a case study recorded before is replaced.
"""

from __future__ import annotations

import argparse
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from record import DIGITS, read_records, record_of, tell, write_records
from torch import Tensor

from exlm_mini.config import UserError
from exlm_mini.data.tokenizer import MASK
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.fill import Loaded, encode_row, load_run, read
from exlm_mini.options import command_parser
from exlm_mini.reading.decoding import Reading
from exlm_mini.reading.entropy import path_entropy
from exlm_mini.reading.scene import read_scene
from exlm_mini.training.console import exit_code

SENTENCE = "the old baker felt [MASK] this morning so his sister [MASK]"
NUM_SENTENCES = 40
SEED = 2
"""Of the sentences of ``town``."""
ADDED = {"quartets": {"text", "scene"}, "town": {"num_sentences", "state_entropy_bits"}}
"""By language, what a record of the case study holds besides a record of ``book/record.py``."""


def case_study(quartets: Path, town: Path) -> list[dict[str, Any]]:
    """The two records.

    Raises:
        UserError: a run is not finished, or not one of those the chapter describes.
    """
    runs = {"quartets": quartets, "town": town}
    # Both are looked at before the sentences are read, which takes seconds.
    records = {name: record_of(run) for name, run in runs.items()}
    for name, run in runs.items():
        _check(run, records[name], name)
    loaded = {name: _load(run) for name, run in runs.items()}
    row_BN, reading = _read(loaded["quartets"], SENTENCE)
    scene = read_scene(reading, loaded["quartets"].tokenizer, row_BN)
    bits_S = town_entropy_bits(loaded["town"], NUM_SENTENCES)
    return [
        records["quartets"] | {"text": SENTENCE, "scene": scene.to_json()},
        records["town"]
        | {
            "num_sentences": NUM_SENTENCES,
            "state_entropy_bits": [round(bits, DIGITS) for bits in bits_S],
        },
    ]


def town_entropy_bits(loaded: Loaded, num_sentences: int) -> list[float]:
    """For each mask the entropy of what its states say, weighted by the paths; the mean over
    sentences of the language with all slots masked."""
    language = grammar(loaded.config.data.grammar)
    found = []
    for word_ids_N in language.sample(num_sentences, seed=SEED):
        words = [language.words[w] for w in word_ids_N]
        for slot in language.slots:
            words[slot] = MASK
        found.append(path_entropy(_read(loaded, " ".join(words))[1]).word_S)
    return torch.stack(found).mean(dim=0).tolist()


def check_target(target: Path) -> None:
    """Refuse to write over records that are none of a case study.

    Raises:
        UserError: the file is there and holds something else.
    """
    for record in read_records(target):
        if not any(added <= record.keys() for added in ADDED.values()):
            raise UserError(
                f"{target} holds the run {record['command']}, which is none of a case study; "
                "choose another --to"
            )


def _check(run: Path, record: dict[str, Any], language: str) -> None:
    """Refuse a run with other settings than the chapter describes."""
    wanted = {
        "objective": "exlm",
        "data.kind": "toy",
        "data.grammar": language,
        "model.states_per_mask": 4,
        "model.boundary": "paper",
        "model.transition": "gated",
    }
    for name, value in wanted.items():
        found = reduce(getitem, name.split("."), record["config"])
        if found != value:
            raise UserError(
                f"{run} was trained with {name} {found}, not {value}; --help shows the command "
                f"for {language}"
            )


def _load(run: Path) -> Loaded:
    """The model of a run, trained to the end."""
    loaded = load_run(run)
    if loaded.step != loaded.config.train.steps:
        raise UserError(
            f"{run} has no intact checkpoint of its last step {loaded.config.train.steps}, only "
            f"of step {loaded.step}; train it again"
        )
    return loaded


def _read(loaded: Loaded, text: str) -> tuple[Tensor, Reading]:
    """Row and reading of a text."""
    row_BN = encode_row(loaded, text)
    return row_BN, read(loaded, row_BN)


def run(arguments: argparse.Namespace) -> None:
    """Record the case study."""
    check_target(arguments.to)  # before any run is read
    records = case_study(arguments.quartets, arguments.town)
    tell(records, arguments.to, write_records(arguments.to, records))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/case_study.py", __doc__)
    for name in ADDED:
        metavar, text = f"RUN_{name.upper()}", f"--output of the run on {name}"
        parser.add_argument(name, type=Path, metavar=metavar, help=text)
    parser.add_argument("--to", required=True, type=Path, help="the .json file to write")
    return exit_code(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
