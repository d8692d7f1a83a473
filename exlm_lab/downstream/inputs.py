"""Turn the examples of a task into rows of token ids: add boundaries, cut long rows, batch them.

Shapes: R examples, B rows of a batch, N tokens of a row.

A text becomes ``[BOS] a [EOS]``, a pair ``[BOS] a [EOS] [EOS] b [EOS]``, as in fairseq's RoBERTa.
Nothing is masked, so ExLM expands only the boundaries (all of them with ``model.boundary``
official, none with paper), while Repeated MLM repeats every token (Appendix B.2). Both happen in
the model: the rows made here are not yet expanded or repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_mini.config import RunConfig
from exlm_mini.data.tokenizer import Tokenizer

FRAME = 2
"""Number of boundary tokens around each text."""


def encode_examples(
    texts: list[tuple[str, ...]], tokenizer: Tokenizer, config: RunConfig
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Encode the examples of one split as rows of token ids.

    A row that is too long is cut at its end, a pair at the end of its longer text. There is at
    least one example, and the model's positions must hold a token of each text.

    Returns:
        rows: R arrays of int32 ids, boundaries included, not padded.
        notes: the number of rows, the length of the longest, how many were cut, and the share of
            [UNK] among all tokens before any were cut.
    """
    from exlm_mini.hf.tokenizer import tokenizer_for  # importing transformers takes seconds

    encode, columns = (
        tokenizer_for(tokenizer),
        [[*column] for column in zip(*texts, strict=True)],
    )
    most = config.longest_text(len(columns))
    rows = whole = encode(*columns)["input_ids"]
    num_long = sum(len(row) > most for row in whole)
    if num_long:
        rows = encode(*columns, truncation=True, max_length=most)["input_ids"]
    num_tokens = sum(len(row) - FRAME * len(columns) for row in whole)
    num_unknown = sum(row.count(tokenizer.special_ids.unk) for row in whole)
    return [np.array(row, dtype=np.int32) for row in rows], {
        "examples": len(rows),
        "longest": max(map(len, rows)),
        "truncated": num_long,
        "unknown_share": round(num_unknown / max(num_tokens, 1), 6),
    }


def evaluation_batches(lengths_R: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Row indices of each batch, longest rows first, so that a lack of memory shows at once."""
    order_R = np.argsort(-lengths_R, kind="stable")
    return [order_R[i : i + batch_size] for i in range(0, len(order_R), batch_size)]


def batch_of(examples: list[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """Collate some of ``Problem.examples`` into tensors, with the rows padded."""
    rows = [example["input_ids"] for example in examples]
    labels = {
        name: torch.from_numpy(np.stack([example[name] for example in examples]))
        for name in examples[0].keys() - {"input_ids"}
    }
    return {"input_ids": padded(rows, pad), **labels}


def padded(rows: list[np.ndarray], pad: int) -> Tensor:
    """token_ids_BN, int64: the rows, padded on the right to the length of the longest."""
    tensors = [torch.from_numpy(row).long() for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=pad)
