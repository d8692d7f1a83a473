"""A pre-trained encoder with a head for one task, and the loss of that task (§5, Appendix O).

Shapes: B rows, N input tokens, T expanded tokens, D width, C outputs of the head.

Nothing is masked downstream, but the encoder treats rows as in pre-training: ExLM with the official
boundary clones [BOS] and [EOS] k times, and Repeated MLM repeats every token (Appendix B.2). The
vocabulary head and the transitions are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_lab.downstream.task import Kind
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states


class ClassificationHead(nn.Module):
    """First token, dropout, dense, tanh, dropout, output: the head of BERT and RoBERTa.

    Weights are initialised as in PyTorch, and as in fairseq's head.

    Args:
        width: D of the encoder.
        num_outputs: classes, yes-no labels, or 1 for a number.
        dropout: "pooler dropout" of Table 8, on both sides of the dense layer.
    """

    def __init__(self, width: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width)
        self.output = nn.Linear(width, num_outputs)

    def forward(self, hidden_BND: Tensor, token_ids_BN: Tensor) -> Tensor:
        """scores_BC from the first token, [BOS], or its first clone or copy."""
        first_BD = self.dropout(hidden_BND[:, 0])
        return self.output(self.dropout(torch.tanh(self.dense(first_BD))))


class SpanHead(nn.Module):
    """Two scores per token: for an answer that starts there, and for one that ends there (SQuAD).

    Args:
        width: D of the encoder.
        dropout: before the only layer.
        pad: id of padding, which is never chosen.
    """

    def __init__(self, width: int, dropout: float, pad: int) -> None:
        super().__init__()
        self.pad = pad
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, 2)

    def forward(self, hidden_BND: Tensor, token_ids_BN: Tensor) -> Tensor:
        """scores_B2N: row 0 for the start, row 1 for the end; -inf at padding."""
        scores_B2N = self.output(self.dropout(hidden_BND)).transpose(1, 2)
        return scores_B2N.masked_fill((token_ids_BN == self.pad).unsqueeze(1), -torch.inf)


class FineTuned(nn.Module):
    """The encoder of a pre-trained model and a head.

    Args:
        pretrained: the model; its encoder becomes a part of this one.
        head: takes hidden_BND and token_ids_BN.
        num_copies: of every token, as in pre-training; above 1 for Repeated MLM.
    """

    def __init__(
        self, pretrained: MaskedLM | ExLM, head: nn.Module, num_copies: int = 1
    ) -> None:
        super().__init__()
        self.encoder, self.head = pretrained.encoder, head
        self.num_copies = num_copies
        # In a tuple, so that the parts that are not used downstream are not submodules.
        self._pretrained = (pretrained,)

    def forward(self, token_ids_BN: Tensor) -> Tensor:
        """Scores of the rows, see the heads.

        Args:
            token_ids_BN: int64, rows of ``inputs``, padded on the right up to the longest.
        """
        return self.head(self.hidden(token_ids_BN), token_ids_BN)

    def hidden(self, token_ids_BN: Tensor) -> Tensor:
        """hidden_BND: one state per token, that of its first clone or copy."""
        (pretrained,) = self._pretrained
        return token_states(pretrained, token_ids_BN, self.num_copies)


def num_answers(kind: Kind, labels: Tensor) -> int:
    """Over how many answers the loss of some rows is a mean; missing ones do not count."""
    return int((~labels.isnan()).sum()) if kind == "labels" else len(labels)


def loss_sum(kind: Kind, scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of some rows, summed over their answers; divide by ``num_answers``.

    Args:
        kind: classes: cross-entropy; number: squared error; labels: binary cross-entropy over
            those that are there; span: cross-entropy of start and end, halved each.
        scores: (B, C), for spans (B, 2, N).
        labels: int64 (B,), float (B,), float (B, C) with nan for missing, or int64 (B, 2).

    Returns:
        Scalar, float32 or wider.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if kind == "classes":
        return F.cross_entropy(scores, labels, reduction="sum")
    if kind == "number":
        return F.mse_loss(scores[:, 0], labels.to(scores.dtype), reduction="sum")
    if kind == "labels":
        is_there_BC = ~torch.isnan(labels)
        return F.binary_cross_entropy_with_logits(
            scores[is_there_BC], labels[is_there_BC].to(scores.dtype), reduction="sum"
        )
    start_BN, end_BN = scores.unbind(dim=1)
    return 0.5 * (
        F.cross_entropy(start_BN, labels[:, 0], reduction="sum")
        + F.cross_entropy(end_BN, labels[:, 1], reduction="sum")
    )
