"""From the examples of a task to rows of ids: framed, cut where they are too long, batched.

Shapes: R examples, B rows of a batch, N tokens of a row.

A row is ``[BOS] a [EOS]``, of a pair ``[BOS] a [EOS] [EOS] b [EOS]``, as fairseq's RoBERTa has it.
Nothing is masked, so of ExLM only the boundaries are expanded (all of them with
``model.boundary`` official, none with paper), and Repeated MLM repeats every token (Appendix B.2).
Rows are kept as they are before that: the model expands or repeats them.
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
"""Boundaries of each text."""


def encode_examples(
    texts: list[tuple[str, ...]], tokenizer: Tokenizer, config: RunConfig
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Rows of the examples of one split.

    What does not fit is cut from the end of the longer text of a pair.

    Args:
        texts: one text each, or a pair each; at least one.
        tokenizer: of the checkpoint.
        config: of the model's run; its positions must hold a token of each text.

    Returns:
        rows: R times int32 ids, boundaries included, not padded.
        notes: how many there are, the tokens of the longest, how many were cut, and the share of
            [UNK] among all tokens before any was cut.
    """
    from exlm_mini.hf.tokenizer import tokenizer_for  # transformers takes seconds

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
    """Indices of the rows of each batch, by falling length, so that memory runs out at once."""
    order_R = np.argsort(-lengths_R, kind="stable")
    return [order_R[i : i + batch_size] for i in range(0, len(order_R), batch_size)]


def batch_of(examples: list[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """The tensors of some ``Problem.examples``, rows padded."""
    rows = [example["input_ids"] for example in examples]
    labels = {
        name: torch.from_numpy(np.stack([example[name] for example in examples]))
        for name in examples[0].keys() - {"input_ids"}
    }
    return {"input_ids": padded(rows, pad), **labels}


def padded(rows: list[np.ndarray], pad: int) -> Tensor:
    """token_ids_BN: int64, as long as the longest row, filled up on the right."""
    tensors = [torch.from_numpy(row).long() for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=pad)
