"""Collator and chain warm-up for the ``Trainer`` of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from exlm_mini.config import MaskingConfig, SpecialIds
from exlm_mini.config.checks import nearest
from exlm_mini.data.masking import Masker, is_inner
from exlm_mini.data.units import Units
from exlm_mini.hf.config import ExLMConfig

Strategy = Literal["bernoulli", "fixed_count", "spans", "units"]


def collator(
    tokenizer: PreTrainedTokenizerFast,
    mask_ratio: float = 0.15,
    strategy: Strategy = "bernoulli",
    span_length: int = 3,
    span_law: Literal["fixed", "geometric"] = "fixed",
    **options: Any,
) -> DataCollatorForLanguageModeling:
    """A data collator for ExLM: every token it hides becomes [MASK].

    It may hide any token except [PAD], [BOS], [EOS] and those with a 1 in
    ``special_tokens_mask``.

    Args:
        mask_ratio, strategy, span_length, span_law: as the settings ``masking.*`` of a run.
        options: further arguments of ``DataCollatorForLanguageModeling``, such as ``seed``;
            none that say how to mask.

    Raises:
        ValueError: if the tokenizer lacks a special token, if the strategy is unknown, if
            ``options`` say how to mask, or if ``whole_word_mask``, the masking of transformers, is
            used with a strategy other than ``bernoulli`` or for molecules, where it would mask
            whole rows.
    """
    if strategy not in (known := get_args(Strategy)):
        raise ValueError(f"strategy is {strategy!r}; {nearest(strategy, known)}")
    masks = {"mlm", "mlm_probability", "mask_replace_prob", "random_replace_prob"}
    if taken := masks & options.keys():
        raise ValueError(f"{min(taken)} would do nothing here; set mask_ratio")
    is_smiles = isinstance(tokenizer.backend_tokenizer.pre_tokenizer, Split)
    if options.get("whole_word_mask") and is_smiles:
        raise ValueError("a SMILES has no words; leave out whole_word_mask")
    common = {
        "tokenizer": tokenizer, "mlm_probability": mask_ratio, "mask_replace_prob": 1.0,
        "random_replace_prob": 0.0, **options,
    }  # fmt: skip
    if options.get("whole_word_mask"):
        if strategy != "bernoulli":
            raise ValueError(f"whole_word_mask cannot be used with strategy {strategy!r}")
        return DataCollatorForLanguageModeling(**common)
    masking = MaskingConfig(
        mask_ratio=mask_ratio, strategy=strategy, span_length=span_length, span_law=span_law
    )
    special_ids, units = _special_ids(tokenizer), None
    if strategy == "units":
        decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
        units = Units(decode, len(tokenizer), special_ids, is_smiles)
    return _Collator(**common, masker=Masker(masking, special_ids, 0, units=units))


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> SpecialIds:
    """The ids of a tokenizer's special tokens, however it names them; a tokenizer like BERT's has
    [CLS] and [SEP] in place of [BOS] and [EOS], one like RoBERTa's no [SEP] of its own."""
    instead = {"bos": "cls", "eos": "sep", "sep": "eos"}
    ids = {}
    for name in SpecialIds._fields:
        own, other = (
            getattr(tokenizer, f"{n}_token_id") for n in (name, instead.get(name, name))
        )
        ids[name] = other if own is None else own
        if ids[name] is None:
            raise ValueError(f"the tokenizer has no {name}_token; set it")
    return SpecialIds(**ids)


@dataclass
class _Collator(DataCollatorForLanguageModeling):
    """Masks rows with a ``Masker``; its counters are the place in the batch and a random number."""

    masker: Masker = field(kw_only=True)

    def torch_mask_tokens(
        self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[Tensor, Tensor]:
        """The masked rows, and as labels the hidden ids, -100 elsewhere."""
        number = int(torch.randint(2**62, (), generator=self.generator))
        is_maskable_BN = is_inner(inputs, self.masker.special_ids)
        if special_tokens_mask is not None:
            is_maskable_BN = is_maskable_BN & ~torch.as_tensor(special_tokens_mask).bool()
        sample_B = np.arange(len(inputs))
        epoch_B = np.full_like(sample_B, number)
        is_masked_BN = self.masker.choose(
            inputs, is_maskable_BN, epoch_B, sample_B, step=number
        )
        masked_ids_BN = inputs.masked_fill(is_masked_BN, self.masker.special_ids.mask)
        return masked_ids_BN, inputs.masked_fill(~is_masked_BN, -100)

    def numpy_call(self, examples: Any) -> dict[str, Any]:
        """The same batch as NumPy arrays, for ``return_tensors="np"``."""
        return {name: part.numpy() for name, part in self.torch_call(examples).items()}


class ChainWarmup(TrainerCallback):
    """Callback for ``Trainer``: start on fixed parallel chains, as with ``train.chain_warmup``.

    A checkpoint stores the weight of the chains in its ``config.json``.

    Args:
        share: share of the steps with chains alone; they fade out over as many steps again.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 0.5:
            raise ValueError(f"share is {share}; it must lie in (0, 0.5]")
        self.share = share

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Set the weight of the chains for this step."""
        past = state.global_step / (self.share * state.max_steps)
        getattr(model, "module", model).config.chain_share = min(1.0, max(0.0, 2.0 - past))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Remove the chains, unless training stopped early or a warm-up checkpoint was loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            share = ExLMConfig.from_pretrained(state.best_model_checkpoint).chain_share
        elif state.global_step < state.max_steps:  # training stopped early
            return
        else:
            share = 0.0
        getattr(model, "module", model).config.chain_share = share
