"""A small ExLM: masked language models, states expansion and states alignment (ICML 2025).

``config``      settings, recipes, options      ``data``      tokens, corpora, masks
``model``       MLM and ExLM, Figure 6 by file  ``alignment`` the sum over paths, in five speeds
``training``    the loop and what it survives   ``reading``   what a trained model says
``plot``        curves and figures              ``hf``        models for transformers
commands:       ``prepare pretrain fill plot doctor export``

Each imports only from those before it: config, data and alignment, model, training, then reading
and plot, then the commands. ``exlm_lab`` repeats the experiments of the paper. A
mistake of the user is a ``UserError`` everywhere: one line with the value and the remedy.
"""

from typing import Any

__version__ = "0.1.0"


def load(path: Any) -> Any:
    """A trained model, see ``exlm_mini.reading.trained.load``; of a directory with a fine-tuned
    model what predicts, see ``exlm_mini.hf.predictor.Predictor``."""
    from pathlib import Path

    from exlm_mini.config.checks import naming_extras

    with naming_extras():
        from exlm_mini.reading.runs import fine_tuning

        if fine_tuning(Path(path)) is not None:
            from exlm_mini.hf import load_predictor

            return load_predictor(path)
        from exlm_mini.reading.trained import load

        return load(path)
