"""Collator and chain warm-up for the ``Trainer`` of transformers."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import Split
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from exlm_mini.hf.config import ExLMConfig


def collator(
    tokenizer: PreTrainedTokenizerFast, mask_ratio: float = 0.15, **options: Any
) -> DataCollatorForLanguageModeling:
    """A collator for ExLM: masks are drawn independently, and always become [MASK].

    Raises:
        ValueError: for ``whole_word_mask`` of molecules, where it would mask whole rows.
    """
    is_smiles = isinstance(tokenizer.backend_tokenizer.pre_tokenizer, Split)
    if options.get("whole_word_mask") and is_smiles:
        raise ValueError("a SMILES has no words; leave out whole_word_mask")
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mask_ratio, mask_replace_prob=1.0, random_replace_prob=0.0,
        **options,
    )  # fmt: skip


class ChainWarmup(TrainerCallback):
    """For ``Trainer``: fixed parallel chains at the start, as ``train.chain_warmup``.

    A checkpoint stores the weight of the chains in its ``config.json``.

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

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Remove the chains, unless the model is one from the warm-up."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            share = ExLMConfig.from_pretrained(state.best_model_checkpoint).chain_share
        elif state.global_step < state.max_steps:  # training was stopped
            return
        else:
            share = 0.0
        getattr(model, "module", model).chain_share = share
