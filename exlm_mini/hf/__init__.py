"""ExLM for transformers 5: ``import exlm_mini.hf`` makes its Auto classes know ExLM.

``python -m exlm_mini.export RUN OUT`` writes a run as a directory for ``AutoModel``,
``AutoTokenizer`` and ``pipeline``.
"""

from exlm_mini.hf.models import (
    AUTO_CLASSES,
    NO_LABEL,
    ExLMConfig,
    ExLMForMaskedLM,
    ExLMForQuestionAnswering,
    ExLMForSequenceClassification,
    ExLMForTokenClassification,
    ExLMModel,
    register,
)
from exlm_mini.hf.training import ChainWarmup, collator, tokenizer_for

register()

__all__ = [
    "AUTO_CLASSES",
    "NO_LABEL",
    "ChainWarmup",
    "ExLMConfig",
    "ExLMForMaskedLM",
    "ExLMForQuestionAnswering",
    "ExLMForSequenceClassification",
    "ExLMForTokenClassification",
    "ExLMModel",
    "collator",
    "register",
    "tokenizer_for",
]
