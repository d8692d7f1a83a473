"""The released code's configuration and parameter names, mapped to ours, and numbers it computed.

No released code is needed or imported; this file knows only its names, numbers and layouts. The
released model keeps separate query, key and value projections where ours are one matrix, and its
table of learned positions has pad + 1 unused leading rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch

COMMITTED = Path(__file__).parents[1] / "golden"
GOLDEN = Path(os.environ.get("EXLM_GOLDEN", COMMITTED))
DEFECTS = {"k2_invalid", "k2_no_final_eos", "k4_tail_bug"}
"""Golden files that record defects of the released code."""

RENAMES = {
    "encoder.sentence_encoder.embed_tokens": "encoder.embedding",
    "encoder.sentence_encoder.emb_layer_norm_after": "encoder.final_norm",
    "encoder.sentence_encoder.layers": "encoder.layers",
    "self_attn.q_proj": "attention.query_key_value",
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_norm",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_in",
    "fc2": "ffn_out",
    "encoder.lm_head.layer_norm": "head.norm",
    "encoder.lm_head": "head",
    "encoder.query_linear": "transition.query",
    "encoder.key_linear": "transition.key",
    "encoder.gate_linear": "transition.gate",
    "encoder.link_positional": "transition.place",
}
"""Parts of the released code's parameter names, and what they are in ours."""


def state_dict_from_official(official: Mapping[str, Tensor], pad: int = 1) -> dict[str, Tensor]:
    """Our state dict (or gradients) from that of the released code.

    Args:
        official: tensors by their released names; ``encoder.lm_head.weight`` (tied) may be missing.
        pad: the released padding id, which shifts learned positions by ``pad + 1`` rows.
    """
    ours = {}
    for name, tensor in official.items():
        if name == "encoder.lm_head.weight" or re.search(r"\.self_attn\.[kv]_proj\.", name):
            continue  # tied to the embedding / joined below
        if ".self_attn.q_proj." in name:
            tensor = torch.cat([official[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
        if name == "encoder.link_positional.weight":
            tensor = tensor[pad + 1 :].clone()
        for old, new in RENAMES.items():
            name = name.replace(old, new)
        ours[name] = tensor
    return ours


# ---- golden files ----


def golden_files(pattern: str) -> list:
    """The golden files that must match, as parameters of a test; ``DEFECTS`` are left out."""
    paths = [p for p in sorted(GOLDEN.glob(pattern)) if p.stem not in DEFECTS]
    return [pytest.param(p, id=p.stem) for p in paths]


class Golden:
    """One golden file: its arrays as tensors, its configuration, its model in our layout."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays = {
                name: torch.from_numpy(arrays[name]) for name in arrays if name != "meta"
            }
            self.meta = json.loads(str(arrays["meta"]))

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {n[len(prefix) :]: t for n, t in self.arrays.items() if n.startswith(prefix)}

    @property
    def config(self) -> ModelConfig:
        meta = self.meta
        assert meta["pre_norm"], "only pre-norm encoders exist"
        return ModelConfig(
            transition="gated",
            num_layers=meta["layers"],
            width=meta["dim"],
            ffn_width=meta["ffn"],
            num_heads=meta["heads"],
            states_per_mask=meta["k"],
            max_positions=meta.get("max_positions", 64),
            use_position=meta.get("links_feature") != "feature",
            dropout=0.0,
            attention_dropout=0.0,
        )

    def load(self, kind: type, config: ModelConfig | None = None) -> torch.nn.Module:
        vocab_size = self.meta["vocab"]  # in fairseq [EOS] separates documents, too
        special_ids = SpecialIds(pad=1, bos=0, eos=2, unk=3, sep=2, mask=vocab_size - 1)
        model = kind(config or self.config, vocab_size, special_ids)
        ours = state_dict_from_official(self.group("param/"), self.meta["pad"])
        known = model.state_dict()
        # Without transitions the released model still has a transition head; it gets no gradient.
        missing = model.load_state_dict({n: t for n, t in ours.items() if n in known})
        assert not missing.missing_keys
        return model.eval()

    def batch(self) -> MaskedBatch:
        source_BN, target_BN = self["src_tokens"].long(), self["target"].long()
        is_masked_BN = target_BN != self.meta["pad"]
        token_ids_BN = torch.where(is_masked_BN, target_BN, source_BN)
        return MaskedBatch(source_BN, is_masked_BN, token_ids_BN)

    def assert_gradients(self, model: torch.nn.Module) -> None:
        expected = state_dict_from_official(self.group("grad/"), self.meta["pad"])
        # Key biases shift every score of a softmax alike: their true gradient is 0, and what is
        # recorded is rounding noise, to be judged by the size of the other gradients.
        floor = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
        ours = dict(model.named_parameters())
        for name, gradient in expected.items():
            if name not in ours:
                assert not gradient.any(), f"{name} has a gradient but no counterpart"
                continue
            grad = ours[name].grad
            grad = torch.zeros_like(gradient) if grad is None else grad
            num_parts = 3 if "query_key_value" in name else 1  # query, key and value separately
            for part, theirs in zip(
                grad.chunk(num_parts), gradient.chunk(num_parts), strict=True
            ):
                assert_close(part, theirs, name, floor=floor)
        assert set(ours) <= set(
            state_dict_from_official(self.group("param/"), self.meta["pad"])
        )


def assert_close(
    ours: Tensor, theirs: Tensor, name: str, relative: float = 1e-4, floor: float = 1e-6
) -> None:
    """Assert an error of at most ``relative`` * max(largest entry, ``floor``); -inf must agree."""
    assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
    infinite = torch.isinf(theirs)
    assert torch.equal(torch.isinf(ours), infinite), name
    ours, theirs = ours[~infinite].detach(), theirs[~infinite]
    if theirs.numel():
        error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)
        assert error <= relative, f"{name}: relative error {error:.1e}"
