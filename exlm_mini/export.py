"""``python -m exlm_mini.export``: save a run as a model for transformers. ::

    python -m exlm_mini.export runs/molecules molecules-hf

The directory holds weights, settings, tokenizer and a model card, and can be uploaded as it is.
With this package installed it loads like any model after ``import exlm_mini.hf``; with
``trust_remote_code=True`` the directory imports it by itself. ::

    from transformers import pipeline
    fill = pipeline("fill-mask", "molecules-hf", trust_remote_code=True)
    fill("CC(=O)NC1=CC=[MASK]C=C1")
"""

from __future__ import annotations

import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_mini.config import ModelConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data.files import write_atomically
from exlm_mini.reading.pretrained import Pretrained, load_pretrained
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.evaluation import Evaluation
from exlm_mini.training.parts import chain_share, num_copies

if TYPE_CHECKING:
    from exlm_mini.hf import ExLMConfig

REMOTE = "modeling_exlm"
MODEL = {field.name for field in fields(ModelConfig)}
REMOTE_CODE = '''"""ExLM for transformers; the code is that of the package exlm-mini."""

try:
    from exlm_mini.hf import {names}
except ImportError as error:
    raise ImportError(
        f"this model needs the package exlm-mini: pip install 'exlm-mini[hf]' ({{error}})"
    ) from None
'''


def config_of(pretrained: Pretrained, **settings: Any) -> ExLMConfig:
    """The settings of a trained model for transformers.

    Args:
        pretrained: from ``load_pretrained``.
        settings: of ``ExLMConfig`` in place of the run's, such as ``dropout`` or ``num_labels``.
    """
    from exlm_mini.hf import ExLMConfig

    run, tokenizer = pretrained.config, pretrained.tokenizer
    model = replace(run.model, **{n: settings.pop(n) for n in MODEL & settings.keys()})
    return ExLMConfig(
        architecture=asdict(model),
        objective=run.objective,
        num_copies=num_copies(run),
        chain_share=chain_share(run, pretrained.checkpoint.step),
        special_ids=tokenizer.special_ids._asdict(),
        vocab_size=tokenizer.vocab_size,
        **{"learned_length": run.data.block_length, **settings},
    )


def export(pretrained: Pretrained, output: Path) -> None:
    """Write a trained model as a directory for transformers.

    Args:
        pretrained: from ``load_pretrained``.
        output: directory, made if missing; files of the same names are replaced.

    Raises:
        UserError: if transformers is missing.
    """
    from transformers.utils import logging

    from exlm_mini.hf import ExLMConfig, ExLMForMaskedLM, tokenizer_for
    from exlm_mini.hf.models import AUTO_CLASSES

    config, tokenizer = config_of(pretrained), pretrained.tokenizer
    names = {auto.__name__: model.__name__ for auto, model in AUTO_CLASSES.items()}
    names["AutoConfig"] = ExLMConfig.__name__
    config.auto_map = {auto: f"{REMOTE}.{name}" for auto, name in names.items()}
    model = ExLMForMaskedLM(config)
    model.exlm.load_state_dict(pretrained.checkpoint.tensors["model"])
    logging.disable_progress_bar()
    model.save_pretrained(output)
    tokenizer_for(tokenizer, pretrained.max_length).save_pretrained(output)
    for file in output.glob("*.safetensors"):  # written for their owner alone
        file.chmod((output / "config.json").stat().st_mode)
    imported = ", ".join(sorted(set(names.values())))
    code = REMOTE_CODE.format(names=f"(  # noqa: F401\n        {imported}\n    )")
    write_atomically(output / f"{REMOTE}.py", code.encode())
    write_atomically(output / "README.md", card(pretrained).encode())


def card(pretrained: Pretrained) -> str:
    """The model card: settings, data and the last validation."""
    run, state = pretrained.config, pretrained.checkpoint.state
    model, data = run.model, run.data
    source = data.pack or data.hub or ", ".join(data.files) or "embedded"
    weights = pretrained.checkpoint.tensors["model"].values()
    facts: dict[str, Any] = {
        "objective": run.objective,
        "layers × width": f"{model.shape.num_layers} × {model.shape.width}",
        "parameters": f"{sum(weight.numel() for weight in weights):,}",
        "step": f"{pretrained.checkpoint.step:,} of {run.train.steps:,}",
        "data": f"{data.kind}, {data.grammar if data.kind == 'toy' else source}",
        "longest row in training": f"{data.block_length} tokens",
        "mask ratio": run.masking.mask_ratio,
        "seed": run.seed,
        "sha256 of the weights": pretrained.sha256,
        "made with": ", ".join(f"{n} {v}" for n, v in state.get("versions", {}).items()),
    }
    if run.objective == "exlm":
        facts["states per mask"] = model.states_per_mask
        facts["transition"] = model.transition
    lines = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value != "")
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
tags: [exlm, {pretrained.input}]
---
# {pretrained.path.parent.parent.name}

A masked language model of the package exlm-mini, after *ExLM: Rethinking the Impact of [MASK]
Tokens in Masked Language Models* (ICML 2025).

| | |
|---|---|
{lines}

{measured(state.get("evaluation"))}
"""


def measured(stored: dict[str, Any] | None) -> str:
    """A sentence about the last validation of a run."""
    if stored is None:
        return "It was not validated before this step was saved."
    found = Evaluation(**stored)
    accuracy = f", {found.mask_accuracy:.1%} of them guessed" if found.mask_accuracy else ""
    return (
        f"Validation, on {found.num_rows:,} rows that it was not trained on: "
        f"{found.bits_per_mask:.3f} bits per masked token, all masks of a row together{accuracy}."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser("python -m exlm_mini.export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="--output of a training run")
    parser.add_argument("output", type=Path, metavar="OUT", help="directory to write")

    def command() -> None:
        found = parser.parse_args(argv)
        if found.output.exists() and any(found.output.iterdir()):
            raise UserError(f"{found.output} is not empty; name another directory")
        export(load_pretrained(found.run, say), found.output)
        say(
            f"wrote {found.output}; load it with AutoModelForMaskedLM after import exlm_mini.hf"
        )

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
