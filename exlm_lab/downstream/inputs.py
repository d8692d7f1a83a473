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

from exlm_mini.config import SpecialIds
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.reading.pretrained import Layout


def encode_examples(
    texts: list[tuple[str, ...]], tokenizer: Tokenizer, layout: Layout
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Rows of the examples of one split.

    What does not fit is cut from the end of the longer text of a pair, token by token, from the
    second where both are equally long.

    Args:
        texts: one text or a pair each; at least one.
        tokenizer: of the checkpoint.
        layout: of the model.

    Returns:
        rows: R times int32 ids, boundaries included, not padded.
        notes: how many there are, the tokens of the longest, how many were cut and by how many
            tokens, and the share of [UNK] among all tokens before any was cut.
    """
    encoded = iter(tokenizer.encode_batch([text for example in texts for text in example]))
    rows, num_truncated, num_tokens, num_cut, num_unknown = [], 0, 0, 0, 0
    for example in texts:
        parts = [next(encoded) for _ in example]
        lengths = [len(part) for part in parts]
        kept = longest_first(lengths, layout.room(len(parts)))
        num_tokens += sum(lengths)
        num_unknown += sum(part.count(layout.special_ids.unk) for part in parts)
        num_cut += sum(lengths) - sum(kept)
        num_truncated += sum(kept) < sum(lengths)
        rows.append(
            framed([part[:n] for part, n in zip(parts, kept, strict=True)], layout.special_ids)
        )
    return rows, {
        "examples": len(rows),
        "longest": max(len(row) for row in rows),
        "truncated": num_truncated,
        "tokens_cut": num_cut,
        "unknown_share": round(num_unknown / max(num_tokens, 1), 6),
    }


def longest_first(lengths: list[int], room: int) -> list[int]:
    """How many tokens of one text or two are kept so that they fit into ``room`` tokens.

    As if one token after the other were cut from the longer text, or from the second of equals.
    """
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    second = min(second, max(room - first, room // 2))
    return [min(first, room - second), second]


def framed(parts: list[list[int]], special_ids: SpecialIds) -> np.ndarray:
    """``[BOS] a [EOS]`` or ``[BOS] a [EOS] [EOS] b [EOS]``, int32."""
    bos, eos = special_ids.bos, special_ids.eos
    row = [bos, *parts[0], eos]
    for part in parts[1:]:
        row += [eos, *part, eos]
    return np.array(row, dtype=np.int32)


def evaluation_batches(lengths_R: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Indices of the rows of each batch, by falling length, so that memory runs out at once."""
    order_R = np.argsort(-lengths_R, kind="stable")
    return [order_R[i : i + batch_size] for i in range(0, len(order_R), batch_size)]


def padded(rows: list[np.ndarray], pad: int) -> Tensor:
    """token_ids_BN: int64, as long as the longest row, filled up on the right."""
    tensors = [torch.from_numpy(row).long() for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=pad)
