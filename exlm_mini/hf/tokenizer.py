"""The tokenizer of a run with the interface of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, processors
from transformers import PreTrainedTokenizerFast

from exlm_mini.data.molecules import Cleaning, clean
from exlm_mini.data.tokenizer import BOS, EOS, MASK, PAD, SEP, UNK, Tokenizer
from exlm_mini.hf.config import NoCopiedCode
from exlm_mini.training.beside_weights import write_remote_code

NAMES: dict[str, Any] = {
    "bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "sep_token": SEP, "cls_token": BOS,
    "pad_token": PAD, "mask_token": MASK, "padding_side": "right",
    "model_input_names": ["input_ids", "attention_mask"],
}  # fmt: skip
SPACE_BEFORE_MASK = r" (?=\[MASK\])"


class ExLMTokenizer(NoCopiedCode, PreTrainedTokenizerFast):
    """A tokenizer that reads [BOS], [EOS], [PAD], [SEP] and [UNK] in a text as plain characters.

    ``tokenizer_for`` makes one, and the directory of a checkpoint opens as one. With ``cleaning``,
    a ``Cleaning`` as a dict, it first cleans molecules, for example of the stereo marks that the
    vocabulary lacks. A SMILES that RDKit cannot read stays as it is.
    """

    # Fixed here, because an argument would be stored, and transformers without this class would
    # then not find [MASK] in a text either.
    split_special_tokens = property(lambda self: True, lambda self, value: None)

    @classmethod
    def convert_to_native_format(
        cls, trust_remote_code: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Arguments that open the tokenizer in a directory; transformers calls this method."""
        if (file := options.pop("tokenizer_file", None)) is None:
            raise OSError("there is no tokenizer.json")
        definition = Path(file).read_bytes()
        steps = (json.loads(definition)["normalizer"] or {}).get("normalizers", [])
        if {"Regex": SPACE_BEFORE_MASK} in (step.get("pattern") for step in steps):
            inner = tokenizers.Tokenizer.from_buffer(definition)  # transformers has saved it
        else:
            inner = _converted(definition)
        return {**NAMES, **options, "tokenizer_object": inner}

    def _save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Save the files of the tokenizer and, if ``auto_map`` is set, the module that imports this
        package."""
        if self.init_kwargs.get("auto_map"):
            write_remote_code(Path(save_directory))
        return super()._save_pretrained(save_directory, *args, **options)

    def _encode_plus(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        if (how := self.init_kwargs.get("cleaning")) and not options.get("is_split_into_words"):
            text, text_pair = (_cleaned(own, Cleaning(**how)) for own in (text, text_pair))
        return super()._encode_plus(text, text_pair, **options)

    def _add_tokens(
        self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        # Tokens flagged as special are not found in a text. When a directory is opened,
        # transformers flags [MASK], too, and adds it again.
        tokens: list[Any] = [AddedToken(t) if isinstance(t, str) else t for t in new_tokens]
        tokens = [AddedToken(MASK, special=False) if t.content == MASK else t for t in tokens]
        for token in tokens:
            token.special = token.content in (BOS, EOS, PAD, SEP, UNK)
        return super()._add_tokens(tokens)

    def train_new_from_iterator(
        self, *args: Any, new_special_tokens: Sequence[Any] | None = None, **options: Any
    ) -> ExLMTokenizer:
        """Train as in transformers; the ids of [MASK] and of the special tokens do not change."""
        # [MASK] is not flagged as special here, so it would be added after the vocabulary.
        options["new_special_tokens"] = [MASK, *(new_special_tokens or ())]
        trained = super().train_new_from_iterator(*args, **options)
        trained._tokenizer = _finds_masks(json.loads(trained._tokenizer.to_str()))
        return trained


def _cleaned(text: Any, cleaning: Cleaning) -> Any:
    """Clean a SMILES, or each in a list of SMILES or pairs; unreadable ones stay as they are."""
    if isinstance(text, list | tuple):
        return type(text)(_cleaned(own, cleaning) for own in text)
    molecule = clean(text, cleaning) if text else None
    return text if molecule is None else molecule.spelling


def tokenizer_for(tokenizer: Tokenizer, max_length: int | None = None) -> ExLMTokenizer:
    """Convert a tokenizer to transformers.

    A text becomes [BOS], the ids of ``Tokenizer.encode_with_masks``, and [EOS]. Offsets leave out
    the space before a word.

    Args:
        max_length: tokens that ``truncation=True`` leaves of a text, [BOS] and [EOS] included.
    """
    limit = {} if max_length is None else {"model_max_length": max_length}
    return ExLMTokenizer(tokenizer_object=_converted(tokenizer.definition), **NAMES, **limit)


def _converted(definition: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a run, with the normalizer and post-processor that transformers needs."""
    inner, own = _finds_masks(json.loads(definition)), Tokenizer(definition)
    steps = [normalizers.Replace(Regex(SPACE_BEFORE_MASK), "")]
    # A word-level vocabulary holds the names of special tokens; in a text they are unknown words.
    names = [name for name in (PAD, BOS, EOS, SEP) if own.unknown_pieces(name) == [name]]
    if names:
        pattern = "|".join(name[1:-1] for name in names)
        steps.append(normalizers.Replace(Regex(rf"\[({pattern})\]"), UNK))
    if inner.normalizer is not None:
        steps.append(inner.normalizer)
    inner.normalizer = normalizers.Sequence(steps)
    template = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {EOS} {EOS} $B {EOS}",
        special_tokens=[(BOS, own.special_ids.bos), (EOS, own.special_ids.eos)],
    )
    # Whole-word masking takes tokens with touching offsets to be one word.
    trim = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    inner.post_processor = processors.Sequence([trim, template])
    return inner


def _finds_masks(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that looks for [MASK] after normalization, which removes the blank before it.

    The flag ``lstrip`` of the token would remove line ends and tabs as well.
    """
    for token in definition["added_tokens"]:
        if token["content"] == MASK:
            token.update(special=False, normalized=True, lstrip=False, rstrip=False)
    inner = tokenizers.Tokenizer.from_str(json.dumps(definition))
    inner.add_tokens([AddedToken(MASK, special=False)])  # if only the vocabulary has it
    return inner
