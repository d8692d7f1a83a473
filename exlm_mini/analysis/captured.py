"""How many bits of total correlation a model captures (§3.2, "inter-token multimodality").

A model that predicts masks independently cannot get below the sum of their marginal entropies; one
that knows how they depend on each other can reach their joint entropy. What lies between is their
total correlation. Of the toy language all of it is known (``corpora.contexts``).
"""

from __future__ import annotations

from typing import NamedTuple


class Captured(NamedTuple):
    """Bits of the masks of a row, on average over rows; visible words are given."""

    floor_bits: float
    """Sum of the marginal entropies: the best that independent predictions can do."""
    joint_bits: float
    """Joint entropy: the best there is."""
    bits: float
    """-log2 P(masked words) of the model; on average not below ``joint_bits``."""

    @property
    def total_correlation_bits(self) -> float:
        """What dependencies are worth; 0 where the masked words are independent."""
        return self.floor_bits - self.joint_bits

    @property
    def captured_bits(self) -> float:
        """Bits won over the best independent predictions; below 0 for a model worse than them."""
        return self.floor_bits - self.bits

    @property
    def captured_share(self) -> float:
        """Part of the total correlation that is won; 1 for the true distribution.

        Raises:
            ValueError: if there is no total correlation.
        """
        if not self.total_correlation_bits > 0:
            raise ValueError("the masked words do not depend on each other: nothing to capture")
        return self.captured_bits / self.total_correlation_bits
