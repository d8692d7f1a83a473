"""The models, a file for each part of Figure 6; ``exlm`` puts them together.

``expansion`` copies masks into states, ``rope`` numbers them, ``encoder`` is the Transformer,
``emission`` and ``transition`` its two heads, ``objectives`` the losses, ``answers`` what a model
says of its masks.
"""

from exlm_mini.model.exlm import ExLM, MaskedLM

__all__ = ["ExLM", "MaskedLM"]
