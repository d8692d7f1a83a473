"""Print the results of a finished run to stdout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from exlm_mini.config import RunConfig
from exlm_mini.data.corpus import Corpus
from exlm_mini.data.tokenizer import MASK
from exlm_mini.data.toy_grammars import grammar, slots_of
from exlm_mini.data.units import Units
from exlm_mini.reading.filling import measure_fillings
from exlm_mini.reading.prize import measure_prize
from exlm_mini.training.parts import make_masker
from exlm_mini.training.trainer import Trainer


def summarise(config: RunConfig, corpus: Corpus, output: Path, trainer: Trainer) -> str:
    """Print the results; returns a held-out text with hidden tokens, to try the model on."""
    objective, reached = config.objective, trainer.evaluation
    assert reached is not None  # the last step is validated
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{objective}: {num_parameters:,} parameters, {trainer.step:,} steps, "
        f"validation {reached.bits_per_mask:.3f} bits per masked token "
        f"({reached.num_masks:,} masks in {reached.num_rows:,} rows)"
    )
    if reached.num_without_path:
        print(f"{objective}: {reached.num_without_path} rows without a path were left out")
    if trainer.stepper.skipped_steps:
        print(
            f"{objective}: {trainer.stepper.skipped_steps} steps were skipped because their loss "
            "or gradient was not finite"
        )
    if config.masking.strategy == "slots" and objective != "repeated-mlm":
        language = grammar(config.data.grammar)
        print(f"joint entropy {language.joint_entropy_bits(language.mask()):.3f} bits")
        print(f"MLM floor {language.marginal_entropy_bits(language.mask()):.3f} bits")
        print(f"{objective} reached {reached.bits_per_row:.3f} bits")
    print(f"run directory: {output}")
    _print_prize(config, corpus, trainer)
    return masked_example(config, corpus)


def _print_prize(config: RunConfig, corpus: Corpus, trainer: Trainer) -> None:
    """Print what links win on held-out rows and what there is to win (see ``prize``), and how well
    molecules are filled.

    A model trained on slots is left out: it has only seen rows with all slots masked, so it cannot
    fill them in turn.
    """
    if config.objective == "repeated-mlm" or config.masking.strategy == "slots":
        return
    model, pack = trainer.model, corpus.validation
    masker = make_masker(config, pack.special_ids, pack.tokenizer)
    share = config.chain_share(trainer.step)
    prize = measure_prize(model, pack, masker, chain_share=share)
    k = config.model.states_per_mask if config.objective == "exlm" else 1
    print(f"{config.objective}, held-out rows: {prize.describe(k)}")
    if corpus.kind == "smiles" and find_spec("rdkit"):
        ways = measure_fillings(model, pack.tokenizer(), pack, masker, chain_share=share)
        for way, filled in ways.items():
            print(f"{config.objective}, held-out rows filled {way}: {filled.describe()}")


def masked_example(config: RunConfig, corpus: Corpus) -> str:
    """A held-out text, or its beginning, with its slots hidden, or else a word, span or symbol."""
    tokenizer = corpus.validation.tokenizer()
    row = corpus.validation.gather([0])[0].tolist()
    inner = [i for i in row if i not in tokenizer.special_ids]
    inner = inner[:16] if corpus.kind == "text" else inner
    middle = len(inner) // 2
    if slots := slots_of(config):
        hidden = [slot - 1 for slot in slots]  # [BOS] is not among the inner tokens
    elif corpus.kind == "text":  # the text may begin and end within a word
        words = [
            unit
            for unit in Units.of(tokenizer)(inner, len(inner))
            if unit[0] > 0 and unit[-1] < len(inner) - 1
            if tokenizer.decode([inner[n] for n in unit]).strip().isalpha()
        ]
        hidden = min(
            words, key=lambda word: (len(word), abs(word[0] - middle)), default=[middle]
        )
    else:
        width = config.masking.span_length if config.masking.strategy == "spans" else 1
        hidden = [*range(middle, middle + width)][: len(inner) - middle]
    ids = [tokenizer.special_ids.mask if n in hidden else i for n, i in enumerate(inner)]
    text = tokenizer.decode(ids).replace("\ufffd", "")  # a part of a character
    return " ".join(text.replace(MASK, f" {MASK}").split()) if corpus.kind == "text" else text
