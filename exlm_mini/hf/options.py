"""What transformers may ask of every ``forward`` besides its own inputs.

Shapes: B rows, N tokens, T tokens after expansion, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from exlm_mini.model import ExLM
from exlm_mini.model.encoder import Encoder
from exlm_mini.model.exlm import of_tokens

NOT_TAKEN = {
    "output_attentions": "attention is computed by kernels that keep no probabilities",
    "inputs_embeds": "masks are recognised by their ids; give input_ids",
    "position_ids": "tokens have the places in which they stand",
    "token_type_ids": "the model has one type of token, 0",
    "head_mask": "all attention heads are used",
    "num_items_in_batch": "a loss is the mean of its own batch",
}
"""Keywords of other models that are refused, and why."""


def with_options(forward: Callable[..., ModelOutput]) -> Callable[..., Any]:
    """Add ``return_dict`` and ``output_hidden_states`` to a ``forward``, by keyword or from the
    config, and refuse by name what the models do not follow.

    ``hidden_states`` are one state (B, N, D) per input token after the embedding, after each layer
    but the last, and after the final LayerNorm. Where tokens are expanded, they are those of each
    token's first clone, as in ``token_states``.

    Raises:
        ValueError: for a keyword of ``NOT_TAKEN``, unless it asks for nothing.
        TypeError: for any other keyword.
    """

    @can_return_tuple
    @wraps(forward)
    def asked(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *labels: Tensor | None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> ModelOutput:
        options.setdefault("output_attentions", self.config.output_attentions)
        for name in [name for name in NOT_TAKEN if name in options]:
            value = options.pop(name)
            if name == "token_type_ids" and value is not None:
                value = bool(value.any())
            if value is not None and value is not False:
                raise ValueError(f"{name} is not supported: {NOT_TAKEN[name]}")
        if input_ids is None:
            raise ValueError("input_ids are missing")
        inputs = (input_ids, attention_mask, *labels)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not output_hidden_states:
            return forward(self, *inputs, **options)
        with _recorded(self.exlm.encoder) as states:
            output = forward(self, *inputs, **options)
        rows = self.exlm, self.rows(input_ids, attention_mask), self.config.num_copies
        num_below = 0
        if isinstance(self.exlm, ExLM) and self.exlm.config.expand_at:
            num_below = 1 + self.exlm.config.expand_at
        output["hidden_states"] = tuple(
            state if i < num_below else of_tokens(state, *rows)
            for i, state in enumerate(states)
        )
        return output

    return asked


@contextmanager
def _recorded(encoder: Encoder) -> Iterator[list[Tensor]]:
    """The output of the embedding, of each layer but the last, and of the final LayerNorm."""
    states: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda part, inputs, state: states.append(state))
        for part in (encoder.dropout, *encoder.layers[:-1], encoder.final_norm)
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
