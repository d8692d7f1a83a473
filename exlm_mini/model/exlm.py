"""The two models: a masked language model (§2) and ExLM (§4, Figure 6).

Shapes: B rows, N input tokens, S masked tokens of a batch, T expanded tokens, L states,
M targets, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch, repeat_tokens
from exlm_mini.model.answers import MaskScores, StateScores
from exlm_mini.model.emission import VocabularyHead
from exlm_mini.model.encoder import Encoder, initialise
from exlm_mini.model.expansion import Expanded, StateGraph, expand, expand_masks, gather_states
from exlm_mini.model.transition import blend, make_transition, parallel_chains


class MaskedLM(nn.Module):
    """Vanilla masked language model; Repeated MLM is the same model on repeated tokens."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, special_ids: SpecialIds = SpecialIds()
    ) -> None:
        super().__init__()
        self.config, self.special_ids = config, special_ids
        self.encoder = Encoder(config, vocab_size, special_ids.pad)
        self.head = VocabularyHead(config, vocab_size)
        initialise(self, config.init_std)

    @record_function("encoder")  # names this part of a step in PyTorch's profiler
    def encode(self, token_ids_BN: Tensor) -> Tensor:
        """hidden_BND of the rows, without any expansion."""
        is_expanded_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
        expanded = expand(
            token_ids_BN, torch.ones_like(token_ids_BN), is_expanded_BN, self.special_ids.pad
        )
        _check_length(expanded, self.config.max_positions)
        return self.encoder(*expanded)

    def forward(self, masked_ids_BN: Tensor, is_masked_BN: Tensor) -> Tensor:
        """token_logits_SV at the masked positions, row by row from left to right."""
        hidden_BND = self.encode(masked_ids_BN)
        hidden_SD = hidden_BND[is_masked_BN[:, : hidden_BND.shape[1]]]
        return self.head.logits(hidden_SD, self.encoder.embedding.weight)

    def answer(
        self, batch: MaskedBatch, chain_share: float = 0.0, num_copies: int = 1
    ) -> MaskScores:
        """The predictions for a batch.

        Args:
            chain_share: ignored; it is for ``ExLM``.
            num_copies: how often to repeat every token of a batch that is not repeated yet.
        """
        rows = (repeat_tokens(part_BN, num_copies) for part_BN in batch[:2])
        target_ids_S = batch.token_ids_BN[batch.is_masked_BN]
        return MaskScores(self(*rows), batch.is_masked_BN, target_ids_S, num_copies)


class ExLM(nn.Module):
    """Masked language model with expanded states and a transition matrix between them."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, special_ids: SpecialIds = SpecialIds()
    ) -> None:
        super().__init__()
        self.config, self.special_ids = config, special_ids
        self.encoder = Encoder(config, vocab_size, special_ids.pad)
        self.transition = make_transition(config)
        self.head = VocabularyHead(config, vocab_size)
        initialise(self, config.init_std)
        self.clone = None
        if config.clone_embedding_std > 0:
            self.clone = nn.Embedding(config.states_per_mask + 1, config.shape.width)
            nn.init.normal_(self.clone.weight, std=config.clone_embedding_std)

    @record_function("encoder")
    def encode(
        self, masked_ids_BN: Tensor, is_masked_BN: Tensor, token_ids_BN: Tensor
    ) -> tuple[Tensor, StateGraph]:
        """hidden_BTD of the expanded rows, and the graph of their states.

        In rows without masks only the boundaries are expanded (``official``), or nothing
        (``paper``); the encoder is used in this way downstream.
        """
        expanded, graph = expand_masks(
            masked_ids_BN,
            is_masked_BN,
            token_ids_BN,
            self.config.states_per_mask,
            self.config.boundary,
            self.special_ids,
        )
        _check_length(expanded, self.config.max_positions)
        return self.encoder(*expanded, masked_ids_BN, self.clone), graph

    def forward(
        self,
        masked_ids_BN: Tensor,
        is_masked_BN: Tensor,
        token_ids_BN: Tensor,
        chain_share: float = 0.0,
    ) -> StateScores:
        """Figure 6 from left to right: expand, encode, link the states, score the targets.

        Args:
            masked_ids_BN: int64, tokens with [MASK] in place of the hidden ones.
            is_masked_BN: bool, true for hidden tokens.
            token_ids_BN: int64, the tokens before masking.
            chain_share: weight of fixed parallel chains in the transitions, see
                ``transition.blend``; 0 except at the start of training.

        Returns:
            The scores, for ``answers.log_likelihood`` and the methods of ``StateScores``.
        """
        hidden_BTD, graph = self.encode(masked_ids_BN, is_masked_BN, token_ids_BN)
        state_BLD = self.states(hidden_BTD, graph)
        log_transition_BLL = self._link(state_BLD, graph, chain_share)
        log_emission_BML, log_blank_BL = self._emit(state_BLD, graph)
        # [BOS] and [EOS] are targets, but with the paper's boundary they are not scored.
        is_official = self.config.boundary == "official"
        is_scored_BM = graph.is_target_BM if is_official else graph.is_mask_BM
        return StateScores(
            log_emission_BML, log_transition_BLL, log_blank_BL, graph, is_scored_BM, state_BLD, self
        )  # fmt: skip

    def answer(
        self, batch: MaskedBatch, chain_share: float = 0.0, num_copies: int = 1
    ) -> StateScores:
        """The predictions for a batch, see ``forward``; ``num_copies`` is only for ``MaskedLM``."""
        return self(*batch, chain_share)

    def states(self, hidden_BTD: Tensor, graph: StateGraph) -> Tensor:
        """state_BLD: the hidden states of the graph, plus the clone embedding if there is one."""
        state_BLD = gather_states(hidden_BTD, graph)
        return state_BLD if self.clone is None else state_BLD + self.clone(graph.clone_BL)

    def token_logits(self, state_BLD: Tensor) -> Tensor:
        """Logits of all tokens for any states, token_logits_BLV; training never needs them."""
        return self.head.logits(state_BLD, self.encoder.embedding.weight)

    @record_function("transition")
    def _link(self, state_BLD: Tensor, graph: StateGraph, chain_share: float) -> Tensor | None:
        """log_transition_BLL; None for ``ctc``."""
        if self.transition is None:
            return None
        # While E only learns from the chains, its gradient must not pull the states away from
        # the emissions.
        if chain_share == 1:
            state_BLD = state_BLD.detach()
        log_transition_BLL = self.transition(state_BLD, graph)
        if chain_share == 0:
            return log_transition_BLL
        return blend(log_transition_BLL, parallel_chains(state_BLD, graph), chain_share)

    def _emit(self, state_BLD: Tensor, graph: StateGraph) -> tuple[Tensor, Tensor | None]:
        """Emission of the targets and, for ``ctc``, of the blank (the unknown token)."""
        weight_VD = self.encoder.embedding.weight
        if self.transition is not None:
            return self.head.log_emission(state_BLD, weight_VD, graph.target_ids_BM), None
        blank_B1 = torch.full_like(graph.target_ids_BM[:, :1], self.special_ids.unk)
        log_emission_BXL = self.head.log_emission(
            state_BLD, weight_VD, torch.cat([graph.target_ids_BM, blank_B1], dim=1)
        )
        return log_emission_BXL[:, :-1], log_emission_BXL[:, -1]


def token_states(model: MaskedLM | ExLM, token_ids_BN: Tensor, num_copies: int = 1) -> Tensor:
    """hidden_BND: one hidden state per token, that of its first clone or copy.

    Masks and boundaries are expanded as in pre-training.

    Args:
        token_ids_BN: int64, padded on the right; the result is meaningless at padding.
        num_copies: copies of every token; above 1 for Repeated MLM.
    """
    if isinstance(model, MaskedLM):
        hidden_BTD = model.encode(repeat_tokens(token_ids_BN, num_copies))
        copies_BN = torch.full_like(token_ids_BN, num_copies)
    else:
        special = model.special_ids
        is_mask_BN = token_ids_BN == special.mask
        hidden_BTD, _ = model.encode(token_ids_BN, is_mask_BN, token_ids_BN)
        expanded = [special.mask]
        if model.config.boundary == "official":
            expanded += [special.bos, special.eos]
        is_expanded_BN = torch.isin(token_ids_BN, token_ids_BN.new_tensor(expanded))
        copies_BN = torch.where(is_expanded_BN, model.config.states_per_mask, 1)
    place_BN = copies_BN.cumsum(dim=1) - copies_BN
    place_BN = place_BN.clamp(max=hidden_BTD.shape[1] - 1)  # padding may lie beyond the end
    return hidden_BTD.gather(1, place_BN.unsqueeze(2).expand(-1, -1, hidden_BTD.shape[2]))


def _check_length(expanded: Expanded, max_positions: int) -> None:
    length = expanded.token_ids_BT.shape[1]
    if length > max_positions:
        raise ValueError(
            f"a row has {length} tokens after expansion, more than model.max_positions "
            f"{max_positions}; shorten it (for example with the tokenizer's max_length; a pair of "
            "texts has more boundary tokens than a single text), or mask fewer tokens"
        )
