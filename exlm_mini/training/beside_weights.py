"""The files beside the weights of a checkpoint with which transformers opens its directory.

``import exlm_mini.hf`` tells transformers what ``exlm`` and ``ExLMTokenizer`` mean.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.data.packs import Pack
from exlm_mini.training.parts import chain_share, longest_text, num_copies


def beside_weights(config: RunConfig, step: int, pack: Pack) -> dict[str, bytes]:
    """Names and contents: ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json``."""
    texts = {
        "config.json": model_settings(config, step, pack.special_ids, pack.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "ExLMTokenizer",
            "model_max_length": longest_text(config),
        },
    }
    encoded = {
        name: (json.dumps(fields, indent=2) + "\n").encode() for name, fields in texts.items()
    }
    tokenizer = pack.path.with_name("tokenizer.json")
    if tokenizer.exists():  # of a corpus; a pack may also stand alone
        encoded[tokenizer.name] = tokenizer.read_bytes()
    return encoded


def model_settings(
    config: RunConfig, step: int, special_ids: SpecialIds, vocab_size: int
) -> dict[str, Any]:
    """The arguments of ``exlm_mini.hf.ExLMConfig``, and what transformers wants beside them.

    Args:
        config: of the run; its ``data.block_length`` is the longest row of the pack.
        step: of the weights.
        special_ids, vocab_size: of the tokenizer.
    """
    return {
        "model_type": "exlm",
        "architectures": ["ExLMForMaskedLM"],
        "architecture": asdict(config.model),
        "objective": config.objective,
        "num_copies": num_copies(config),
        "chain_share": chain_share(config, step),
        "special_ids": special_ids._asdict(),
        "vocab_size": vocab_size,
        "learned_length": config.data.block_length,
    }
