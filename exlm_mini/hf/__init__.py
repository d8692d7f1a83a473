"""ExLM for transformers 5: ``import exlm_mini.hf`` registers ExLM with the Auto classes.

``python -m exlm_mini.export RUN OUT`` writes a run as a directory for ``AutoModel``,
``AutoTokenizer`` and ``pipeline``.
"""

from exlm_mini.config.checks import naming_extras

with naming_extras():
    from exlm_mini.hf.config import ExLMConfig
    from exlm_mini.hf.models import (
        ExLMForMaskedLM,
        ExLMForQuestionAnswering,
        ExLMForSequenceClassification,
        ExLMModel,
        register,
    )
    from exlm_mini.hf.predictor import Predictor, load_predictor
    from exlm_mini.hf.tokenizer import ExLMTokenizer, tokenizer_for
    from exlm_mini.hf.training import ChainWarmup, collator

register()

__all__ = [
    "ChainWarmup",
    "ExLMConfig",
    "ExLMForMaskedLM",
    "ExLMForQuestionAnswering",
    "ExLMForSequenceClassification",
    "ExLMModel",
    "ExLMTokenizer",
    "Predictor",
    "collator",
    "load_predictor",
    "tokenizer_for",
]
