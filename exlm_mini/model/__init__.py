"""The models: one file for each part of Figure 6; ``exlm`` puts the parts together.

``expansion`` copies masks into states, ``rope`` encodes their positions, ``encoder`` is the
Transformer, ``emission`` and ``transition`` are its two heads, ``objectives`` are the losses, and
``answers`` are the predictions of a model for its masks.
"""

from exlm_mini.model.exlm import ExLM, MaskedLM

__all__ = ["ExLM", "MaskedLM"]
