"""A small ExLM: masked language models with states expansion and states alignment (ICML 2025).

``config``      settings, recipes, options      ``data``      tokenizers, corpora, masking
``model``       MLM, ExLM; the parts of Fig. 6  ``alignment`` the sum over paths, in five backends
``training``    training loop, checkpoints      ``reading``   predictions of a trained model
``plot``        curves and figures              ``hf``        models for transformers
commands:       ``prepare pretrain fill plot doctor export``

Each package imports only from earlier ones, in this order: config; data and alignment; model;
training; reading and plot; the commands. ``exlm_lab`` repeats the experiments of the paper.
Everywhere, a user's mistake raises ``UserError``: one line with the value and the remedy.
"""

from typing import Any

__version__ = "0.1.0"


def load(path: Any) -> Any:
    """Load a trained model (see ``exlm_mini.reading.trained.load``) or, from a directory with a
    fine-tuned model, a predictor (see ``exlm_mini.hf.predictor.Predictor``)."""
    from pathlib import Path

    from exlm_mini.config.checks import naming_extras

    with naming_extras():
        from exlm_mini.reading.runs import fine_tuning

        if fine_tuning(Path(path)) is not None:
            from exlm_mini.hf import load_predictor

            return load_predictor(path)
        from exlm_mini.reading.trained import load

        return load(path)
