"""Pre-trained runs of a few steps, in the layout of ``pretrain``."""

from pathlib import Path

from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.corpora import prepare_corpus
from exlm_mini.trainer import Trainer

DATA = {
    "text": DataConfig(kind="text", vocab_size=400, block_length=32, max_documents=60),
    "smiles": DataConfig(kind="smiles", block_length=80, max_documents=300),
    "toy": DataConfig(kind="toy", grammar="town", num_sentences=64),
}


def tiny_run(output: Path, kind: str, objective: str = "exlm", **model) -> Path:
    """Train a tiny model for three steps on embedded data; its directory."""
    strategy = "bernoulli" if objective == "repeated-mlm" else "fixed_count"
    config = RunConfig(
        objective=objective,
        model=ModelConfig(**{"width": 16, "num_heads": 2, "ffn_width": 16, **model}),
        masking=MaskingConfig(strategy=strategy),
        data=DATA[kind],
        train=TrainConfig(steps=3, batch_size=4, save_every=2, validation_rows=4, device="cpu"),
    )
    corpus = prepare_corpus(config.data, output / "data", config.seed)
    Trainer(config, corpus.train, corpus.validation, output).run()
    return output
