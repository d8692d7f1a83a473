"""The tokenizer of a corpus: given or learnt, and what it does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.tokenizer import Tokenizer, train_byte_level_bpe, train_smiles

TOKENIZER_KINDS = {"toy": "words", "text": "text", "smiles": "smiles"}
NUM_UNKNOWN_SHOWN = 5


def given_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of ``data.tokenizer``, if there is one."""
    if data.tokenizer is None:
        return None
    tokenizer = Tokenizer.load(data.tokenizer)
    want = TOKENIZER_KINDS[data.kind]
    if tokenizer.kind != want:
        raise UserError(
            f"{data.tokenizer} is a tokenizer of kind {tokenizer.kind}, data.kind {data.kind} "
            f"needs {want}; give another or none to train one"
        )
    return tokenizer


def learn_tokenizer(data: DataConfig, documents: Iterable[str]) -> Tokenizer:
    """A tokenizer of ``data.vocab_size`` tokens made from documents of one kind."""
    learn = train_smiles if data.kind == "smiles" else train_byte_level_bpe
    return learn(documents, data.vocab_size)


def most_often(unknown: Counter[str]) -> str:
    """The pieces most often unknown, for a message."""
    # repr keeps the message on one line, whatever the piece; ties come in a fixed order.
    ranked = sorted(unknown.items(), key=lambda entry: (-entry[1], entry[0]))
    shown = ranked[:NUM_UNKNOWN_SHOWN]
    return ", ".join(f"{piece[:40]!r} {count:,} times" for piece, count in shown)
