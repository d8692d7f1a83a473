"""ExLM in transformers: the numbers of this package, and what users of transformers expect."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run

import exlm_mini
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.molecules import embedded_molecules
from exlm_mini.data.tokenizer import MASK
from exlm_mini.export import card, main
from exlm_mini.reading.decoding import read_row

transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402

TEXTS = {
    "smiles": ["CC(=O)N[MASK]", "CCO", "C[MASK]C(=O)[MASK]", "C[MASK][MASK](=[MASK])N"],
    "text": ["The value of an [MASK] is not[MASK].", "It is.", "If [MASK] then [MASK]"],
}
RUNS = {
    "smiles": {"dropout": 0.0, "chain_warmup": 0.5},
    "text": {"boundary": "paper", "transition": "paper"},
    "ctc": {"transition": "ctc"},
    "spans": {"transition": "spans", "dropout": 0.0, "expand_at": 1},
    "chains": {"transition": "chains", "dropout": 0.0},
    "mlm": {"objective": "mlm"},
    "repeated": {"objective": "repeated-mlm"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for name, options in RUNS.items():
        tiny_run(folder / name, "text" if name == "text" else "smiles", **options)
    return folder


def step(runs: Path, name: str, number: int = 3) -> Path:
    return runs / name / "checkpoints" / f"step-{number:06d}"


def opened(folder: Path, kind=None, **options):
    """The tokenizer and the model saved in a folder; the model is in evaluation mode."""
    model = (kind or transformers.AutoModelForMaskedLM).from_pretrained(folder, **options)
    return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_a_model_of_transformers(name, runs):
    tokenizer, model = opened(step(runs, name))
    trained = exlm_mini.load(runs / name)
    own, special = trained.tokenizer, trained.tokenizer.special_ids
    for key, weight in trained.model.state_dict().items():
        assert torch.equal(model.exlm.state_dict()[key], weight)
    texts = TEXTS["text" if name == "text" else "smiles"]
    assert tokenizer(texts).input_ids == [
        [special.bos, *own.encode_with_masks(text), special.eos] for text in texts
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert tokenizer.decode(batch.input_ids[1], skip_special_tokens=True) == texts[1]
    found = model(**batch).logits
    filled, log_joint = model.fill(**batch)
    for row, text in enumerate(texts):
        if MASK not in text:
            continue
        ids = tokenizer(text, return_tensors="pt").input_ids
        is_mask = ids[0] == tokenizer.mask_token_id
        reading = read_row(
            trained.model, ids, model.config.chain_share, trained.config.num_copies
        )
        log_token_SV = found[row, : ids.shape[1]][is_mask]
        torch.testing.assert_close(log_token_SV, reading.log_token_SV, atol=1e-5, rtol=1e-5)
        assert filled[row, : ids.shape[1]][is_mask].tolist() == reading.token_ids_S.tolist()
        assert log_joint[row].item() == pytest.approx(reading.log_joint, abs=1e-4)


def test_a_checkpoint_says_what_its_model_takes_and_keeps_its_chains(runs, monkeypatch):
    trained = exlm_mini.load(step(runs, "smiles", 2))
    tokenizer, model = opened(trained.path)
    assert model.config.chain_share == pytest.approx(2 / 3)
    most = tokenizer.model_max_length
    assert most == trained.config.longest_text()
    assert model.config.max_position_embeddings == trained.config.model.max_positions
    said: list[str] = []
    monkeypatch.setattr(hf.models.LOGGER, "warning_once", said.append)
    model(**tokenizer("CCO", return_tensors="pt"))
    model(**tokenizer("CCO", return_tensors="pt", padding="max_length"))
    assert not said
    row = tokenizer("C" * 999, truncation=True, return_tensors="pt").input_ids
    assert row.shape[1] == most > model.config.learned_length
    assert model(row).logits.isfinite().all()
    assert str(model.config.learned_length) in said[0]
    with pytest.raises(ValueError, match="max_positions"):
        model(torch.cat([row[:, :1], row], dim=1))


def test_the_pipeline_ranks_as_fill_does(runs):
    fill = transformers.pipeline("fill-mask", str(step(runs, "smiles")), top_k=3)
    reading = exlm_mini.load(runs / "smiles").fill("CC(=O)N[MASK]").reading
    for guess in fill("CC(=O)N[MASK]"):
        p = reading.log_token_SV[0, guess["token"]].exp().item()
        assert guess["score"] == pytest.approx(p, rel=1e-4)


# ---- export ----


def test_an_export_is_the_checkpoint_with_a_card(runs, tmp_path, capsys):
    path = step(runs, "smiles", 2)
    assert main([str(path), str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
    (one, model), (other, exported) = opened(path), opened(tmp_path / "out")
    assert one("C[MASK]").input_ids == other("C[MASK]").input_ids
    row = one("C[MASK]C", return_tensors="pt")
    assert torch.equal(model(**row).logits, exported(**row).logits)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 3" in text and "smiles, embedded" in text
    assert exlm_mini.load(path).sha256 in text
    first = exlm_mini.load(path)
    first = replace(first, config=replace(first.config, seed=0))
    assert "| seed | 0 |" in card(first)
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_is_no_run_is_told(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main([str(runs / "mlm"), str(tmp_path / "out")]) == 0
    for path, words in (
        (tmp_path / "out", "it is a model for transformers"),
        (tmp_path / "empty", "give the --output"),
        ("molecule", "molecules"),
    ):
        with pytest.raises(UserError, match=f"there is no checkpoint in {path}.*{words}"):
            exlm_mini.load(path)


@pytest.mark.slow
def test_remote_code_needs_no_import_and_says_what_to_install(runs, tmp_path):
    folder, again = str(tmp_path / "out"), str(tmp_path / "again")
    env = {**os.environ, "HF_HOME": str(tmp_path)}
    assert main([str(runs / "smiles"), folder]) == 0
    program = f"""
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)
assert tokenizer("C[MASK]").input_ids[0] == tokenizer.bos_token_id
model = transformers.AutoModelForMaskedLM.from_pretrained({folder!r}, trust_remote_code=True)
assert type(model).__name__ == "ExLMForMaskedLM"
for part in (model, tokenizer):
    part.save_pretrained({again!r})
transformers.AutoTokenizer.from_pretrained({again!r}, trust_remote_code=True)
transformers.AutoModelForMaskedLM.from_pretrained({again!r}, trust_remote_code=True)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    names = {path.name for path in Path(folder).iterdir()} - {"README.md"}
    assert {path.name for path in Path(again).iterdir()} == names  # no source is copied
    without = f"""
import sys
class Missing:
    def find_spec(self, name, *_):
        if name == "exlm_mini":
            raise ModuleNotFoundError("No module named 'exlm_mini'", name=name)
sys.meta_path.insert(0, Missing())
{program}
"""
    command = [sys.executable, "-c", without]
    failed = subprocess.run(command, capture_output=True, text=True, env=env)
    assert "pip install exlm_mini" in failed.stderr


# ---- what users of transformers do ----


@pytest.mark.parametrize("name", ["smiles", "spans", "chains", "mlm"])
def test_the_loss_is_that_of_training(name, runs):
    tokenizer, model = opened(step(runs, name))
    torch.manual_seed(1)
    rows = [tokenizer(text) for text in ("CC(=O)NC", "CCOCC(=O)O", "C1CCCCC1")]
    batch = hf.collator(tokenizer, 0.4, "spans")(rows)
    is_masked = batch["labels"] != -100
    tokens = torch.where(is_masked, batch["labels"], batch["input_ids"])
    own = model.exlm.answer(MaskedBatch(batch["input_ids"], is_masked, tokens)).scored()
    model.config.chain_share = 0.0
    assert model(**batch).loss.item() == pytest.approx(own.loss.item(), rel=1e-6)


def arguments(folder: Path, **options):
    return transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        per_device_train_batch_size=8, **options,
    )  # fmt: skip


def molecules(tokenizer, count: int) -> list:
    """Rows of molecules that all have 40 tokens."""
    rows = (tokenizer(text) for text in embedded_molecules())
    return list(itertools.islice((row for row in rows if len(row.input_ids) == 40), count))


@pytest.fixture(scope="module")
def warm(runs, tmp_path_factory):
    """A folder, held-out rows, and a function that trains with chains in the first 6 of 12 steps.

    It saves and evaluates every 2 steps, and returns the trainer and the loss of each evaluation.
    """
    folder = tmp_path_factory.mktemp("warm")
    tokenizer, _ = opened(step(runs, "smiles"))
    batch = hf.collator(tokenizer, 0.3, seed=1)(molecules(tokenizer, 40))
    # The masks are drawn once, so that every evaluation sees the same.
    rows = [{name: part[i] for name, part in batch.items()} for i in range(40)]

    def train(kind, options=(), stop=12, resume=None):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step >= stop

        trainer = transformers.Trainer(
            opened(step(runs, "smiles"))[1],
            arguments(
                folder / kind, max_steps=12, save_steps=2, eval_steps=2, eval_strategy="steps",
                learning_rate=1e-3, **dict(options),
            ),
            train_dataset=rows[:32], eval_dataset=rows[32:],
            callbacks=[hf.ChainWarmup(0.25), Stop()],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer, {
            line["step"]: line["eval_loss"]
            for line in trainer.state.log_history
            if "eval_loss" in line
        }

    return folder, rows[32:], train


def loss_of(model, rows) -> float:
    with torch.no_grad():
        return model.eval()(**transformers.default_data_collator(rows)).loss.item()


def test_a_checkpoint_in_the_warm_up_evaluates_as_it_did_in_training(warm):
    folder, rows, train = warm
    trainer, losses = train("all")
    shares = []
    for step, loss in losses.items():
        path = folder / "all" / f"checkpoint-{step}"
        model = transformers.AutoModelForMaskedLM.from_pretrained(path)
        shares.append(model.config.chain_share)
        assert loss_of(model, rows) == pytest.approx(loss, rel=1e-4), step
    assert shares == pytest.approx([1.0, 1.0, 1 / 3, 0, 0, 0])
    trainer.save_model(str(folder / "end"))
    end = transformers.AutoModelForMaskedLM.from_pretrained(folder / "end")
    assert end.config.chain_share == 0.0
    # A training resumed in the warm-up continues as if it had never stopped.
    _, resumed = train("all", resume=str(folder / "all" / "checkpoint-4"))
    assert resumed == pytest.approx(losses, rel=1e-5)


def test_the_best_model_and_a_stopped_one_keep_their_chains(warm):
    folder, rows, train = warm
    trainer, losses = train("best", {"load_best_model_at_end": True})
    best = min(losses, key=losses.get)  # a step with chains: 12 small steps teach no edges
    assert trainer.state.best_global_step == best
    stored = hf.ExLMConfig.from_pretrained(folder / "best" / f"checkpoint-{best}")
    assert trainer.model.config.chain_share == stored.chain_share > 0
    assert loss_of(trainer.model, rows) == pytest.approx(losses[best], rel=1e-4)
    trainer, losses = train("stopped", stop=4)
    assert trainer.model.config.chain_share == 1.0
    assert loss_of(trainer.model, rows) == pytest.approx(losses[4], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("SequenceClassification", ["labels"]),
        ("QuestionAnswering", ["start_positions", "end_positions"]),
    ],
)
def test_a_head_is_drawn_and_the_encoder_loaded(kind, names, runs):
    auto = getattr(transformers, f"AutoModelFor{kind}")
    tokenizer, model = opened(step(runs, "smiles"), auto)
    run = exlm_mini.load(runs / "smiles").model
    for name, weight in run.encoder.state_dict().items():
        assert torch.equal(model.exlm.encoder.state_dict()[name], weight)
    for head in model.heads:
        assert 0.3 < head.weight.std() * (3 * head.in_features) ** 0.5 < 1.7
    ids = tokenizer(["CC", "C"], padding=True, return_tensors="pt").input_ids
    assert ids.shape == (2, 4)
    out = model(ids, **dict.fromkeys(names, torch.tensor([1, 0])))
    out.loss.backward()
    assert all(p.grad is not None for p in model.heads.parameters())
    if kind == "QuestionAnswering":  # no answer begins or ends in padding
        assert max(out.start_logits[1, 3], out.end_logits[1, 3]) < -1e8
        half = model.half()(ids)
        for logits in (half.start_logits, half.end_logits):
            assert (logits[1, 3:] < logits[1, :3].min() - 1e4).all()
        assert (half.start_logits + half.end_logits).isfinite().all()


def test_gradients_do_not_grow_with_accumulation(runs, tmp_path):
    tokenizer, _ = opened(step(runs, "smiles"))
    rows, norms = molecules(tokenizer, 16), []
    for number in (1, 4):
        _, model = opened(step(runs, "smiles"))
        trainer = transformers.Trainer(
            model,
            arguments(tmp_path, max_steps=1, logging_steps=1, gradient_accumulation_steps=number),
            train_dataset=rows, data_collator=hf.collator(tokenizer, seed=1),
        )  # fmt: skip
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] < 2 * norms[0]


def test_a_repeated_mlm_is_not_trained_by_hiding_all_copies_of_a_token(runs):
    tokenizer, model = opened(step(runs, "repeated"))
    batch = hf.collator(tokenizer, seed=1)(molecules(tokenizer, 2))
    with pytest.raises(ValueError, match="masks each copy of a token by itself"):
        model.train()(**batch)


def test_labels_that_trainer_keeps_to_itself_are_missed(runs, tmp_path):
    tokenizer, model = opened(step(runs, "smiles"))
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1),
        train_dataset=molecules(tokenizer, 8), data_collator=hf.collator(tokenizer, seed=1),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"label_smoothing_factor, .* is not supported"):
        trainer.train()
