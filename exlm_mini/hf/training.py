"""Tokenizer, collator and chain warm-up for the ``Trainer`` of transformers."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AddedToken,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from exlm_mini.data.tokenizer import BOS, EOS, MASK, PAD, SEP, UNK, Tokenizer


def tokenizer_for(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Convert a tokenizer to transformers; rows are framed by [BOS] and [EOS].

    "[MASK]" in a text is a mask, including the blank before it, which belongs to the hidden token.
    """
    special, definition = tokenizer.special_ids, json.loads(tokenizer.definition)
    for token in definition["added_tokens"]:
        token["lstrip"] = token["content"] == MASK
    inner = tokenizers.Tokenizer.from_str(json.dumps(definition))
    inner.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {EOS} {EOS} $B {EOS}",
        special_tokens=[(BOS, special.bos), (EOS, special.eos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS, eos_token=EOS, unk_token=UNK, sep_token=SEP, cls_token=BOS, pad_token=PAD,
        mask_token=AddedToken(MASK, lstrip=True, special=True),
        padding_side="right", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def collator(
    tokenizer: PreTrainedTokenizerFast, mask_ratio: float = 0.15, **options: Any
) -> DataCollatorForLanguageModeling:
    """A collator for ExLM: masks are drawn independently, and always become [MASK]."""
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mask_ratio, mask_replace_prob=1.0, random_replace_prob=0.0,
        **options,
    )  # fmt: skip


class ChainWarmup(TrainerCallback):
    """For ``Trainer``: fixed parallel chains at the start, as ``train.chain_warmup``.

    Args:
        share: of the steps with chains alone; the same number of steps fades them out.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 0.5:
            raise ValueError(f"share is {share}; it must lie in (0, 0.5]")
        self.share = share

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Set the weight of the chains."""
        past = state.global_step / (self.share * state.max_steps)
        getattr(model, "module", model).chain_share = min(1.0, max(0.0, 2.0 - past))

    def on_train_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Remove the chains."""
        getattr(model, "module", model).chain_share = 0.0
