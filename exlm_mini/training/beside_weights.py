"""The files beside the weights of a checkpoint with which transformers opens its directory.

``import exlm_mini.hf`` tells transformers what ``exlm`` and ``ExLMTokenizer`` mean.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from exlm_mini.config import RunConfig
from exlm_mini.data.packs import Pack


def beside_weights(config: RunConfig, step: int, pack: Pack) -> dict[str, bytes]:
    """Names and contents of the files.

    Args:
        config: of the run; its ``data.block_length`` is the longest row of the pack.
        pack: of the training rows; its corpus has the tokenizer.
    """
    settings = {
        # The arguments of exlm_mini.hf.ExLMConfig, and what transformers wants beside them.
        "config.json": {
            "model_type": "exlm",
            "architectures": ["ExLMForMaskedLM"],
            "architecture": asdict(config.model),
            "objective": config.objective,
            "num_copies": config.num_copies,
            "chain_share": config.chain_share(step),
            "special_ids": pack.special_ids._asdict(),
            "vocab_size": pack.vocab_size,
            "learned_length": config.data.block_length,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "ExLMTokenizer",
            "model_max_length": config.longest_text(),
        },
    }
    contents = {
        name: (json.dumps(fields, indent=2) + "\n").encode()
        for name, fields in settings.items()
    }
    tokenizer = pack.path.with_name("tokenizer.json")
    if tokenizer.exists():  # a pack may also stand alone
        contents[tokenizer.name] = tokenizer.read_bytes()
    return contents
