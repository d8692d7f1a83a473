"""The models of ``exlm_mini.model`` with the interface of transformers.

Rows are padded on the right. Models return one hidden state per input token, also for tokens that
they expand.

Shapes: B rows, N tokens, S masked tokens of a batch, M targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from exlm_mini.config import SpecialIds
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.hf.config import ExLMConfig, NoCopiedCode
from exlm_mini.hf.tokenizer import ExLMTokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.emission import VocabularyHead
from exlm_mini.model.exlm import token_states
from exlm_mini.reading.decoding import read_row

LOGGER = logging.get_logger(__name__)
NO_LABEL = -100
"""The label of transformers for tokens that are not predicted."""


class ExLMPreTrainedModel(NoCopiedCode, PreTrainedModel):
    """Base class of the models; its ``exlm`` is an ``ExLM`` or a ``MaskedLM``."""

    config_class = ExLMConfig
    base_model_prefix = "exlm"
    accepts_loss_kwargs = False  # the loss is a mean over its own batch
    _supports_sdpa = True

    def __init__(self, config: ExLMConfig) -> None:
        super().__init__(config)
        kind = ExLM if config.objective == "exlm" else MaskedLM
        self.exlm = kind(config.model, config.vocab_size, SpecialIds(**config.special_ids))
        # Weights have initialised themselves, unless transformers put them on the meta device.
        for weight in self.exlm.parameters():
            weight._is_hf_initialized = not weight.is_meta  # type: ignore[attr-defined]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.heads = nn.ModuleList(nn.Linear(*sizes) for sizes in self._head_sizes())
        self.post_init()

    def _head_sizes(self) -> Sequence[tuple[int, int]]:
        """Numbers of inputs and outputs of the linear layers that fine-tuning adds."""
        return []

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise weights that no file provided: heads as PyTorch does, all others as training
        does. Weights flagged with ``_is_hf_initialized`` stay as they are."""
        if isinstance(module, nn.Linear) and module in self.heads:
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
            return
        super()._init_weights(module)
        if isinstance(module, nn.Embedding) and module is getattr(self.exlm, "clone", None):
            init.normal_(module.weight, std=self.config.model.clone_embedding_std)
        if isinstance(module, VocabularyHead):
            init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.exlm.encoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding, which the outputs share; the output bias of new tokens is 0."""
        assert isinstance(value, nn.Embedding)
        self.exlm.encoder.embedding, head = value, self.exlm.head
        num_more = value.num_embeddings - head.bias.numel()
        head.bias = nn.Parameter(F.pad(head.bias.detach(), (0, num_more)))

    def rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """token_ids_BN: ``input_ids`` with the id of [PAD] wherever ``attention_mask`` is 0.

        Raises:
            ValueError: if padding or a [PAD] precedes a token, or ``input_ids`` is not (B, N) or
                is empty.
        """
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            shape = tuple(input_ids.shape)
            raise ValueError(f"input_ids must be (B, N) and not empty, got {shape}")
        pad = self.exlm.special_ids.pad
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, pad)
        is_real_BN = input_ids != pad
        is_late_B = (is_real_BN[:, 1:] & ~is_real_BN[:, :-1]).any(dim=1)
        if bool(is_late_B.any()):
            raise ValueError(
                f"row {int(is_late_B.nonzero()[0])} has padding or [PAD] (id {pad}) before a "
                "token; pad rows on the right (padding_side='right')"
            )
        learned = self.config.learned_length
        if learned and bool(is_real_BN[:, learned:].any()):
            LOGGER.warning_once(
                f"rows are longer than the {learned} tokens that the model was trained on"
            )
        return input_ids

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """hidden_BND: one hidden state per input token, see ``token_states``."""
        return token_states(
            self.exlm, self.rows(input_ids, attention_mask), self.config.num_copies
        )


class ExLMModel(ExLMPreTrainedModel):
    """The encoder: one state per input token, [BOS] and [EOS] included."""

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.hidden(input_ids, attention_mask))


class ExLMForMaskedLM(ExLMPreTrainedModel):
    """Pre-training by states alignment (§4.3) or as a masked language model, and filling masks."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        offset_mapping: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Compute the loss and, outside of training, predictions for each mask.

        Args:
            input_ids: int64 (B, N), with [MASK] for every hidden token.
            attention_mask: 0 at padding; if None, padding is recognised by the id of [PAD].
            labels: int64 (B, N), the hidden token at each [MASK], -100 elsewhere.
            special_tokens_mask, offset_mapping: not read; ``Trainer`` drops columns that are not
                named here, and ``collator`` needs these.

        Returns:
            loss: in nats. For ExLM that of §4.3 (per target, then the mean over rows that hold a
                [MASK] and a path), for MLM the mean over masked tokens; 0 for a batch without
                [MASK], None without labels.
            logits: (B, N, V), log-probability of each token at each [MASK] by itself, for ExLM
                summed over all paths; 0 at other tokens; None in training, which does not need it.
                With ``transition ctc`` the probabilities sum to less than one: the rest belongs to
                sequences with more or fewer tokens than masks.

        Raises:
            ValueError: in training, without labels or for a Repeated MLM; if labels and masks are
                at different positions, as from a collator that leaves some chosen tokens unmasked
                (use ``collator``); or, for ExLM without labels, if a row has one [MASK], but
                neither [BOS] nor [EOS], between which its path runs.
        """
        if self.training and labels is None:
            raise ValueError(
                "there is nothing to train on without labels; label_smoothing_factor, with which "
                "Trainer keeps them to itself, is not supported"
            )
        if self.training and self.config.num_copies > 1:
            raise ValueError(
                "pre-train a Repeated MLM with exlm_mini.pretrain, which masks each copy of a "
                "token by itself (§3.1); here a [MASK] stands for all copies"
            )
        is_masked_BN = input_ids == self.exlm.special_ids.mask
        if attention_mask is not None:
            is_masked_BN = is_masked_BN & (attention_mask != 0)
        # Checked before the rows, because a collator that draws random tokens may draw [PAD].
        if labels is not None and not torch.equal(labels != NO_LABEL, is_masked_BN):
            raise ValueError(
                "labels must be set at every [MASK] (id "
                f"{self.exlm.special_ids.mask}, config.special_ids) and nowhere else; mask with "
                "exlm_mini.hf.collator(tokenizer), and leave out texts that already contain [MASK]"
            )
        token_ids_BN = target_ids_BN = self.rows(input_ids, attention_mask)
        if labels is None:
            self._check_paths(token_ids_BN)
        else:
            target_ids_BN = torch.where(is_masked_BN, labels, token_ids_BN)
        batch = MaskedBatch(token_ids_BN, is_masked_BN, target_ids_BN)
        said = self.exlm.answer(batch, self.config.chain_share, self.config.num_copies)
        loss = logits = None
        if labels is not None:
            loss = said.scored().loss
        if not self.training:
            log_token_SV = said.log_token_SV
            logits = log_token_SV.new_zeros(*input_ids.shape, self.config.vocab_size)
            logits[is_masked_BN] = log_token_SV
        return MaskedLMOutput(loss=loss, logits=logits)

    def _check_paths(self, token_ids_BN: Tensor) -> None:
        special = self.exlm.special_ids
        targets = torch.tensor([special.mask, special.bos, special.eos])
        num_targets_B = torch.isin(token_ids_BN, targets.to(token_ids_BN.device)).sum(dim=1)
        is_alone_B = (num_targets_B == 1) & (token_ids_BN == special.mask).any(dim=1)
        if self.config.objective == "exlm" and bool(is_alone_B.any()):
            raise ValueError(
                f"row {int(is_alone_B.nonzero()[0])} has one [MASK], but neither [BOS] nor [EOS]; "
                "tokenize with add_special_tokens=True"
            )

    @torch.no_grad()
    def fill(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Fill the masks of each row together, with the tokens of the row's best path.

        The model must be in evaluation mode. The arguments are those of ``forward``.

        Returns:
            The filled rows, int64 (B, N), and the joint log-probability of each row's chosen
            tokens, (B,), in nats; for ExLM summed over all paths.
        """
        filled_BN, special = self.rows(input_ids, attention_mask).clone(), self.exlm.special_ids
        self._check_paths(filled_BN)
        log_joint_B = torch.zeros(len(filled_BN), device=filled_BN.device)
        for b, row_N in enumerate(filled_BN):  # row_N is a view
            own_1N = row_N[row_N != special.pad].unsqueeze(0)
            if not bool((own_1N == special.mask).any()):
                continue
            reading = read_row(
                self.exlm, own_1N, self.config.chain_share, self.config.num_copies
            )
            row_N[row_N == special.mask] = reading.token_ids_S.to(row_N)
            log_joint_B[b] = reading.log_joint
        return filled_BN, log_joint_B


class ExLMForSequenceClassification(ExLMPreTrainedModel):
    """A head on [BOS] as in BERT and RoBERTa: dropout, dense, tanh, dropout, output."""

    def _head_sizes(self) -> Sequence[tuple[int, int]]:
        width = self.config.hidden_size
        return [(width, width), (width, self.config.num_labels)]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Compute logits and, with labels, the loss that transformers uses for the problem type."""
        dense, output = self.heads
        first_BD = self.dropout(self.hidden(input_ids, attention_mask)[:, 0])
        logits = output(self.dropout(torch.tanh(dense(first_BD))))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        return SequenceClassifierOutput(loss=loss, logits=logits)


class ExLMForQuestionAnswering(ExLMPreTrainedModel):
    """Question answering as in SQuAD: scores each token as start and as end of the answer."""

    def _head_sizes(self) -> Sequence[tuple[int, int]]:
        return [(self.config.hidden_size, 2)]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ) -> QuestionAnsweringModelOutput:
        is_pad_BN = self.rows(input_ids, attention_mask) == self.exlm.special_ids.pad
        scores_BN2 = self.heads[0](self.dropout(self.hidden(input_ids, attention_mask)))
        lowest = max(-1e9, torch.finfo(scores_BN2.dtype).min / 2)  # start + end stays finite
        start, end = scores_BN2.masked_fill(is_pad_BN.unsqueeze(2), lowest).unbind(dim=2)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


AUTO_CLASSES = {
    AutoModel: ExLMModel,
    AutoModelForMaskedLM: ExLMForMaskedLM,
    AutoModelForQuestionAnswering: ExLMForQuestionAnswering,
    AutoModelForSequenceClassification: ExLMForSequenceClassification,
}


def register() -> None:
    """Register ExLM with the Auto classes of transformers, so that they need no remote code."""
    AutoConfig.register(ExLMConfig.model_type, ExLMConfig, exist_ok=True)
    AutoTokenizer.register(ExLMConfig, ExLMTokenizer, exist_ok=True)
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(ExLMConfig, model_class, exist_ok=True)
