"""A task that a tiny model learns in a second."""

import numpy as np

from exlm_lab.downstream.task import Examples, Task

TASK = Task("which", "classes", ("no", "yes"), "accuracy", "smiles")


def molecules(count, seed):
    """Chains of carbon, of class "yes" if there is an oxygen at the end."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    texts = [("C" * int(rng.integers(2, 8)) + ("O" if yes else "C"),) for yes in labels]
    return Examples(texts, labels)
