"""The released model's layout of the same computation, for comparison of times.

Shapes: B rows, T expanded tokens, M targets, D width, H heads, d head size, V vocabulary.

Weights, loss and gradients are those of an ``ExLM``; the differences are:

- logits of the whole vocabulary, their log-softmax and all edges are computed for every expanded
  position, not for the states alone, and the dynamic programme runs over all positions;
- cosines and sines are gathered from tables, in each layer anew;
- attention stores its float32 probabilities and averages them over the heads, which nothing uses;
- shorter rows are padded, and padding goes through every layer. The released code pads with copies
  of the last token, which other tokens attend to; here nothing attends to padding, so that the
  loss is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.model import ExLM
from exlm_mini.model.encoder import Encoder, EncoderLayer, SelfAttention
from exlm_mini.model.expansion import Expanded, StateGraph, expand_masks
from exlm_mini.model.objectives import StateScores
from exlm_mini.model.rope import Rotation, rotation_1d
from exlm_mini.model.transition import GatedTransition, edge_log_softmax, edges


class ReleasedLayout(nn.Module):
    """Computes the same as an ``ExLM``, with its weights, in the released layout.

    Args:
        model: with the released code's choices: ``boundary`` official, ``transition`` gated with
            ``use_position``, ``rope`` 2d, no clone embedding.

    Raises:
        ValueError: for a model of other choices.
    """

    def __init__(self, model: ExLM) -> None:
        super().__init__()
        config = model.config
        chosen = (config.boundary, config.transition, config.use_position, config.rope)
        if chosen != ("official", "gated", True, "2d") or config.expand_at or model.clone:
            raise ValueError(f"the released layout has official, gated, True, 2d, not {chosen}")
        self.model = model
        self._table_of: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    @property
    def encoder(self) -> Encoder:
        """Of the model."""
        return self.model.encoder

    def forward(
        self,
        masked_ids_BN: Tensor,
        is_masked_BN: Tensor,
        token_ids_BN: Tensor,
        chain_share: float = 0.0,
    ) -> StateScores:
        """As ``ExLM.forward``; "states" are all T positions, most of them without edges.

        Args:
            masked_ids_BN, is_masked_BN, token_ids_BN: see ``MaskedBatch``.
            chain_share: 0, because the released code has no chains.

        Returns:
            Scores for ``objectives.log_likelihood``, L = T.

        Raises:
            ValueError: for another ``chain_share``.
        """
        if chain_share:
            raise ValueError(f"chain_share is {chain_share}; the released layout has none")
        model = self.model
        expanded, graph = expand_masks(
            masked_ids_BN,
            is_masked_BN,
            token_ids_BN,
            model.config.states_per_mask,
            model.config.boundary,
            model.special_ids,
        )
        hidden_BTD = self._encode(expanded)
        token_logits_BTV = model.head.logits(hidden_BTD, model.encoder.embedding.weight)
        log_prob_BTV = _wide(token_logits_BTV).log_softmax(dim=-1)
        target_BTM = graph.target_ids_BM.unsqueeze(1).expand(-1, hidden_BTD.shape[1], -1)
        whole = _over_all_positions(expanded, graph)
        return StateScores(
            log_prob_BTV.gather(2, target_BTM).transpose(1, 2),
            self._link(hidden_BTD, expanded, whole),
            None,
            None,
            whole,
            model._is_scored(graph),
            model.config.states_per_mask,
        )

    def _encode(self, expanded: Expanded) -> Tensor:
        """hidden_BTD, padding included."""
        encoder = self.model.encoder
        x_BTD = encoder.dropout(encoder.embedding(expanded.token_ids_BT))
        for layer in encoder.layers:
            assert isinstance(layer, EncoderLayer)
            x_BTD = self._layer(layer, x_BTD, expanded)
        return encoder.final_norm(x_BTD)

    def _layer(self, layer: EncoderLayer, x_BTD: Tensor, expanded: Expanded) -> Tensor:
        attended_BTD = self._attend(layer.attention, layer.attention_norm(x_BTD), expanded)
        x_BTD = x_BTD + layer.dropout(attended_BTD)
        inner_BTF = layer.activation_dropout(F.gelu(layer.ffn_in(layer.ffn_norm(x_BTD))))
        return x_BTD + layer.dropout(layer.ffn_out(inner_BTF))

    def _attend(self, attention: SelfAttention, x_BTD: Tensor, expanded: Expanded) -> Tensor:
        """Attention written out: scores, probabilities in float32, their mean over the heads."""
        query_BHTd, key_BHTd, value_BHTd = (
            part_BTD.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for part_BTD in attention.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        query_BHTd = self._rotate(query_BHTd * query_BHTd.shape[-1] ** -0.5, expanded)
        scores_BHTT = query_BHTd @ self._rotate(key_BHTd, expanded).transpose(2, 3)
        is_key_B11T = expanded.is_real_BT[:, None, None, :]
        weights_BHTT = _wide(scores_BHTT.masked_fill(~is_key_B11T, -torch.inf)).softmax(dim=-1)
        weights_BHTT.mean(dim=1)
        weights_BHTT = F.dropout(weights_BHTT, attention.dropout, attention.training)
        attended_BHTd = weights_BHTT.to(value_BHTd.dtype) @ value_BHTd
        return attention.output(attended_BHTd.transpose(1, 2).flatten(2))

    def _rotate(self, x_BHTd: Tensor, expanded: Expanded) -> Tensor:
        """Rotate the first half of each head by token index, the second by clone index."""
        table, turned = self._table(), []
        for half_BHTd, index_BT in zip(
            x_BHTd.chunk(2, dim=-1), (expanded.position_BT, expanded.clone_BT), strict=True
        ):
            cos_B1Td = table.cos_B1Td[0, 0, index_BT].unsqueeze(1)
            sin_B1Td = table.sin_B1Td[0, 0, index_BT].unsqueeze(1)
            a_BHTd, b_BHTd = half_BHTd.chunk(2, dim=-1)
            swapped_BHTd = torch.cat([-b_BHTd, a_BHTd], dim=-1)
            turned.append(half_BHTd * cos_B1Td + swapped_BHTd * sin_B1Td)
        return torch.cat(turned, dim=-1).to(x_BHTd.dtype)

    def _table(self) -> Rotation:
        """Cosine and sine of all positions, for half a head."""
        weight = self.encoder.embedding.weight
        key = weight.device, torch.promote_types(weight.dtype, torch.float32)
        if key not in self._table_of:
            place_1P = torch.arange(self.model.config.max_positions, device=key[0]).unsqueeze(0)
            self._table_of[key] = rotation_1d(place_1P, self.encoder.head_dim // 2, key[1])
        return self._table_of[key]

    def _link(self, hidden_BTD: Tensor, expanded: Expanded, whole: StateGraph) -> Tensor:
        """log E over all positions, (B, T, T); -inf except between states."""
        transition = self.model.transition
        assert isinstance(transition, GatedTransition) and transition.place is not None
        place_BTD = transition.place(whole.place_BL)
        feature_BTX = torch.cat([hidden_BTD, place_BTD.to(hidden_BTD.dtype)], dim=-1)
        query_BHTd, key_BHTd = (
            _wide(linear(feature_BTX)).unflatten(-1, (transition.num_heads, -1)).transpose(1, 2)
            for linear in (transition.query, transition.key)
        )
        log_gate_BTH = _wide(transition.gate(feature_BTX)).log_softmax(dim=-1)
        is_state_BT = expanded.is_real_BT & (expanded.clone_BT > 0)
        is_edge_BTT = edges(whole, transition.sparse)
        is_edge_BTT = is_edge_BTT & is_state_BT.unsqueeze(1) & is_state_BT.unsqueeze(2)
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            scores_BHTT = (query_BHTd @ key_BHTd.transpose(2, 3)) * query_BHTd.shape[-1] ** -0.5
            log_head_BHTT = edge_log_softmax(scores_BHTT, is_edge_BTT)
            log_mixed_BHTT = log_head_BHTT + log_gate_BTH.transpose(1, 2).unsqueeze(3)
            log_mixed_BTT = log_mixed_BHTT.logsumexp(dim=1)
        return log_mixed_BTT.masked_fill(~is_edge_BTT, -torch.inf)


def _over_all_positions(expanded: Expanded, graph: StateGraph) -> StateGraph:
    """The graph whose states are all positions: it starts in the first and ends in the last."""
    place_BT = torch.arange(expanded.token_ids_BT.shape[1], device=expanded.token_ids_BT.device)
    return graph._replace(
        place_BL=place_BT.expand_as(expanded.token_ids_BT),
        owner_BL=expanded.position_BT,
        clone_BL=expanded.clone_BT,
        num_states_B=expanded.is_real_BT.sum(dim=1),
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
