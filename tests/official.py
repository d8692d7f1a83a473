"""The released code's configuration and parameter names, mapped to ours.

Only names, numbers and layouts are known here; no released code is needed or imported. The
released model keeps separate query, key and value projections where ours are one matrix, and its
table of learned positions has pad + 1 unused leading rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exlm_mini.config import ModelConfig, SpecialIds

OFFICIAL_SPECIAL_IDS = SpecialIds(pad=1, bos=0, eos=2, unk=3, sep=2, mask=-1)
"""fairseq's dictionary, where [MASK] is the last entry and [EOS] also separates documents."""

# Their argument: our field.
_FIELDS = {
    "encoder_layers": "num_layers",
    "encoder_embed_dim": "width",
    "encoder_ffn_embed_dim": "ffn_width",
    "encoder_attention_heads": "num_heads",
    "max_positions": "max_positions",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "ext_state_num": "states_per_mask",
}

# Their name: ours.
_RENAMES = [
    ("encoder.sentence_encoder.embed_tokens", "encoder.embedding"),
    ("encoder.sentence_encoder.emb_layer_norm_after", "encoder.final_norm"),
    ("encoder.lm_head.dense", "head.dense"),
    ("encoder.lm_head.layer_norm", "head.norm"),
    ("encoder.lm_head.bias", "head.bias"),
    ("encoder.query_linear", "transition.query"),
    ("encoder.key_linear", "transition.key"),
    ("encoder.gate_linear", "transition.gate"),
    ("encoder.link_positional", "transition.place"),
]
_LAYER_RENAMES = [
    ("self_attn.out_proj", "attention.output"),
    ("self_attn_layer_norm", "attention_norm"),
    ("final_layer_norm", "ffn_norm"),
    ("fc1", "ffn_in"),
    ("fc2", "ffn_out"),
]
_LAYER = re.compile(r"encoder\.sentence_encoder\.layers\.(\d+)\.(.+)")
_FUSED = "attention.query_key_value"


def special_ids_of(vocab_size: int) -> SpecialIds:
    """The released code's special ids for a vocabulary of that size."""
    return OFFICIAL_SPECIAL_IDS._replace(mask=vocab_size - 1)


def config_from_official(arguments: Mapping[str, Any]) -> ModelConfig:
    """Our settings for a released model.

    Args:
        arguments: fairseq's, such as ``ext_state_num`` and ``encoder_embed_dim``; unnamed ones
            keep the values of the released base model.
    """
    assert arguments.get("encoder_normalize_before", True), "only pre-norm encoders exist"
    fields = {
        ours: arguments[theirs] for theirs, ours in _FIELDS.items() if theirs in arguments
    }
    feature = arguments.get("links_feature", "feature:position")
    assert feature in ("feature", "feature:position"), feature
    return ModelConfig(
        preset="base", transition="gated", use_position=feature != "feature", **fields
    )


def state_dict_from_official(official: Mapping[str, Tensor], pad: int = 1) -> dict[str, Tensor]:
    """Our state dict (or gradients) from theirs.

    Args:
        official: tensors by their names; ``encoder.lm_head.weight`` (tied) may be missing.
        pad: their padding id, which shifts their learned positions by ``pad + 1`` rows.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in official.items():
        if name == "encoder.lm_head.weight" or ".self_attn.k_proj." in name:
            continue  # tied to the embedding / joined below
        if ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            parts = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            layer, rest = _LAYER.fullmatch(name).groups()
            kind = rest.rsplit(".", 1)[1]
            ours[f"encoder.layers.{layer}.{_FUSED}.{kind}"] = torch.cat(
                [official[part] for part in parts]
            )
        else:
            ours[_our_name(name)] = tensor
    if "transition.place.weight" in ours:
        ours["transition.place.weight"] = ours["transition.place.weight"][pad + 1 :].clone()
    return ours


def _rename(name: str, renames: list[tuple[str, str]]) -> str:
    """Replace the module part of a parameter name."""
    for old, new in renames:
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    raise KeyError(f"the parameter '{name}' has no counterpart")


def _our_name(name: str) -> str:
    if layer := _LAYER.fullmatch(name):
        return f"encoder.layers.{layer[1]}.{_rename(layer[2], _LAYER_RENAMES)}"
    return _rename(name, _RENAMES)
