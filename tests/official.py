"""The released code's configuration and parameter names, mapped to ours and back.

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
from exlm_mini.config.checks import UserError

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

# Their name: ours, as (regular expression, replacement) in both directions.
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
_OUR_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")
_FUSED = "attention.query_key_value"


def special_ids_of(vocab_size: int) -> SpecialIds:
    """The released code's special ids for a vocabulary of that size."""
    return OFFICIAL_SPECIAL_IDS._replace(mask=vocab_size - 1)


def config_from_official(arguments: Mapping[str, Any]) -> ModelConfig:
    """Our settings for a released model.

    Args:
        arguments: fairseq's, such as ``ext_state_num`` and ``encoder_embed_dim``; unnamed ones
            keep the values of the released base model.

    Raises:
        UserError: for a post-norm encoder, which the package does not build.
    """
    if not arguments.get("encoder_normalize_before", True):
        raise UserError(
            "encoder_normalize_before is off; only pre-norm encoders (the released command) exist"
        )
    fields = {
        ours: arguments[theirs] for theirs, ours in _FIELDS.items() if theirs in arguments
    }
    feature = arguments.get("links_feature", "feature:position")
    if feature not in ("feature", "feature:position"):
        raise UserError(f"links_feature is '{feature}'; known: feature, feature:position")
    return ModelConfig(
        preset="base", transition="gated", use_position=feature != "feature", **fields
    )


def config_to_official(config: ModelConfig) -> dict[str, Any]:
    """fairseq's arguments for our settings; the inverse of ``config_from_official``.

    Raises:
        UserError: for settings the released code does not have.
    """
    own = config.transition, config.boundary, config.rope, config.expand_at
    if own != ("gated", "official", "2d", 0):
        raise UserError(
            "transition {}, boundary {}, rope {}, expand_at {}: the released code has gated, "
            "official, 2d and 0 only".format(*own)
        )
    shape = config.shape._asdict()
    return {
        **{theirs: shape.get(ours, getattr(config, ours)) for theirs, ours in _FIELDS.items()},
        "encoder_normalize_before": True,
        "links_feature": "feature:position" if config.use_position else "feature",
    }


def state_dict_from_official(official: Mapping[str, Tensor], pad: int = 1) -> dict[str, Tensor]:
    """Our state dict (or gradients) from theirs.

    Args:
        official: tensors by their names; ``encoder.lm_head.weight`` (tied) may be missing.
        pad: their padding id, which shifts their learned positions by ``pad + 1`` rows.

    Raises:
        UserError: naming an unknown parameter.
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


def state_dict_to_official(ours: Mapping[str, Tensor], pad: int = 1) -> dict[str, Tensor]:
    """Their state dict (or gradients) from ours; their unused position rows become 0.

    Args:
        ours: tensors by our names.
        pad: their padding id.

    Raises:
        UserError: naming a parameter the released model does not have.
    """
    official: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        if _FUSED in name:
            layer, rest = _OUR_LAYER.fullmatch(name).groups()
            kind = rest.rsplit(".", 1)[1]
            prefix = f"encoder.sentence_encoder.layers.{layer}.self_attn"
            for part, piece in zip(
                ("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True
            ):
                official[f"{prefix}.{part}.{kind}"] = piece.clone()
        elif name == "transition.place.weight":
            unused = tensor.new_zeros(pad + 1, tensor.shape[1])
            official["encoder.link_positional.weight"] = torch.cat([unused, tensor])
        else:
            official[_official_name(name)] = tensor
    return official


def _rename(name: str, renames: list[tuple[str, str]]) -> str | None:
    """Replace the module part of a parameter name; none when no rule fits."""
    for old, new in renames:
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return None


def _our_name(name: str) -> str:
    if layer := _LAYER.fullmatch(name):
        rest = _rename(layer[2], _LAYER_RENAMES)
        renamed = rest and f"encoder.layers.{layer[1]}.{rest}"
    else:
        renamed = _rename(name, _RENAMES)
    if not renamed:
        raise UserError(f"the parameter '{name}' has no counterpart here")
    return renamed


def _official_name(name: str) -> str:
    if layer := _OUR_LAYER.fullmatch(name):
        rest = _rename(layer[2], [(new, old) for old, new in _LAYER_RENAMES])
        renamed = rest and f"encoder.sentence_encoder.layers.{layer[1]}.{rest}"
    else:
        renamed = _rename(name, [(new, old) for old, new in _RENAMES])
    if not renamed:
        raise UserError(f"the parameter '{name}' has no counterpart in the released model")
    return renamed
