"""``python -m exlm_mini.export``: write a trained model as a directory for transformers. ::

    python -m exlm_mini.export runs/molecules molecules-hf

The directory holds weights, settings and tokenizer as in a checkpoint, and a model card, and can be
uploaded as it is. Where this package is installed, the directory loads like any other model after
``import exlm_mini.hf``; with ``trust_remote_code=True``, it imports the package itself::

    from transformers import pipeline
    fill = pipeline("fill-mask", "molecules-hf", trust_remote_code=True)
    fill("CC(=O)NC1=CC=[MASK]C=C1")
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data.files import reading
from exlm_mini.reading.runs import SHIPPED, model_directory
from exlm_mini.training.beside_weights import AUTO_MAPS, write_remote_code
from exlm_mini.training.console import exit_code, say

if TYPE_CHECKING:  # --help and command-line errors do not import torch
    from exlm_mini.reading.trained import Trained


def export(trained: Trained, output: Path) -> None:
    """Write a trained model as a directory for transformers.

    Args:
        trained: result of ``load``. Its files are copied, so changes made since are not written.
        output: directory, created if missing; files of the same names are replaced.
    """
    write_remote_code(output)
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copyfile(trained.path / name, output / name)
    for name, auto_map in AUTO_MAPS.items():
        with reading(trained.path / name):
            fields = json.loads((trained.path / name).read_bytes())
        text = json.dumps({**fields, "auto_map": auto_map}, indent=2) + "\n"
        (output / name).write_text(text, encoding="utf-8")
    (output / "README.md").write_text(card(trained), encoding="utf-8")


def card(trained: Trained) -> str:
    """The model card: settings, data and the last validation."""
    run, notes, data = trained.config, trained.notes, trained.config.data
    source = data.pack or ", ".join(data.source) or "embedded"
    is_shipped = trained.run in SHIPPED.values()
    # What a shipped model was trained on is in its own card, which has the same title.
    own = (trained.run / "README.md").read_text(encoding="utf-8") if is_shipped else ""
    _, _, own = own.partition("\n")
    evaluation = notes.get("evaluation")
    facts: dict[str, Any] = {
        "model": trained.model_in_words,
        "layers × width": f"{run.model.shape.num_layers} × {run.model.shape.width}",
        "parameters": f"{sum(weight.numel() for weight in trained.model.parameters()):,}",
        "step": f"{trained.step:,} of {run.train.steps:,}",
        "data": None
        if is_shipped
        else f"{data.kind}, {data.grammar if data.kind == 'toy' else source}",
        "longest row in training": f"{data.block_length} tokens",
        "mask ratio": run.masking.mask_ratio,
        "seed": run.seed,
        "sha256 of the weights": trained.sha256,
        "made with": ", ".join(f"{n} {v}" for n, v in notes.get("versions", {}).items()),
        "bits per masked token, held out": evaluation
        and f"{evaluation['bits'] / max(evaluation['num_masks'], 1):.3f}",
    }
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    lines = "\n".join(f"| {name} | {value} |" for name, value in known.items())
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
tags: [exlm, {trained.input}]
---
# {trained.run.name}

A masked language model of the package exlm-mini (`pip install 'exlm-mini[hf] @
git+https://github.com/exlm-book/exlm-book'`), after *ExLM: Rethinking the Impact of [MASK]
Tokens in Masked Language Models* (ICML 2025).

| | |
|---|---|
{lines}
{own}"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser("python -m exlm_mini.export", __doc__)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a training run, or a shipped model"
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="directory to write")

    def command() -> None:
        found = parser.parse_args(argv)
        if found.output.exists() and any(found.output.iterdir()):
            raise UserError(f"{found.output} is not empty; choose another directory")
        run = model_directory(found.run)
        from exlm_mini.reading.trained import load

        export(load(run), found.output)
        say(
            f"wrote {found.output}; load it with AutoModelForMaskedLM after import exlm_mini.hf"
        )

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
