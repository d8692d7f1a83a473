"""The models of ``exlm_mini.model`` with the interface of transformers.

Rows are padded on the right. There is one hidden state per input token, even if the model expands
it.

Shapes: B rows, N tokens, S masked tokens of a batch, M targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.config.recipes import build
from exlm_mini.data.masking import repeat_tokens
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states
from exlm_mini.model.objectives import log_likelihood, mlm_loss, states_alignment_loss
from exlm_mini.reading.decoding import (
    log_softmax,
    masks_of_copies,
    masks_of_states,
    read_masked_lm,
    read_states,
)

NO_LABEL = -100
"""The label of transformers for tokens that are not predicted."""


class ExLMConfig(PreTrainedConfig):
    """Settings of a model, in ``config.json``.

    Args:
        architecture: ``ModelConfig`` as a dict.
        objective: exlm, mlm or repeated-mlm.
        num_copies: of every token; above 1 for repeated-mlm.
        chain_share: weight of fixed chains in the transitions; above 0 for an ExLM early in its
            training (see ``ChainWarmup``).
        special_ids: ``SpecialIds`` as a dict.
        vocab_size: V.
        classifier_dropout: before and in the heads of fine-tuning.
        kwargs: of ``PreTrainedConfig``, such as ``num_labels``.
    """

    model_type = "exlm"

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        objective: str = "exlm",
        num_copies: int = 1,
        chain_share: float = 0.0,
        special_ids: dict[str, int] | None = None,
        vocab_size: int = 4000,
        classifier_dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        model = build(ModelConfig, architecture or {})
        self.architecture = dict(architecture or {})
        self.objective, self.num_copies, self.chain_share = objective, num_copies, chain_share
        self.special_ids = special_ids or SpecialIds()._asdict()
        self.classifier_dropout = classifier_dropout
        self.hidden_size, self.num_hidden_layers = model.shape.width, model.shape.num_layers
        self.num_attention_heads = model.shape.num_heads
        special = SpecialIds(**self.special_ids)
        given = {"pad_token_id": special.pad, "bos_token_id": special.bos}
        super().__init__(**{**given, "eos_token_id": special.eos, **kwargs})
        self.vocab_size = vocab_size

    @property
    def model(self) -> ModelConfig:
        """The settings as a ``ModelConfig``."""
        return build(ModelConfig, self.architecture)


class ExLMPreTrainedModel(PreTrainedModel):
    """Base of the models; ``exlm`` is an ``ExLM`` or a ``MaskedLM``."""

    config_class = ExLMConfig
    base_model_prefix = "exlm"
    accepts_loss_kwargs = False  # a loss is the mean of its own batch

    def __init__(self, config: ExLMConfig) -> None:
        super().__init__(config)
        kind = ExLM if config.objective == "exlm" else MaskedLM
        self.exlm = kind(config.model, config.vocab_size, SpecialIds(**config.special_ids))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise heads; the encoder has initialised itself, and loaded weights stay."""
        if isinstance(module, nn.Linear) and module in getattr(self, "heads", ()):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.exlm.encoder.embedding

    def rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """token_ids_BN, with the id of padding where ``attention_mask`` is 0.

        Raises:
            ValueError: if a row is padded on the left.
        """
        pad = self.exlm.special_ids.pad
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, pad)
        is_real_BN = input_ids != pad
        if bool((is_real_BN[:, 1:] & ~is_real_BN[:, :-1]).any()):
            raise ValueError("rows must be padded on the right; set padding_side='right'")
        return input_ids

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """hidden_BND, one state for each token, see ``token_states``."""
        return token_states(
            self.exlm, self.rows(input_ids, attention_mask), self.config.num_copies
        )


class ExLMModel(ExLMPreTrainedModel):
    """The encoder: one state per input token, [BOS] and [EOS] included."""

    def __init__(self, config: ExLMConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.hidden(input_ids, attention_mask))


class ExLMForMaskedLM(ExLMPreTrainedModel):
    """Pre-training by states alignment (§4.3) or as a masked language model, and filling masks."""

    def __init__(self, config: ExLMConfig) -> None:
        super().__init__(config)
        self.chain_share = config.chain_share
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """The loss and, outside of training, predictions for each mask.

        Args:
            input_ids: int64 (B, N), with [MASK] for every hidden token.
            attention_mask: 0 at padding; None: padding has its id.
            labels: int64 (B, N), the hidden tokens, -100 elsewhere.

        Returns:
            loss: in nats, that of §4.3 for ExLM (per target, then the mean over rows) and the mean
            over masked tokens for MLM; None without labels. logits: log-probability of each token
            at each [MASK] by itself, (B, N, V), for ExLM summed over all paths; 0 at other tokens;
            None in training, which does not need them.

        Raises:
            ValueError: if labels and masks are at different places, as with a collator that leaves
                some tokens unmasked; use ``collator``.
        """
        token_ids_BN = self.rows(input_ids, attention_mask)
        is_masked_BN = token_ids_BN == self.exlm.special_ids.mask
        target_ids_BN = token_ids_BN
        if labels is not None:
            if not torch.equal(labels != NO_LABEL, is_masked_BN):
                raise ValueError(
                    "labels must stand at every [MASK] and nowhere else; mask with "
                    "exlm_mini.hf.collator(tokenizer)"
                )
            target_ids_BN = torch.where(is_masked_BN, labels, token_ids_BN)
        compute = self._masked_lm if isinstance(self.exlm, MaskedLM) else self._states
        loss, log_token_SV = compute(token_ids_BN, is_masked_BN, target_ids_BN)
        logits = None
        if log_token_SV is not None:
            logits = log_token_SV.new_zeros(*input_ids.shape, self.config.vocab_size)
            logits[is_masked_BN] = log_token_SV
        return MaskedLMOutput(loss=None if labels is None else loss, logits=logits)

    def _masked_lm(
        self, token_ids_BN: Tensor, is_masked_BN: Tensor, target_ids_BN: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Loss, and log_token_SV of the masks (None in training)."""
        copies = self.config.num_copies
        rows = (repeat_tokens(part_BN, copies) for part_BN in (token_ids_BN, is_masked_BN))
        token_logits_XV = self.exlm(*rows)
        target_ids_S = target_ids_BN[is_masked_BN]
        loss = mlm_loss(token_logits_XV, target_ids_S.repeat_interleave(copies))
        return loss, None if self.training else masks_of_copies(token_logits_XV, copies)

    def _states(
        self, token_ids_BN: Tensor, is_masked_BN: Tensor, target_ids_BN: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The same for ExLM, summed over all paths."""
        model = self.exlm
        assert isinstance(model, ExLM)
        hidden_BTD, graph = model.encode(token_ids_BN, is_masked_BN, target_ids_BN)
        state_BLD = model.states(hidden_BTD, graph)
        scores = model.score(state_BLD, graph, self.chain_share)
        loss = states_alignment_loss(
            log_likelihood(scores), scores.is_scored_BM.sum(dim=1), on_no_path="skip"
        )
        if self.training:
            return loss, None
        log_token_BLV = log_softmax(model.token_logits(state_BLD))
        return loss, masks_of_states(scores, log_token_BLV, model.special_ids.unk)

    @torch.no_grad()
    def fill(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the masks of each row together, by the tokens of its best path.

        Args:
            input_ids: int64 (B, N), as from the tokenizer; the model in evaluation mode.

        Returns:
            The filled rows, int64 (B, N), and log P of the chosen tokens together, (B,), in nats,
            for ExLM summed over all paths.
        """
        filled_BN, special = self.rows(input_ids, None).clone(), self.exlm.special_ids
        log_joint_B = torch.zeros(len(filled_BN))
        for b, row_N in enumerate(filled_BN):  # a view
            own_1N = row_N[row_N != special.pad].unsqueeze(0)
            if not bool((own_1N == special.mask).any()):
                continue
            if isinstance(self.exlm, MaskedLM):
                reading = read_masked_lm(self.exlm, own_1N, self.config.num_copies)
            else:
                reading = read_states(self.exlm, own_1N, self.chain_share)
            row_N[row_N == special.mask] = reading.token_ids_S.to(row_N.device)
            log_joint_B[b] = reading.log_joint
        return filled_BN, log_joint_B


class _WithHeads(ExLMPreTrainedModel):
    """A model for fine-tuning; ``heads`` are its new layers, initialised as in PyTorch."""

    def __init__(self, config: ExLMConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.heads = nn.ModuleList(nn.Linear(*sizes) for sizes in self._sizes())
        self.post_init()

    def _sizes(self) -> Sequence[tuple[int, Any]]:
        return [(self.config.hidden_size, self.config.num_labels)]

    def _scores(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The output of the last head at every token."""
        return self.heads[-1](self.dropout(self.hidden(input_ids, attention_mask)))


class ExLMForTokenClassification(_WithHeads):
    """One output per input token."""

    output_class: type[ModelOutput] = TokenClassifierOutput

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> ModelOutput:
        """Logits and, with labels, the usual loss of transformers."""
        logits = self._scores(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        return self.output_class(loss=loss, logits=logits)


class ExLMForSequenceClassification(ExLMForTokenClassification):
    """Dropout, dense, tanh, dropout and output on [BOS]: the head of BERT and RoBERTa."""

    output_class = SequenceClassifierOutput

    def _sizes(self) -> Sequence[tuple[int, int]]:
        width = self.config.hidden_size
        return [(width, width), (width, self.config.num_labels)]

    def _scores(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        dense, output = self.heads
        first_BD = self.dropout(self.hidden(input_ids, attention_mask)[:, 0])
        return output(self.dropout(torch.tanh(dense(first_BD))))


class ExLMForQuestionAnswering(_WithHeads):
    """Start and end of an answer, as in SQuAD."""

    def _sizes(self) -> Sequence[tuple[int, int]]:
        return [(self.config.hidden_size, 2)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **_: Any,
    ) -> QuestionAnsweringModelOutput:
        is_pad_BN = self.rows(input_ids, attention_mask) == self.exlm.special_ids.pad
        scores_BN2 = self._scores(input_ids, attention_mask)
        start, end = scores_BN2.masked_fill(is_pad_BN.unsqueeze(2), -1e9).unbind(dim=2)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


AUTO_CLASSES = {
    AutoModel: ExLMModel,
    AutoModelForMaskedLM: ExLMForMaskedLM,
    AutoModelForQuestionAnswering: ExLMForQuestionAnswering,
    AutoModelForSequenceClassification: ExLMForSequenceClassification,
    AutoModelForTokenClassification: ExLMForTokenClassification,
}


def register() -> None:
    """Register ExLM with the Auto classes of transformers; no remote code is needed then."""
    AutoConfig.register(ExLMConfig.model_type, ExLMConfig, exist_ok=True)
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(ExLMConfig, model_class, exist_ok=True)
