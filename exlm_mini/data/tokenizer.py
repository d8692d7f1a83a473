"""Tokenizers, which turn text and SMILES into vocabulary ids and back, each a ``tokenizer.json``.

Three kinds share one class: byte-level BPE for text, chemical symbols for SMILES, whole words for
the toy languages. Raw text never produces a structural token: "[MASK]" in a training document is
six ordinary characters, because a stray mask would be a state without a target. Only
``Tokenizer.encode_with_masks`` reads "[MASK]" as a mask.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from exlm_mini.config import SPECIAL_TOKENS, DataConfig, SpecialIds
from exlm_mini.config.checks import UserError, on_one_line
from exlm_mini.data.files import read_bytes, write_atomically

PAD, BOS, EOS, UNK, SEP, MASK = SPECIAL_TOKENS

SMILES_SYMBOL = (
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$"
    r"|\%[0-9]{2}|[0-9])"
)
"""One symbol of a SMILES string (Schwaller et al. 2018, "Found in Translation")."""

_LONG_WORD = re.compile(r"(\w{1000}|\s{1000}|[^\w\s]{1000})")
"""Cuts long words for training byte-level BPE, whose time grows with the square of their length."""
TRAIN_ONE = "give a tokenizer.json, or none to train one"


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with its kind and its special ids.

    Args:
        definition: the bytes of a ``tokenizer.json``, which ``save`` writes unchanged.
        source: name of the definition in messages, usually its path.
    """

    def __init__(self, definition: bytes, source: str = "tokenizer.json") -> None:
        import tokenizers

        try:
            inner = tokenizers.Tokenizer.from_buffer(definition)
        except Exception as error:  # the library's errors have no type of their own
            raise UserError(
                f"{source} is not a valid tokenizer ({error}); {TRAIN_ONE}"
            ) from None
        inner.encode_special_tokens = True  # not stored in the file: "[MASK]" stays text
        inner.no_truncation()
        inner.no_padding()
        found: list[Any] = [inner.token_to_id(token) for token in SPECIAL_TOKENS]
        if None in found:
            raise UserError(
                f"{source} has no special token {SPECIAL_TOKENS[found.index(None)]}; add "
                f"{', '.join(SPECIAL_TOKENS)} to its vocabulary, or give none to train one"
            )
        self._inner: Any = inner
        self.definition = definition
        self.special_ids = SpecialIds(*found)
        self._structural_ids = frozenset(self.special_ids) - {self.special_ids.unk}
        self.vocab_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.kind = _kind(json.loads(definition))
        self.sha256 = hashlib.sha256(definition).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a ``tokenizer.json``."""
        path = Path(path)
        return cls(read_bytes(path, TRAIN_ONE), source=str(path))

    def save(self, path: str | Path) -> None:
        """Write the ``tokenizer.json`` this tokenizer was made from, byte for byte."""
        write_atomically(Path(path), self.definition)

    def encode(self, text: str) -> list[int]:
        r"""Ids of a text, without [BOS] and [EOS].

        In a SMILES, a symbol outside the vocabulary becomes [UNK], and the symbol is lost:

        >>> tokenizer = train_smiles(["CCO", "C[nH]C"])
        >>> [tokenizer.token(i) for i in tokenizer.encode("C[Xx]O")]
        ['C', '[UNK]', 'O']
        >>> tokenizer.unknown_pieces("C[Xx]O")
        ['[Xx]']

        ``prepare_corpus`` counts [UNK] and stops if its share is above ``data.max_unknown``.
        """
        return self._as_text(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` for many texts, on all cores."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._as_text(encoding.ids) for encoding in encodings]

    def encode_with_masks(self, text: str) -> list[int]:
        """Ids of a text in which "[MASK]" stands for a hidden token.

        A space before "[MASK]" belongs to the hidden token, as it does in byte-level BPE. No other
        special token is recognised.
        """
        pieces = [self.encode(piece) for piece in re.split(rf" ?{re.escape(MASK)}", text)]
        token_ids = pieces[0]
        for piece in pieces[1:]:
            token_ids = [*token_ids, self.special_ids.mask, *piece]
        return token_ids

    def unknown_pieces(self, text: str) -> list[str]:
        """The pieces of a text that ``encode`` turns into [UNK], in order."""
        encoding = self._inner.encode(text, add_special_tokens=False)
        lost_ids = self._structural_ids | {self.special_ids.unk}
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [text[start:end] for token_id, (start, end) in spans if token_id in lost_ids]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are shown, so that nothing is lost silently."""
        return self._inner.decode([int(i) for i in token_ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The vocabulary entry of an id, as stored ("Ġcat" for " cat" in byte-level BPE)."""
        return str(self._inner.id_to_token(token_id))

    def _as_text(self, token_ids: list[int]) -> list[int]:
        """Ids with structural tokens turned into [UNK].

        A whole-word lookup finds "[MASK]" in the vocabulary even where it is just text.
        """
        if self._structural_ids.isdisjoint(token_ids):
            return token_ids
        return [self.special_ids.unk if i in self._structural_ids else i for i in token_ids]


def given_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Load ``data.tokenizer``, which must fit the kind of data; None if it is not set."""
    if data.tokenizer is None:
        return None
    tokenizer = Tokenizer.load(data.tokenizer)
    if tokenizer.kind != data.kind:
        raise UserError(
            f"{data.tokenizer} is a tokenizer for {tokenizer.kind}, but data.kind is {data.kind}; "
            "give another tokenizer, or none to train one"
        )
    dot, after_another = (tokenizer.encode(text) for text in (".", "\n."))
    if after_another[-len(dot) :] != dot:  # so would be the text after a mask
        raise UserError(
            f"{data.tokenizer} puts a space before every text; switch that off (add_prefix_space, "
            "prepend_scheme), or give none to train one"
        )
    return tokenizer


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lossless tokenizer for text: byte-level BPE, as in GPT-2 and RoBERTa.

    Training is deterministic. A small corpus may run out of repeated pairs before ``vocab_size``
    is reached; then the vocabulary is smaller.

    Args:
        vocab_size: number of tokens wanted; special tokens and the 256 bytes are always included.
    """
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lessons = (piece for text in texts for piece in _LONG_WORD.split(text) if piece)
    inner.train_from_iterator(lessons, trainer)
    return Tokenizer(inner.to_str(pretty=True).encode())


def train_smiles(smiles: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Train a tokenizer for SMILES: one token per chemical symbol.

    The symbols come after the special tokens, by decreasing frequency, then alphabetically.

    Args:
        vocab_size: largest vocabulary, special tokens included; rarer symbols become [UNK].
    """
    import tokenizers

    # "isolated" keeps unmatched text as a separate piece; re.findall would silently drop it (the
    # % of "%(100)").
    pattern = tokenizers.Regex(SMILES_SYMBOL)
    split = tokenizers.pre_tokenizers.Split(pattern, behavior="isolated")
    counter = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token=UNK))
    counter.pre_tokenizer = split
    counter.train_from_iterator(
        smiles, tokenizers.trainers.WordLevelTrainer(show_progress=False)
    )
    # The library's trainer moves a special token to a new id if the data contain its name, so it
    # is only used for counting (in order of frequency, then alphabetically).
    by_rank = sorted(counter.get_vocab().items(), key=lambda entry: entry[1])
    symbols = [symbol for symbol, _ in by_rank if symbol not in SPECIAL_TOKENS]
    if vocab_size is not None:
        symbols = symbols[: max(0, vocab_size - len(SPECIAL_TOKENS))]
    return _word_lookup(symbols, split, tokenizers.decoders.Fuse())


def word_level(words: Iterable[str]) -> Tokenizer:
    """A tokenizer for a list of distinct words: text is split at white space, and the words follow
    the special tokens in the given order."""
    from tokenizers.pre_tokenizers import WhitespaceSplit

    return _word_lookup(list(words), WhitespaceSplit(), None)


def visible(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text with visible spaces; its vocabulary entry if it is part of a character."""
    text = tokenizer.decode([token_id])
    if not text or "\ufffd" in text:
        return tokenizer.token(token_id)
    return on_one_line(text.replace(" ", "\u2423"))  # open box


def _word_lookup(words: list[str], pre_tokenizer: Any, decoder: Any) -> Tokenizer:
    """A tokenizer that looks each piece up in a list of words."""
    import tokenizers

    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(inner.to_str(pretty=True).encode())


def _kind(definition: dict) -> str:
    """Kind of data that a tokenizer is for, read off its definition: smiles, text or toy."""
    if definition["model"].get("type") != "WordLevel":
        return "text"
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    return "smiles" if pre_tokenizer.get("type") == "Split" else "toy"
