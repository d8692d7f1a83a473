"""The files, beside the weights, that transformers needs to open a checkpoint's directory.

``import exlm_mini.hf`` tells transformers what ``exlm`` and ``ExLMTokenizer`` mean. A directory to
share can carry this itself: the ``AUTO_MAPS`` in its files name a module that imports the package,
which transformers runs with ``trust_remote_code=True``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig
from exlm_mini.data.packs import Pack

AUTO_MAPS: dict[str, dict[str, Any]] = {
    "config.json": {
        "AutoConfig": "modeling_exlm.ExLMConfig",
        "AutoModel": "modeling_exlm.ExLMModel",
        "AutoModelForMaskedLM": "modeling_exlm.ExLMForMaskedLM",
        "AutoModelForQuestionAnswering": "modeling_exlm.ExLMForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_exlm.ExLMForSequenceClassification",
    },
    "tokenizer_config.json": {"AutoTokenizer": [None, "modeling_exlm.ExLMTokenizer"]},
}
"""For each file, the class of ``exlm_mini.hf`` that each Auto class of transformers loads."""
REMOTE_CODE = '''"""ExLM for transformers; the code is that of the package exlm-mini."""

from exlm_mini.hf import *  # noqa: F403
'''


def write_remote_code(directory: Path) -> None:
    """Write the module that ``AUTO_MAPS`` name into a directory, which is made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "modeling_exlm.py").write_text(REMOTE_CODE, encoding="utf-8")


def beside_weights(config: RunConfig, step: int, pack: Pack) -> dict[str, bytes]:
    """Contents of the files, by name.

    Args:
        config: settings of the run, with the pack's longest row as ``data.block_length``.
        pack: training rows; the files include the tokenizer.json beside it, if there is one.
    """
    settings = {
        # The arguments of exlm_mini.hf.ExLMConfig, and the fields that transformers itself needs.
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
    if tokenizer.exists():  # a pack may also come without a corpus
        contents[tokenizer.name] = tokenizer.read_bytes()
    return contents
