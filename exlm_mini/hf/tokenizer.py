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


class ExLMTokenizer(NoCopiedCode, PreTrainedTokenizerFast):
    """A tokenizer that takes [BOS], [EOS], [PAD], [SEP] and [UNK] in a text for plain characters;
    made by ``tokenizer_for``, or from the directory of a checkpoint.

    With ``cleaning``, a ``Cleaning`` as a dict, molecules are respelled by it first, for example
    without the stereo marks that the vocabulary lacks. What RDKit cannot read stays as it is.
    """

    # Fixed here, not an argument: that would be stored, and without this class transformers could
    # then not find [MASK] either.
    split_special_tokens = property(lambda self: True, lambda self, value: None)

    @classmethod
    def convert_to_native_format(
        cls, trust_remote_code: bool = False, **options: Any
    ) -> dict[str, Any]:
        """The arguments of a tokenizer from the files of a directory."""
        if (file := options.pop("tokenizer_file", None)) is None:
            raise OSError("there is no tokenizer.json")
        definition = Path(file).read_bytes()
        if "TemplateProcessing" in str(json.loads(definition)["post_processor"]):
            inner = tokenizers.Tokenizer.from_buffer(definition)  # transformers has saved it
        else:
            inner = _converted(definition)
        return {**NAMES, **options, "tokenizer_object": inner}

    def _save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """The files of the tokenizer, and if ``auto_map`` asks for it, the module that finds this
        package."""
        if self.init_kwargs.get("auto_map"):
            write_remote_code(Path(save_directory))
        return super()._save_pretrained(save_directory, *args, **options)

    def _encode_plus(  # type: ignore[override]  # transformers gives the rest by name
        self, text: Any, text_pair: Any = None, **options: Any
    ) -> Any:
        if (how := self.init_kwargs.get("cleaning")) and not options.get("is_split_into_words"):
            text, text_pair = (_cleaned(own, Cleaning(**how)) for own in (text, text_pair))
        return super()._encode_plus(text, text_pair, **options)

    def _add_tokens(
        self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        # Tokens with the flag are not found. When a directory is opened, transformers sets it for
        # [MASK], too, and adds it again.
        tokens: list[Any] = [AddedToken(t) if isinstance(t, str) else t for t in new_tokens]
        tokens = [AddedToken(MASK, special=False) if t.content == MASK else t for t in tokens]
        for token in tokens:
            token.special = token.content in (BOS, EOS, PAD, SEP, UNK)
        return super()._add_tokens(tokens)

    def train_new_from_iterator(
        self, *args: Any, new_special_tokens: Sequence[Any] | None = None, **options: Any
    ) -> ExLMTokenizer:
        """As in transformers; the ids of [MASK] and the special tokens stay as they are."""
        # It has no flag here, and would come behind the vocabulary.
        options["new_special_tokens"] = [MASK, *(new_special_tokens or ())]
        trained = super().train_new_from_iterator(*args, **options)
        trained._tokenizer = _finds_masks(json.loads(trained._tokenizer.to_str()))
        return trained


def _cleaned(text: Any, cleaning: Cleaning) -> Any:
    """A text, or each of a list of them or of pairs, as ``cleaning`` spells it."""
    if isinstance(text, list | tuple):
        return type(text)(_cleaned(own, cleaning) for own in text)
    molecule = clean(text, cleaning) if text else None
    return text if molecule is None else molecule.spelling


def tokenizer_for(tokenizer: Tokenizer, max_length: int | None = None) -> ExLMTokenizer:
    """Convert a tokenizer to transformers.

    The ids of a text are [BOS], those of ``Tokenizer.encode_with_masks``, and [EOS]. Offsets leave
    out the space before a word.

    Args:
        max_length: what ``truncation=True`` leaves of a text, in tokens, [BOS] and [EOS] included.
    """
    limit = {} if max_length is None else {"model_max_length": max_length}
    return ExLMTokenizer(tokenizer_object=_converted(tokenizer.definition), **NAMES, **limit)


def _converted(definition: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a run with the steps of transformers around it."""
    inner, own = _finds_masks(json.loads(definition)), Tokenizer(definition)
    steps = [normalizers.Replace(Regex(r" (?=\[MASK\])"), "")]
    # A list of words holds the names of the special tokens; in a text they are unknown words.
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
    # Whole-word masking takes tokens whose offsets touch for one word.
    trim = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    inner.post_processor = processors.Sequence([trim, template])
    return inner


def _finds_masks(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that looks for [MASK] after normalization, which removes the blank before it.

    The flag ``lstrip`` would remove line ends and tabs, too.
    """
    for token in definition["added_tokens"]:
        if token["content"] == MASK:
            token.update(special=False, normalized=True, lstrip=False, rstrip=False)
    inner = tokenizers.Tokenizer.from_str(json.dumps(definition))
    inner.add_tokens([AddedToken(MASK, special=False)])  # if it stands in the vocabulary only
    return inner
