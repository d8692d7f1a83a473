"""A trained model for use from Python: embed, fill, explore, and the loss of a text. ::

    import exlm_mini

    molecules = exlm_mini.load("runs/molecules")
    molecules.embed(["CCO", "CC(=O)O"])               # float (2, width)
    molecules.fill("CC(=O)N[MASK]").text              # the text with its masks filled
    molecules.explore("CC(=O)N[MASK]C[MASK]")         # the links between their states
    molecules.loss(["CCO", "CC(=O)O"]).backward()     # nats per hidden token

Shapes: B rows, N tokens, S masked tokens, D width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.text import document
from exlm_mini.data.tokenizer import MASK, Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states
from exlm_mini.reading.decoding import Reading, read_row
from exlm_mini.reading.explorer import Explorer, explorer
from exlm_mini.reading.pretrained import SHIPPED, TRAINED_IN_TURN, load_pretrained
from exlm_mini.reading.scene import read_scene
from exlm_mini.training.console import say
from exlm_mini.training.parts import chain_share, make_masker, num_copies, score


@dataclass(frozen=True)
class Filled:
    """A text with its masks filled."""

    text: str
    probability: float
    """Of the chosen tokens together; for ExLM summed over all paths."""
    reading: Reading = field(repr=False)


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer; the model is in evaluation mode, on the CPU."""

    run: Path
    step: int
    config: RunConfig = field(repr=False)
    model: ExLM | MaskedLM = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """One vector for each text, (B, D): the mean of its tokens' last states.

        [MASK] counts as a token, [BOS] and [EOS] do not. Tokens outside the vocabulary are read as
        [UNK]. White space around a text, and what follows a SMILES, is left out (``document``).

        Args:
            texts: the texts; one may come without a list.
            batch_size: texts in memory at once.

        Raises:
            UserError: naming an entry that is no text, empty, or too long for the model.
        """
        texts, special = self._documents(texts), self.tokenizer.special_ids
        vectors = [torch.empty(0, self.config.model.shape.width)]
        for rows_BN in self.rows(texts).split(batch_size) if texts else ():
            rows_BN = rows_BN[:, (rows_BN != special.pad).any(dim=0)]
            hidden_BND = token_states(self.model, rows_BN, num_copies(self.config))
            frame = rows_BN.new_tensor([special.pad, special.bos, special.eos])
            is_inner_BN1 = ~torch.isin(rows_BN, frame).unsqueeze(2)
            vectors.append((hidden_BND * is_inner_BN1).sum(dim=1) / is_inner_BN1.sum(dim=1))
        return torch.cat(vectors)

    def fill(self, text: str) -> Filled:
        """Fill the masks of a text with likely tokens, chosen together.

        Raises:
            UserError: see ``encode_row``.
        """
        masked_ids_BN = encode_row(self, text)
        reading = read(self, masked_ids_BN)
        filled = fill_in(self.tokenizer, masked_ids_BN, reading.token_ids_S)
        return Filled(filled, min(1.0, math.exp(reading.log_joint)), reading)

    def explore(self, text: str) -> Explorer:
        """The links between the states of the masks, for display in a notebook or to ``save``.

        Raises:
            UserError: see ``encode_row``; and if the states are not linked.
        """
        masked_ids_BN = encode_row(self, text)
        return explore(self, masked_ids_BN, read(self, masked_ids_BN))

    def loss(self, texts: Sequence[str], seed: int = 1) -> Tensor:
        """The loss of pre-training on these texts, in nats per target, a scalar with gradient.

        Args:
            texts: as for ``embed``, without masks; tokens are hidden as in the run.
            seed: of the masks.

        Raises:
            UserError: as ``embed``, for a [MASK], and for a language whose masks have fixed places.
        """
        if self.config.masking.strategy == "slots":
            raise UserError(f"{self.run} was trained with masks at fixed places; use its pack")
        texts = self._documents(texts)
        for i, text in enumerate(texts):
            if MASK in text:
                raise UserError(
                    f"texts[{i}] holds {MASK}, but a loss hides tokens by itself; give the text "
                    "without masks"
                )
        if not texts:
            raise UserError("there are no texts to take a loss of; give at least one")
        rows_BN, special = self.rows(texts), self.tokenizer.special_ids
        masker = make_masker(replace(self.config, seed=seed), special, lambda: self.tokenizer)
        counter_B = np.arange(len(rows_BN))
        batch = masker(rows_BN, 0 * counter_B, counter_B, 0)
        return score(self.model, batch, chain_share(self.config, self.step)).loss

    @property
    def model_in_words(self) -> str:
        """The kind of model, in words."""
        config = self.config
        if config.objective == "mlm":
            return "MLM"
        if config.objective == "repeated-mlm":
            return f"Repeated MLM, {num_copies(config)} copies"
        model, share = config.model, chain_share(config, self.step)
        chains = f", still {share:.0%} fixed parallel chains" if share else ""
        kind = f"{model.states_per_mask} states per mask, {model.transition} transitions"
        return f"ExLM, {kind}{chains}"

    def rows(self, texts: Sequence[str]) -> Tensor:
        """token_ids_BN of some texts, each between [BOS] and [EOS]; "[MASK]" is a mask.

        Every character counts, white space around a text too.
        """
        if isinstance(texts, str):
            texts = [texts]
        special = self.tokenizer.special_ids
        rows = [
            [special.bos, *self.tokenizer.encode_with_masks(text), special.eos]
            for text in texts
        ]
        names = [f"texts[{i}]" for i in range(len(rows))] if len(rows) > 1 else ["the text"]
        for name, row in zip(names, rows, strict=True):
            _check_length(self, name, row)
        learned = self.config.data.block_length
        if long := [i for i, row in enumerate(rows) if len(row) > learned]:
            say(
                f"{self.run} was trained on rows of up to {learned} tokens, and {len(long)} of "
                f"{len(rows)} texts have more, such as {names[long[0]]} with "
                f"{len(rows[long[0]])}; what it says of them is a guess, so cut them"
            )
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=special.pad)

    def _documents(self, texts: Sequence[str]) -> list[str]:
        """What each entry of a list holds; one text may come without a list."""
        is_list = isinstance(texts, Iterable) and not isinstance(texts, str)
        entries = list(texts) if is_list else [texts]
        kind = self.tokenizer.kind
        return [document(entry, kind, f"texts[{i}]") for i, entry in enumerate(entries)]


def load(path: str | Path) -> Trained:
    """Load a trained model, from the newest intact checkpoint of a run or from one of its steps.

    Args:
        path: OUTPUT of a run (for mlm+exlm the ExLM in it is taken, or name its ``mlm``), or
            ``checkpoints/step-NNNNNN``; or, if there is no such path, the name of a shipped model.

    Raises:
        UserError: see ``load_pretrained``.
    """
    path = Path(path)
    found = load_pretrained(single_run(path) or path, say)
    run, step = found.path.parent.parent, found.checkpoint.step
    return Trained(run, step, found.config, found.model(), found.tokenizer)


def single_run(directory: Path) -> Path | None:
    """The directory with ``checkpoints/``: the one given, or one of the two in an mlm+exlm run."""
    candidates = [directory, *(directory / name for name in TRAINED_IN_TURN)]
    return next((path for path in candidates if any(path.glob("checkpoints/step-*"))), None)


def newest_run(runs: Path) -> Path | None:
    """The run in a directory that saved a checkpoint last; None if no run has one."""
    found = [run for path in runs.glob("*") if (run := single_run(path))]
    return max(found, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, default=None)


def shipped_for(text: str) -> str:
    """The name of the shipped model for a text: SMILES have no blanks."""
    return "english" if " " in text.strip() else "molecules"


MAX_CHARACTERS = 20_000
"""More than any row holds. Splitting SMILES takes quadratic time if brackets stay open: a second
for this length."""


def encode_row(trained: Trained, text: str) -> Tensor:
    """masked_ids_BN of one text between [BOS] and [EOS].

    Raises:
        UserError: no text, not UTF-8, no mask, something the vocabulary lacks, or too long.
    """
    tokenizer = trained.tokenizer
    text = document(text, tokenizer.kind, "the text")
    if MASK not in text:
        raise UserError(f"the text has no {MASK}; write {MASK} in place of each hidden token")
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the text has {len(text):,} characters; {MAX_CHARACTERS:,} is the most that is read"
        )
    token_ids = tokenizer.encode_with_masks(text)
    if tokenizer.special_ids.unk in token_ids:
        pieces = re.split(rf" ?{re.escape(MASK)}", text)
        unknown = [piece for part in pieces for piece in tokenizer.unknown_pieces(part)]
        raise UserError(
            f"not in the vocabulary of {trained.run}: "
            f"{', '.join(repr(piece) for piece in dict.fromkeys(unknown))}; name another run with "
            f"--run, such as {' or '.join(SHIPPED)}"
        )
    return trained.rows([text])


def _check_length(trained: Trained, name: str, row: list[int]) -> None:
    """Refuse a row without tokens, or with more than the positions can hold.

    What counts is its length once it is expanded or repeated.
    """
    if len(row) == 2:
        raise UserError(f"{name} is empty; leave it out")
    config = trained.config
    needed, how = len(row) * num_copies(config), "after repetition"
    if config.objective == "exlm":
        num_boundaries = 2 if config.model.boundary == "official" else 0
        num_expanded = row.count(trained.tokenizer.special_ids.mask) + num_boundaries
        needed = len(row) + (config.model.states_per_mask - 1) * num_expanded
        how = "after expansion"
    if needed > config.model.max_positions:
        raise UserError(
            f"{name} has {len(row)} tokens with [BOS] and [EOS], {needed} {how}, more than "
            f"model.max_positions {config.model.max_positions} of {trained.run}; shorten it"
        )


def read(trained: Trained, masked_ids_BN: Tensor) -> Reading:
    """What the model of a run says about one row.

    Raises:
        UserError: if its weights give no probabilities.
    """
    # As at the validation of this step: transitions may still be blended with fixed chains.
    share, copies = chain_share(trained.config, trained.step), num_copies(trained.config)
    found = read_row(trained.model, masked_ids_BN, share, copies)
    if found.log_token_SV.isnan().any():
        raise UserError(
            f"the weights of {trained.run} give no probabilities, for they are too large or no "
            "numbers; give another run"
        )
    return found


def explore(trained: Trained, masked_ids_BN: Tensor, reading: Reading) -> Explorer:
    """The explorer of a reading of this row.

    Raises:
        UserError: if the states are not linked.
    """
    if reading.graph is None:
        raise UserError(
            f"an explorer shows the links between states, and {trained.run} has none "
            f"({trained.model_in_words}); give a run of ExLM with linked states"
        )
    return explorer(read_scene(reading, trained.tokenizer, masked_ids_BN))


def fill_in(tokenizer: Tokenizer, masked_ids_BN: Tensor, token_ids_S: Tensor) -> str:
    """The text with the chosen tokens in place of the masks."""
    filled_N = masked_ids_BN[0].clone()
    filled_N[filled_N == tokenizer.special_ids.mask] = token_ids_S
    return tokenizer.decode(filled_N[1:-1].tolist())
