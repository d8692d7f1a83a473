"""A fine-tuned model for use from Python: predictions for any number of texts. ::

    import exlm_mini

    model = exlm_mini.load("runs/solubility")      # --output of exlm finetune
    model.predict(["CCO", "CC(=O)O"])              # {"logS": array([1.1, 0.9])}

The directory is also a transformers model: ``pipeline("text-classification", "runs/solubility")``
gives the same numbers.

Shapes: R texts, B rows of a batch, C outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.molecules import Cleaning
from exlm_mini.reading.entries import MOST_UNKNOWN, check_batch_size, listed, readable, tell
from exlm_mini.reading.runs import task_of
from exlm_mini.training.console import say
from exlm_mini.training.processes import choose_device


@dataclass(frozen=True)
class Predictor:
    """A fine-tuned model with its tokenizer, in evaluation mode."""

    path: Path
    task: dict[str, Any] = field(repr=False)
    """``fine_tuning`` in ``config.json``: kind of task, columns and targets of its table, ..."""
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)

    def predict(
        self,
        texts: str | Sequence[Any],
        batch_size: int = 64,
        report: Callable[[str], None] = say,
        first: int = 0,
    ) -> dict[str, np.ndarray]:
        """Predict the targets for some texts.

        Args:
            texts: R texts or molecules, or pairs for a model of pairs; a single text needs no list.
            batch_size: rows in memory at once.
            report: receives a line for each unreadable text, such as a SMILES that RDKit rejects or
                one whose tokens are mostly [UNK].
            first: the number that these lines give to the first text.

        Returns:
            A column (R,) for each target, by name: a number in its unit or the probability of yes,
            float64, nan where a text is unreadable. A model of classes gives the likeliest one,
            None where a text is unreadable, and a further column ``NAME probability``.
        """
        texts = listed(texts)
        scores_RC, reasons = self.scores(texts, batch_size)
        tell(reasons, "row {}", "it gets no prediction", report, first)
        names = list(self.model.config.id2label.values())
        if self.task["kind"] != "classes":
            return dict(zip(names, scores_RC.T, strict=True))
        (target,) = self.task["targets"]
        is_read_R = ~np.isnan(scores_RC[:, 0])
        words_R = np.full(len(texts), None, dtype=object)
        words_R[is_read_R] = [names[i] for i in scores_RC[is_read_R].argmax(axis=1)]
        return {target: words_R, f"{target} probability": scores_RC.max(axis=1)}

    def scores(
        self, texts: Sequence[Any], batch_size: int = 64
    ) -> tuple[np.ndarray, dict[int, str]]:
        """scores_RC, numbers or probabilities with nan for unreadable texts, and why those texts
        are unreadable, by their index; arguments as for ``predict``."""
        check_batch_size(batch_size)
        reasons: dict[int, str] = {}
        rows, columns = self._read(texts, reasons)
        scores_RC = np.full((len(texts), self.model.config.num_labels), np.nan)
        for start in range(0, len(rows), batch_size):
            own = rows[start : start + batch_size]
            encoded = self.tokenizer.pad(
                {"input_ids": [columns[row] for row in own]}, return_tensors="pt"
            ).to(self.model.device)
            with torch.no_grad():
                logits_BC = self.model(**encoded).logits.double().cpu()
            scores_RC[own] = self._meaning(logits_BC).numpy()
        return scores_RC, reasons

    def _meaning(self, logits_BC: torch.Tensor) -> torch.Tensor:
        """Turn logits into answers: numbers stay as they are, the others become probabilities."""
        if self.task["kind"] == "classes":
            return logits_BC.softmax(dim=1)
        numbers, names = self.task["numbers"], self.model.config.id2label.values()
        is_number_C = torch.tensor([name in numbers for name in names])
        return torch.where(is_number_C, logits_BC, logits_BC.sigmoid())

    def _read(
        self, texts: Sequence[Any], reasons: dict[int, str]
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Readable rows, longest first, and their ids; adds to ``reasons`` why others are not."""
        num_columns = len(self.task["columns"]) or 1
        # Only checks molecules; the tokenizer cleans them.
        checking = Cleaning() if self.task["input"] == "smiles" else None
        entries = [(text,) if isinstance(text, str) else text for text in texts]
        for row, entry in enumerate(entries):
            if isinstance(entry, Sequence) and len(entry) != num_columns:
                raise UserError(
                    f"texts[{row}] has {len(entry)} texts, but {self.path} was trained on "
                    f"{num_columns}; give as many"
                )
        columns = []
        for c in range(num_columns):
            values = (entry[c] if isinstance(entry, Sequence) else entry for entry in entries)
            own, why = readable(values, self.task["input"], checking)
            reasons |= why
            columns.append(own)
        rows = [row for row in range(len(texts)) if row not in reasons]
        if not rows:
            return [], {}
        chosen = [[column[row] for row in rows] for column in columns]
        encoded = self.tokenizer(*chosen, truncation=True)["input_ids"]
        unk = self.tokenizer.unk_token_id
        for row, ids in zip(rows, encoded, strict=True):
            inner = len(ids) - 2 * num_columns
            if (num_unknown := ids.count(unk)) > MOST_UNKNOWN * inner:
                reasons[row] = f"{num_unknown} of its {inner} tokens are not in the vocabulary"
        ids_of = {r: ids for r, ids in zip(rows, encoded, strict=True) if r not in reasons}
        return sorted(ids_of, key=lambda row: -len(ids_of[row])), ids_of


def load_predictor(path: str | Path, device: str = "cpu") -> Predictor:
    """Load the fine-tuned model in a directory.

    Args:
        path: the ``--output`` of ``exlm finetune``, or a task's directory in it.
        device: auto, cpu, cuda or cuda:N.
    """
    path = Path(path)
    task = task_of(path)
    if task["kind"] == "span":
        raise UserError(f"{path} answers questions; open it with AutoModelForQuestionAnswering")
    logging.disable_progress_bar()
    with reading(
        path, "restore it from a copy, or fine-tune in another --output", SafetensorError
    ):
        model: Any = AutoModelForSequenceClassification.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    return Predictor(path, task, model.to(choose_device(device)).eval(), tokenizer)
