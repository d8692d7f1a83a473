"""The settings of a model with the interface of transformers."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.training.beside_weights import write_remote_code

OBJECTIVES = ("exlm", "mlm", "repeated-mlm")
FIELD_OF = {
    **{field.name: field.name for field in fields(ModelConfig) if field.name != "vocab_size"},
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_width",
    "max_position_embeddings": "max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
}
"""For each attribute that is stored in ``architecture``, the name of its field there."""


class NoCopiedCode:
    """Keeps transformers from copying our sources: ``trust_remote_code`` imports this package."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing; the method of transformers makes ``save_pretrained`` copy the sources."""


class ExLMConfig(NoCopiedCode, PreTrainedConfig):
    """Settings of a model, stored in ``config.json``.

    The fields of ``architecture`` can also be passed as arguments and read as attributes, by their
    own names or by those of transformers: ``hidden_size``, ``num_hidden_layers``,
    ``num_attention_heads``, ``intermediate_size``, ``max_position_embeddings`` (positions after
    expansion), ...

    Args:
        architecture: ``ModelConfig`` as a dict.
        objective: exlm, mlm or repeated-mlm.
        num_copies: copies of every token; above 1 only for repeated-mlm.
        chain_share: weight of the fixed chains in the transitions; above 0 only for an ExLM early
            in its training (see ``ChainWarmup``).
        special_ids: ``SpecialIds`` as a dict: the ids that the tokenizer has. The default is that
            of a tokenizer of this package.
        vocab_size: size of the vocabulary.
        learned_length: tokens of the longest training row; the model warns about longer rows.
        classifier_dropout: dropout before and in the heads that fine-tuning adds.
        kwargs: fields of ``architecture``, and those of ``PreTrainedConfig``, such as
            ``num_labels``.
    """

    model_type = "exlm"

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        objective: str = "exlm",
        num_copies: int = 1,
        chain_share: float = 0.0,
        special_ids: dict[str, int] | None = None,
        vocab_size: int | None = None,
        learned_length: int | None = None,
        classifier_dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.architecture = architecture = dict(architecture or {})
        stored_size = architecture.pop("vocab_size", None)
        special = SpecialIds(**(special_ids or {}))
        same = {
            "pad_token_id": (special.pad, "special_ids.pad"),
            "bos_token_id": (special.bos, "special_ids.bos"),
            "eos_token_id": (special.eos, "special_ids.eos"),
            "mask_token_id": (special.mask, "special_ids.mask"),
            "tie_word_embeddings": (True, "the only choice"),
            "hidden_act": ("gelu", "the only choice"),
        }
        for name in kwargs:  # of the many that transformers passes, those that look like ours
            near = get_close_matches(name, FIELD_OF, 1, cutoff=0.9)
            if near and name not in FIELD_OF and not hasattr(PreTrainedConfig, name):
                raise UserError(f"unknown setting {name}; did you mean {near[0]}?")
        for name in [name for name in FIELD_OF if name in kwargs]:
            field, value = FIELD_OF[name], kwargs.pop(name)
            _check(name, value, architecture.get(field), f"architecture.{field}")
            architecture[field] = value
        for name, (fixed, where) in same.items():
            _check(name, kwargs.get(name), fixed, where)
        _check("vocab_size", vocab_size, stored_size, "architecture.vocab_size")
        if objective not in OBJECTIVES:
            raise UserError(
                f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}"
            )
        if num_copies != 1 and objective != "repeated-mlm":
            raise UserError(
                f"num_copies is {num_copies}, but only repeated-mlm repeats tokens; set it to 1 "
                f"for {objective}"
            )
        self.objective, self.num_copies, self.chain_share = objective, num_copies, chain_share
        self.special_ids, self.learned_length = special._asdict(), learned_length
        self.classifier_dropout = classifier_dropout
        ModelConfig(**architecture)  # raises if the settings do not fit each other
        ids = {name: same[name][0] for name in same if name.endswith("_token_id")}
        super().__init__(**{**kwargs, **ids})
        self.vocab_size = vocab_size or stored_size or 4000

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save as transformers does and, if ``auto_map`` is set, add the module that imports this
        package. The ``save_pretrained`` of a model calls this one."""
        if getattr(self, "auto_map", None):
            write_remote_code(Path(save_directory))
        super().save_pretrained(save_directory, *args, **options)

    @property
    def model(self) -> ModelConfig:
        """The settings as a ``ModelConfig``."""
        return ModelConfig(**self.architecture)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELD_OF:
            self.architecture = {**self.architecture, FIELD_OF[name]: value}
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in FIELD_OF:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        model, field = self.model, FIELD_OF[name]
        return getattr(model.shape, field, getattr(model, field))


def _check(name: str, value: Any, fixed: Any, where: str) -> None:
    """Refuse a value that differs from one already set; None means not set."""
    if value is not None and fixed is not None and value != fixed:
        raise UserError(
            f"{name} {value} contradicts {where}, {fixed}; leave it out, or give the same value"
        )
