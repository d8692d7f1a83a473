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

The file holds these two records and no other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from record import DIGITS, record_of, write_json

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.config.recipes import dotted
from exlm_mini.data.tokenizer import MASK
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.reading.entropy import path_entropy
from exlm_mini.reading.scene import read_scene
from exlm_mini.reading.trained import Trained, encode_row, load, read
from exlm_mini.training.console import exit_code

SENTENCE = "the old baker felt [MASK] this morning so his sister [MASK]"
NUM_SENTENCES = 40
SEED = 2
"""Of the sentences of ``town``."""
SETTINGS = {
    "objective": "exlm",
    "model.states_per_mask": 4,
    "model.boundary": "paper",
    "model.transition": "gated",
}
"""Of both runs."""


def case_study(quartets: Path, town: Path) -> list[dict[str, Any]]:
    """The two records.

    Raises:
        UserError: a run is not finished, or not one of those the chapter describes.
    """
    # Both are looked at before the sentences are read, which takes seconds.
    records = [_record(quartets, "quartets"), _record(town, "town")]
    loaded = _load(quartets)
    row_BN = encode_row(loaded, SENTENCE)
    scene = read_scene(read(loaded, row_BN), loaded.tokenizer, row_BN)
    bits_S = [round(b, DIGITS) for b in town_entropy_bits(_load(town), NUM_SENTENCES)]
    return [
        records[0] | {"text": SENTENCE, "scene": scene.to_json()},
        records[1] | {"num_sentences": NUM_SENTENCES, "state_entropy_bits": bits_S},
    ]


def town_entropy_bits(loaded: Trained, num_sentences: int) -> list[float]:
    """For each mask the entropy of what its states say, weighted by the paths; the mean over
    sentences of the language with all slots masked."""
    language = grammar(loaded.config.data.grammar)
    found = []
    for word_ids_N in language.sample(num_sentences, seed=SEED):
        words = [language.words[w] for w in word_ids_N]
        for slot in language.slots:
            words[slot] = MASK
        reading = read(loaded, encode_row(loaded, " ".join(words)))
        found.append(path_entropy(reading).word_S)
    return torch.stack(found).mean(dim=0).tolist()


def _record(run: Path, language: str) -> dict[str, Any]:
    """The record of a run, which must have the settings that the chapter describes."""
    record = record_of(run)
    found = dotted(record["config"])
    for name, value in (SETTINGS | {"data.grammar": language}).items():
        if found[name] != value:
            raise UserError(
                f"{run} was trained with {name} {found[name]}, not {value}; --help shows the "
                f"command for {language}"
            )
    return record


def _load(run: Path) -> Trained:
    """The model of a run, trained to the end."""
    loaded = load(run)
    if loaded.step != loaded.config.train.steps:
        raise UserError(
            f"{run} has no intact checkpoint of its last step {loaded.config.train.steps}, only "
            f"of step {loaded.step}; train it again"
        )
    return loaded


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/case_study.py", __doc__)
    for name in ("quartets", "town"):
        parser.add_argument(name, type=Path, help=f"--output of the run on {name}")
    parser.add_argument("--to", required=True, type=Path, help="the .json file to write")

    def run() -> None:
        arguments = parser.parse_args(argv)
        write_json(arguments.to, case_study(arguments.quartets, arguments.town))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
