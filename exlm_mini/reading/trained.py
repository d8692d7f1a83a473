"""A trained model for use from Python: embed, fill, explore, and the loss of a text. ::

    import exlm_mini

    molecules = exlm_mini.load("runs/molecules")
    molecules.embed(["CCO", "CC(=O)O"])               # float (2, width)
    molecules.fill("CC(=O)N[MASK]").text              # the text with its masks filled
    molecules.explore("CC(=O)N[MASK]C[MASK]")         # the edges between their states
    molecules.loss(["CCO", "CC(=O)O"]).backward()     # nats per target

Shapes: B rows, N tokens, S masked tokens, D width.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import is_inner
from exlm_mini.data.molecules import Cleaning
from exlm_mini.data.text import document
from exlm_mini.data.tokenizer import MASK, Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states
from exlm_mini.reading.decoding import Reading, read_row
from exlm_mini.reading.entries import MOST_UNKNOWN, check_batch_size, listed, readable, tell
from exlm_mini.reading.explorer import Explorer
from exlm_mini.reading.runs import REMEDY, SHIPPED, fine_tuning, model_directory
from exlm_mini.reading.scene import read_scene
from exlm_mini.training.checkpoint import (
    MANIFEST,
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
)
from exlm_mini.training.console import say
from exlm_mini.training.parts import load_model, make_masker

Remark = Callable[[str, int, int, str], None]


def _say(kind: str, num: int, of: int, line: str) -> None:
    say(f"{num:,} of {of:,} {line}")


@dataclass(frozen=True)
class Filled:
    """A text with its masks filled."""

    text: str
    probability: float
    """Joint probability of the chosen tokens; for ExLM summed over all paths."""
    reading: Reading = field(repr=False)


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer; the model is in evaluation mode, on the CPU."""

    run: Path
    step: int
    config: RunConfig = field(repr=False)
    model: ExLM | MaskedLM = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    path: Path = field(default=Path(), repr=False)
    """Directory of the checkpoint."""
    sha256: str = field(default="", repr=False)
    """SHA-256 of the names, shapes and bytes of the weights."""
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    """Other notes in the checkpoint, such as ``evaluation`` and ``versions``."""

    @property
    def input(self) -> str:
        """The kind of its training data: text, smiles or toy."""
        return self.tokenizer.kind

    @property
    def model_in_words(self) -> str:
        """The kind of model, in words."""
        config = self.config
        if config.objective == "mlm":
            return "MLM"
        if config.objective == "repeated-mlm":
            return f"Repeated MLM, {config.num_copies} copies"
        model, share = config.model, config.chain_share(self.step)
        chains = f", still {share:.0%} fixed parallel chains" if share else ""
        kind = f"{model.states_per_mask} states per mask, {model.transition} transitions"
        return f"ExLM, {kind}{chains}"

    def embed(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """One vector for each text, (B, D): the mean of the last hidden states of its tokens.

        [MASK] in a text counts as a token, [BOS] and [EOS] do not. White space around a text, and
        whatever follows a SMILES, is left out (``document``), and so are stereo marks if the
        vocabulary has none. The vector is nan for a text that is too long or mostly [UNK], for a
        SMILES that RDKit rejects, such as one with [MASK], and for an entry that is not a text; a
        printed line says why.

        Args:
            texts: the texts; a single one needs no list.
            batch_size: texts to encode at once.
        """
        vectors_BD, reasons = self.vectors(texts, batch_size)
        tell(reasons, "texts[{}]", "it gets no vector", say)
        return vectors_BD

    @torch.no_grad()
    def vectors(
        self,
        texts: Any,
        batch_size: int = 64,
        report: Remark = _say,
        where: str = "texts[{}]",
        first: int = 0,
    ) -> tuple[Tensor, dict[int, str]]:
        """Like ``embed``, and returns the reason for each text that gets nan, by its index.

        ``report`` receives remarks about the texts as a whole: the kind, ``rdkit``, ``long`` or
        ``unknown``, of how many texts it is true, out of how many, and the rest of a line; it names
        a text by its number from ``first`` on (see ``tell``).
        """
        check_batch_size(batch_size)
        special = self.tokenizer.special_ids
        entries, reasons = self._entries(texts, report)
        rows: dict[int, list[int]] = {}
        for place, text in enumerate(entries):
            if place not in reasons:
                try:
                    rows[place] = self._ids(text, "it", MOST_UNKNOWN)
                except UserError as error:
                    reasons[place] = str(error)
        self._tell_long(
            {where.format(first + place): len(row) for place, row in rows.items()}, report
        )
        if partly := [place for place, row in rows.items() if special.unk in row]:
            unknown = self._unknown(entries[partly[0]])
            report(
                "unknown",
                len(partly),
                len(rows),
                "texts contain something that is not in the vocabulary and is read as [UNK], such "
                f"as {unknown}",
            )
        vectors_BD = torch.full((len(entries), self.config.model.shape.width), torch.nan)
        order = list(rows)
        for start in range(0, len(order), batch_size):
            own = order[start : start + batch_size]
            rows_BN = self._padded([rows[place] for place in own])
            hidden_BND = token_states(self.model, rows_BN, self.config.num_copies)
            hidden_BND = hidden_BND.float()
            is_inner_BN1 = is_inner(rows_BN, special).unsqueeze(2)
            vectors_BD[own] = (hidden_BND * is_inner_BN1).sum(dim=1) / is_inner_BN1.sum(dim=1)
        return vectors_BD, reasons

    def fill(self, text: str) -> Filled:
        """Fill the masks of a text with likely tokens, chosen together."""
        masked_ids_BN = self.masked_row(text)
        # As in validation at this step, transitions may still be blended with fixed chains.
        share, copies = self.config.chain_share(self.step), self.config.num_copies
        reading = read_row(self.model, masked_ids_BN, share, copies)
        filled_N = masked_ids_BN[0].clone()
        filled_N[filled_N == self.tokenizer.special_ids.mask] = reading.token_ids_S
        filled = self.tokenizer.decode(filled_N[1:-1].tolist())
        return Filled(filled, min(1.0, math.exp(reading.log_joint)), reading)

    def explore(self, text: str) -> Explorer:
        """The state graph of a text with masks, to display in a notebook or to ``save``."""
        reading = self.fill(text).reading
        return Explorer(read_scene(reading, self.tokenizer, self.masked_row(text)))

    def loss(self, texts: Sequence[str], seed: int = 1) -> Tensor:
        """The pre-training loss on some texts, in nats per target, a scalar with gradient.

        Args:
            texts: as for ``embed``, without masks; tokens are hidden as in the run.
            seed: for the choice of the hidden tokens.
        """
        if self.config.masking.strategy == "slots":
            raise UserError(
                f"{self.run} was trained with masks at fixed positions; use its pack"
            )
        for i, text in enumerate(listed(texts)):
            if isinstance(text, str) and MASK in text:
                raise UserError(
                    f"texts[{i}] contains {MASK}, but the loss hides tokens itself; give the text "
                    "without masks"
                )
        texts, reasons = self._entries(texts, _say)
        for place, reason in reasons.items():
            raise UserError(f"texts[{place}]: {reason}; leave it out")
        if not texts:
            raise UserError("there are no texts to compute a loss for; give at least one")
        rows_BN, special = self.rows(texts), self.tokenizer.special_ids
        masker = make_masker(replace(self.config, seed=seed), special, lambda: self.tokenizer)
        counter_B = np.arange(len(rows_BN))
        batch = masker(rows_BN, 0 * counter_B, counter_B, 0)
        return self.model.answer(batch, self.config.chain_share(self.step)).scored().loss

    def masked_row(self, text: str) -> Tensor:
        """masked_ids_BN: one text with masks as a row of ids, with [BOS] and [EOS]."""
        tokenizer = self.tokenizer
        text = document(text, tokenizer.kind, "the text")
        if MASK not in text:
            raise UserError(
                f"the text has no {MASK}; write {MASK} in place of each hidden token"
            )
        if tokenizer.special_ids.unk in tokenizer.encode_with_masks(text):
            raise UserError(
                f"not in the vocabulary of {self.run}: {self._unknown(text)}; leave it out, or "
                f"choose another model with --run, such as {' or '.join(SHIPPED)}"
            )
        return self.rows([text])

    def _unknown(self, text: str) -> str:
        """The parts of a text that are not in the vocabulary, quoted."""
        parts = re.split(rf" ?{re.escape(MASK)}", text)
        unknown = [piece for part in parts for piece in self.tokenizer.unknown_pieces(part)]
        return ", ".join(map(repr, dict.fromkeys(unknown)))

    def rows(self, texts: Sequence[str]) -> Tensor:
        """token_ids_BN: some texts as rows of ids with [BOS] and [EOS]; "[MASK]" is a mask.

        Every character counts, white space around a text too.
        """
        texts = [texts] if isinstance(texts, str) else texts
        names = [f"texts[{i}]" for i in range(len(texts))] if len(texts) > 1 else ["the text"]
        rows = [self._ids(text, name) for text, name in zip(texts, names, strict=True)]
        lengths = dict(zip(names, map(len, rows), strict=True))
        self._tell_long(lengths, _say)
        return self._padded(rows)

    def _ids(self, text: str, name: str, most_unknown: float = 1.0) -> list[int]:
        """The ids of a text, with [BOS] and [EOS]; ``UserError`` if the model cannot take them."""
        ids, special = self.tokenizer.encode_with_masks(text), self.tokenizer.special_ids
        if not ids:
            raise UserError(f"{name} is empty; leave it out")
        most, length = self.config.model.max_positions, len(ids) + 2
        needed = self.config.expanded_length(length, ids.count(special.mask))
        if needed > most:
            raise UserError(
                f"{name} has {length} tokens with [BOS] and [EOS], {needed} after expansion "
                f"or repetition, more than model.max_positions {most} of {self.run}; shorten it"
            )
        if (unknown := ids.count(special.unk)) > most_unknown * len(ids):
            raise UserError(f"{unknown} of its {len(ids)} tokens are not in the vocabulary")
        return [special.bos, *ids, special.eos]

    def _tell_long(self, lengths: dict[str, int], report: Remark) -> None:
        """Report texts that are longer than the training rows; ``lengths`` has them by name."""
        learned = self.config.data.block_length
        if long := [name for name, length in lengths.items() if length > learned]:
            report(
                "long",
                len(long),
                len(lengths),
                f"texts are longer than the rows of up to {learned} tokens that {self.run} was "
                f"trained on, such as {long[0]} with {lengths[long[0]]}; its results for them are "
                "unreliable, so shorten them",
            )

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, True, self.tokenizer.special_ids.pad)

    def _entries(self, texts: Any, report: Remark) -> tuple[list[str], dict[int, str]]:
        """Read the entries (see ``readable``), with molecules cleaned as the vocabulary needs."""
        kind, cleaning, texts = self.tokenizer.kind, None, listed(texts)
        if kind == "smiles":
            if find_spec("rdkit"):
                cleaning = Cleaning.needed_by(self.tokenizer)
            else:
                remedy = "molecules are not checked, for RDKit is missing: pip install rdkit"
                report("rdkit", len(texts), len(texts), remedy)
        return readable(texts, kind, cleaning)


def load(path: str | Path, report: Callable[[str], None] = say) -> Trained:
    """Load a trained model, from the newest intact checkpoint of a run or from one of its steps.

    Args:
        path: the ``--output`` of a run, a ``checkpoints/step-NNNNNN`` in it or, if there is no such
            path, the name of a shipped model.
        report: receives a line for each damaged checkpoint that is skipped.
    """
    checkpoint = open_checkpoint(Path(path), report)
    path = checkpoint.path
    model, config = load_model(checkpoint)
    tokenizer = Tokenizer.load(path / "tokenizer.json")
    if tokenizer.sha256 != checkpoint.state["tokenizer_sha256"]:
        raise UserError(
            f"{path}/tokenizer.json does not belong to the model; restore it from a copy"
        )
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    sha256 = _sha256(checkpoint.tensors["model"])
    return Trained(
        run, checkpoint.step, config, model, tokenizer, path, sha256, checkpoint.state
    )


def _sha256(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {tuple(weights[name].shape)}\n".encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_checkpoint(path: Path, report: Callable[[str], None]) -> Checkpoint:
    """Open the checkpoint that ``load`` would load; the arguments are the same."""
    path = model_directory(path)
    if (path / MANIFEST).is_file():
        return load_checkpoint(path)
    latest = latest_checkpoint(path / "checkpoints", report)
    if latest is None:
        remedy = REMEDY
        if str(path) in SHIPPED:
            remedy = "it hides the shipped model of that name: rename it, or work elsewhere"
        elif fine_tuning(path) is not None:
            remedy = (
                "it holds a fine-tuned model: use exlm predict, or give the pre-training run it "
                "started from"
            )
        elif (path / "config.json").is_file():
            remedy = (
                "it is a model for transformers: open it there, or give the run it was exported "
                "from"
            )
        raise UserError(f"there is no checkpoint in {path}; {remedy}")
    return latest
