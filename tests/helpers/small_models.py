"""Small models, batches from rows written by hand, and comparisons of tensors.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import log_likelihood
from exlm_mini.model.encoder import Encoder, initialise
from exlm_mini.model.objectives import mlm_loss, states_alignment_loss

PAD, BOS, EOS, UNK, SEP, MASK = SPECIAL = SpecialIds()
V = 20
SMALL = {
    "num_layers": 2, "width": 16, "ffn_width": 24, "num_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "max_positions": 40,
}  # fmt: skip


def make_model(
    kind: type = ExLM, seed: int = 0, std: float = 0.3, vocab_size: int = V, **changes
) -> nn.Module:
    """A model in float64 with weights large enough for everything to matter."""
    torch.manual_seed(seed)
    model = kind(ModelConfig(**{**SMALL, **changes}), vocab_size).double()
    initialise(model, std)
    return model


def make_encoder(**changes) -> Encoder:
    """A float64 encoder with random biases and norms; at their initial 0 and 1 they do nothing."""
    torch.manual_seed(0)
    encoder = Encoder(ModelConfig(**{**SMALL, **changes}), V, PAD).double()
    initialise(encoder, 0.3)
    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.3)
    return encoder.eval()


def masked_rows(*rows: list[int], pad_to: int = 0) -> MaskedBatch:
    """A batch of rows, padded on the right; a negative number is a masked token."""
    N = max(pad_to, *map(len, rows))
    signed_BN = torch.tensor([row + [PAD] * (N - len(row)) for row in rows])
    is_masked_BN, token_ids_BN = signed_BN < 0, signed_BN.abs()
    return MaskedBatch(token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN)


def alone(batch: MaskedBatch, b: int) -> MaskedBatch:
    """One row of a batch without its padding."""
    length = int((batch.token_ids_BN[b] != PAD).sum())
    return MaskedBatch(*(x_BN[b : b + 1, :length] for x_BN in batch))


def loss_of(model: nn.Module, batch: MaskedBatch, **kwargs) -> Tensor:
    """The training loss of either kind of model."""
    if isinstance(model, MaskedLM):
        token_logits_SV = model(batch.masked_ids_BN, batch.is_masked_BN)
        return mlm_loss(token_logits_SV, batch.token_ids_BN[batch.is_masked_BN])
    scores = model(*batch, **kwargs)
    return states_alignment_loss(log_likelihood(scores), scores.is_scored_BM.sum(1))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed numbers that require a gradient."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(value: Tensor, inputs: list[Tensor], seed: int = 9) -> list[Tensor]:
    """Gradients of a randomly weighted sum of ``value``, so that every element counts."""
    weight = drawn(*value.shape, seed=seed, dtype=value.dtype).detach().to(value.device)
    return list(torch.autograd.grad((value * weight).sum(), inputs))


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> None:
    """Assert that two tensors are equal up to an absolute difference."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def assert_all_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-11) -> None:
    """``assert_same`` for each pair; ``tolerance`` is relative to the largest entry if above 1."""
    for one, other in zip(ours, theirs, strict=True):
        size = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        assert_same(one, other, tolerance * size)
