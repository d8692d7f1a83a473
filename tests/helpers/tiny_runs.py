"""Pre-training runs of a few steps, laid out as by ``pretrain``, and small tasks to use them on."""

from pathlib import Path

from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.experiments.cells import Downstream
from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.training.trainer import Trainer

DATA = {
    "text": DataConfig(kind="text", vocab_size=400, block_length=32, max_documents=60),
    "smiles": DataConfig(kind="smiles", block_length=80, max_documents=300),
    "toy": DataConfig(kind="toy", grammar="town", num_sentences=64),
    "pairs": DataConfig(kind="toy", grammar="pairs", num_sentences=64),
}

CELL = {
    "model.width": 16, "model.num_heads": 2, "model.ffn_width": 16, "train.steps": 6,
    "train.batch_size": 4, "train.warmup_steps": 1, "train.validate_every": 3,
    "train.validation_rows": 4, "data.num_sentences": 64,
}  # fmt: skip
"""Settings that make a cell of a sweep tiny."""
TASK = Downstream(
    "toy-inference", TuneConfig(epochs=1, batch_size=6, precision="fp32"), 12, 6, 9
)
"""How such a cell is fine-tuned."""


def tiny_run(
    output: Path,
    kind: str,
    objective: str = "exlm",
    data: DataConfig | None = None,
    chain_warmup: float = 0.0,
    **model,
) -> Path:
    """Train a tiny model for three steps, by default on embedded data; returns its directory."""
    strategy = "bernoulli" if objective == "repeated-mlm" else "fixed_count"
    config = RunConfig(
        objective=objective,
        model=ModelConfig(**{"width": 16, "num_heads": 2, "ffn_width": 16, **model}),
        masking=MaskingConfig(strategy=strategy),
        data=data or DATA[kind],
        train=TrainConfig(
            steps=3, batch_size=4, save_every=2, validation_rows=4, device="cpu",
            chain_warmup=chain_warmup,
        ),
    )  # fmt: skip
    corpus = prepare_corpus(config.data, output / "data", config.seed)
    Trainer(config, corpus.train, corpus.validation, output).run()
    return output


def write_molecules(folder: Path) -> None:
    """Write BBBP with 40 molecules, some with stereo marks, and one more that RDKit rejects."""
    # Ten scaffolds of four molecules, two of class "yes": eight to train, one per other part.
    rings = ["C1CCCCC1", "C1CCNCC1", "C1CCC1", "C1CC1", "C1CCCC1", "C1COCCN1", "C1CCOCC1"]
    rings += ["C1CCSCC1", "C1CNC1", "C1CCNC1"]
    rows = ["num,name,p_np,smiles"]
    for i in range(40):
        chain = "C" * (1 + i // 10) + ("[C@H](O)" if i % 3 else "")
        rows.append(f"{i},m{i},{(i // 10) % 2},{chain}{rings[i % 10]}")
    rows.append("40,bad,1,C1CC")
    (folder / "BBBP.csv").write_text("\n".join(rows) + "\n")
