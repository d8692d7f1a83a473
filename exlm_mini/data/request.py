"""The settings of a corpus, checked before anything is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import POSITIVE, UserError, check_fields, check_numbers
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.sources import check_source

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Preparation:
    """Everything that the packs depend on."""

    data: DataConfig
    """kind, column, tokenizer, vocab_size, block_length, validation_share, max_documents (of
    each source), max_unknown, max_rejected."""
    sources: tuple[tuple[str, ...], ...] = ()
    """Each a short name, a hub id, or paths; none: those of ``data``."""
    cleaning: Cleaning = field(default_factory=Cleaning)
    """smiles only."""
    accepted: tuple[str, ...] = ()
    """Named sources whose caveat the user accepts."""
    seed: int = 1
    shard_megabytes: float = 4
    """Text per shard; a kill loses at most one shard per process, some seconds of work."""

    def __post_init__(self) -> None:
        check_fields("", self)
        check_numbers("", self, POSITIVE, "shard_megabytes")
        if self.data.kind != "smiles" and self.cleaning != Cleaning():
            raise UserError(
                f"data.kind is {self.data.kind}; only molecules are cleaned, leave the options "
                "of cleaning out"
            )
        for words in self.sources:
            check_source(words, self.data.kind, self.accepted)

    def settings(self) -> dict[str, Any]:
        """Plain settings under dotted names, without those that no pack depends on."""
        plain = json.loads(json.dumps(asdict(self)))
        data = {f"data.{name}": value for name, value in plain.pop("data").items()}
        if not self.sources:
            return {"seed": self.seed} | data
        cleaning = {f"cleaning.{name}": value for name, value in plain.pop("cleaning").items()}
        for name in ("accepted", "shard_megabytes"):
            del plain[name]
        return plain | data | cleaning
