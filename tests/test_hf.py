"""ExLM in transformers: the same numbers as here, and what its users expect of a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run

from exlm_mini.data.tokenizer import MASK
from exlm_mini.export import export, main
from exlm_mini.reading.decoding import read_row
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.parts import num_copies

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402

TEXTS = {
    "smiles": ["CC(=O)N[MASK]", "CCO", "C[MASK]C(=O)[MASK]", "C[MASK][MASK](=[MASK])N"],
    "text": ["The value of an [MASK] is not[MASK].", "It is.", "If [MASK] then [MASK]"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny_run(folder / "smiles", "smiles", dropout=0.0, chain_warmup=0.5)
    tiny_run(folder / "text", "text", boundary="paper", transition="paper")
    tiny_run(folder / "ctc", "smiles", transition="ctc")
    tiny_run(folder / "spans", "smiles", transition="spans", dropout=0.0, expand_at=1)
    tiny_run(folder / "chains", "smiles", transition="chains", dropout=0.0)
    tiny_run(folder / "mlm", "smiles", "mlm")
    tiny_run(folder / "repeated", "smiles", "repeated-mlm")
    return folder


@pytest.fixture(scope="module")
def exported(runs) -> Path:
    for run in runs.iterdir():
        assert main([str(run), str(runs / f"{run.name}-hf")]) == 0
    return runs


def opened(folder: Path, kind=None, **options):
    """Tokenizer and model, in evaluation mode."""
    model = (kind or transformers.AutoModelForMaskedLM).from_pretrained(folder, **options)
    return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


@pytest.mark.parametrize("name", ["smiles", "text"])
def test_ids_are_those_of_the_package(name, exported):
    tokenizer, _ = opened(exported / f"{name}-hf")
    own = load_pretrained(exported / name, print).tokenizer
    for text in TEXTS[name]:
        ids = [own.special_ids.bos, *own.encode_with_masks(text), own.special_ids.eos]
        assert tokenizer(text).input_ids == ids
    ids = tokenizer(TEXTS[name][1]).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXTS[name][1]


@pytest.mark.parametrize(
    "name", ["smiles", "text", "ctc", "spans", "chains", "mlm", "repeated"]
)
def test_weights_and_probabilities_are_those_of_the_run(name, exported, tmp_path):
    tokenizer, model = opened(exported / f"{name}-hf")
    pretrained = load_pretrained(exported / name, print)
    for key, weight in pretrained.model().state_dict().items():
        assert torch.equal(model.exlm.state_dict()[key], weight)
    texts = TEXTS["text" if name == "text" else "smiles"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    found = model(**batch).logits
    filled, log_joint = model.fill(batch.input_ids)
    for row, text in enumerate(texts):
        if MASK not in text:
            continue
        ids = tokenizer(text, return_tensors="pt").input_ids
        is_mask = ids[0] == tokenizer.mask_token_id
        if name in ("mlm", "repeated"):
            reading = read_row(
                pretrained.model(), ids, num_copies=num_copies(pretrained.config)
            )
        else:
            reading = read_row(pretrained.model(), ids, model.chain_share)
        log_token_SV = found[row, : ids.shape[1]][is_mask]
        torch.testing.assert_close(log_token_SV, reading.log_token_SV, atol=1e-5, rtol=1e-5)
        if name != "ctc":  # whose tokens compete with the blank
            torch.testing.assert_close(
                log_token_SV.exp().sum(1), torch.ones(int(is_mask.sum()))
            )
        assert filled[row, : ids.shape[1]][is_mask].tolist() == reading.token_ids_S.tolist()
        assert log_joint[row].item() == pytest.approx(reading.log_joint, abs=1e-4)


def test_the_pipeline_ranks_as_fill_does(exported):
    fill = transformers.pipeline("fill-mask", str(exported / "smiles-hf"), top_k=3)
    pretrained = load_pretrained(exported / "smiles", print)
    tokenizer = pretrained.tokenizer
    ids = [tokenizer.special_ids.bos, *tokenizer.encode_with_masks("CC(=O)N[MASK]")]
    row = torch.tensor([[*ids, tokenizer.special_ids.eos]])
    best = read_row(pretrained.model(), row, fill.model.chain_share).log_token_SV[0].exp()
    for guess in fill("CC(=O)N[MASK]"):
        assert guess["score"] == pytest.approx(best[guess["token"]].item(), rel=1e-4)


@pytest.mark.parametrize("name", ["smiles", "mlm", "repeated"])
def test_there_is_one_state_for_each_token(name, exported):
    tokenizer, model = opened(exported / f"{name}-hf", transformers.AutoModel)
    texts = TEXTS["smiles"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    assert hidden.shape[:2] == batch.input_ids.shape
    # The attention mask alone says what is padding, whatever stands there.
    batch["input_ids"] = batch.input_ids.masked_fill(batch.attention_mask == 0, 7)
    is_real = batch.attention_mask == 1
    assert torch.equal(model(**batch).last_hidden_state[is_real], hidden[is_real])
    for row, text in enumerate(texts):
        alone = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(hidden[row, : len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_a_saved_model_is_read_back_bit_for_bit(exported, tmp_path):
    tokenizer, model = opened(exported / "smiles-hf")
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    tokenizer, again = opened(tmp_path / "again")
    ids = tokenizer("CC(=O)N[MASK]", return_tensors="pt").input_ids
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_remote_code_needs_no_import_and_says_what_to_install(exported, tmp_path):
    folder, home = str(exported / "smiles-hf"), {"HF_HOME": str(tmp_path)}
    program = f"""
import transformers
model = transformers.AutoModelForMaskedLM.from_pretrained({folder!r}, trust_remote_code=True)
assert type(model).__name__ == "ExLMForMaskedLM"
"""
    env = {**os.environ, **home}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    without = f"import sys; sys.modules['exlm_mini'] = None\n{program}"
    failed = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, env=env
    )
    assert "pip install 'exlm-mini[hf]'" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["smiles", "spans", "chains", "mlm"])
def test_the_loss_is_that_of_training(name, exported):
    from exlm_mini.data.masking import MaskedBatch
    from exlm_mini.training.parts import score

    tokenizer, model = opened(exported / f"{name}-hf")
    torch.manual_seed(1)
    rows = [tokenizer(text) for text in ("CC(=O)NC", "CCOCC(=O)O", "C1CCCCC1")]
    batch = hf.collator(tokenizer, 0.4, "spans")(rows)
    is_masked = batch["labels"] != -100
    tokens = torch.where(is_masked, batch["labels"], batch["input_ids"])
    own = score(model.exlm, MaskedBatch(batch["input_ids"], is_masked, tokens), 0.0)
    model.chain_share = 0.0
    assert model(**batch).loss.item() == pytest.approx(own.loss.item(), rel=1e-6)


def test_labels_belong_to_masks_and_padding_to_the_right(exported):
    tokenizer, model = opened(exported / "smiles-hf")
    ids = tokenizer("CCO", return_tensors="pt").input_ids
    with pytest.raises(ValueError, match="collator"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="right"):
        model(torch.cat([torch.full((1, 2), tokenizer.pad_token_id), ids], dim=1))


def arguments(folder: Path, **options):
    return transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        per_device_train_batch_size=8, **options,
    )  # fmt: skip


def molecules(tokenizer, count: int) -> list:
    from exlm_mini.data.smiles import embedded_molecules

    rows = []
    for text in embedded_molecules():
        row = tokenizer(text)
        if len(row.input_ids) < 60 and tokenizer.unk_token_id not in row.input_ids:
            rows.append(row)
        if len(rows) == count:
            return rows
    raise AssertionError("too few")


def test_the_trainer_learns_with_chains_at_first(exported, tmp_path):
    tokenizer, model = opened(exported / "smiles-hf")
    shares = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            shares.append(model.chain_share)

    rows = molecules(tokenizer, 96)
    trainer = transformers.Trainer(
        model, arguments(tmp_path, max_steps=20, learning_rate=3e-3, save_steps=10),
        train_dataset=rows[:64], eval_dataset=rows[64:], data_collator=hf.collator(tokenizer),
        processing_class=tokenizer, callbacks=[hf.ChainWarmup(0.25), Watch()],
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert shares == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2] + [0.0] * 10)
    assert trainer.evaluate()["eval_loss"] < before
    shares.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert shares == [0.0] * 10


def masked_molecules(tokenizer, count: int) -> list:
    """Molecules with masks that stay, to be evaluated several times."""
    torch.manual_seed(1)
    collate = hf.collator(tokenizer, 0.3)
    batches = [collate([row]) for row in molecules(tokenizer, count)]
    return [{name: part[0].tolist() for name, part in batch.items()} for batch in batches]


def padded_batch(rows: list) -> dict:
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in rows])
        for name, pad in (("input_ids", 0), ("labels", -100))
    }


@pytest.fixture(scope="module")
def warm(exported, tmp_path_factory):
    """A training of 12 steps with chains in the first 6, evaluated and saved every 2."""
    folder = tmp_path_factory.mktemp("warm")
    rows = masked_molecules(opened(exported / "smiles-hf")[0], 40)

    def train(kind, options=(), stop=12, resume=None):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step >= stop

        trainer = transformers.Trainer(
            opened(exported / "smiles-hf")[1],
            arguments(
                folder / kind, max_steps=12, save_steps=2, eval_steps=2, eval_strategy="steps",
                learning_rate=1e-2, **dict(options),
            ),
            train_dataset=rows[:32], eval_dataset=rows[32:], data_collator=padded_batch,
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
        return model.eval()(**padded_batch(rows)).loss.item()


def test_a_checkpoint_in_the_warm_up_evaluates_as_it_did_in_training(warm):
    folder, rows, train = warm
    trainer, losses = train("all")
    shares = []
    for step, loss in losses.items():
        path = folder / "all" / f"checkpoint-{step}"
        model = transformers.AutoModelForMaskedLM.from_pretrained(path)
        shares.append(model.chain_share)
        assert loss_of(model, rows) == pytest.approx(loss, rel=1e-4), step
    assert shares == pytest.approx([1.0, 1.0, 1 / 3, 0, 0, 0])
    trainer.save_model(str(folder / "end"))
    end = transformers.AutoModelForMaskedLM.from_pretrained(folder / "end")
    assert end.chain_share == 0.0
    # Resumed in the warm-up, it goes on as if it had never stopped.
    _, resumed = train("all", resume=str(folder / "all" / "checkpoint-4"))
    assert resumed == pytest.approx(losses, rel=1e-5)


def test_the_best_model_and_a_stopped_one_keep_their_chains(warm):
    folder, rows, train = warm
    trainer, losses = train("best", {"load_best_model_at_end": True, "greater_is_better": True})
    best = max(losses, key=losses.get)
    assert trainer.state.best_global_step == best
    stored = hf.ExLMConfig.from_pretrained(folder / "best" / f"checkpoint-{best}")
    assert trainer.model.chain_share == stored.chain_share > 0
    assert loss_of(trainer.model, rows) == pytest.approx(losses[best], rel=1e-4)
    trainer, losses = train("stopped", stop=4)
    assert trainer.model.chain_share == 1.0
    assert loss_of(trainer.model, rows) == pytest.approx(losses[4], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("SequenceClassification", {"labels": torch.tensor([1, 0])}),
        ("TokenClassification", {"labels": torch.tensor([[0, 1, 2, 2], [1, 0, 2, -100]])}),
        (
            "QuestionAnswering",
            {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([2, 1])},
        ),
    ],
)
def test_a_head_is_drawn_and_the_encoder_loaded(kind, labels, exported, tmp_path):
    auto = getattr(transformers, f"AutoModelFor{kind}")
    tokenizer, model = opened(exported / "smiles-hf", auto, **(
        {} if kind == "QuestionAnswering" else {"num_labels": 3}
    ))  # fmt: skip
    run = load_pretrained(exported / "smiles", print).model()
    for name, weight in run.encoder.state_dict().items():
        assert torch.equal(model.exlm.encoder.state_dict()[name], weight)
    for head in model.heads:
        assert 0.3 < head.weight.std() * (3 * head.in_features) ** 0.5 < 1.7
    ids = tokenizer(["CC", "C"], padding=True, return_tensors="pt").input_ids
    assert ids.shape == (2, 4)
    out = model(ids, **labels)
    out.loss.backward()
    if kind == "QuestionAnswering":  # no answer begins or ends in padding
        assert max(out.start_logits[1, 3], out.end_logits[1, 3]) < -1e8
    assert all(p.grad is not None for p in model.heads.parameters())
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids)[0], model(ids)[0])


def test_gradients_do_not_grow_with_accumulation(exported, tmp_path):
    tokenizer, _ = opened(exported / "smiles-hf")
    rows, norms = molecules(tokenizer, 16), []
    for number in (1, 4):
        _, model = opened(exported / "smiles-hf")
        trainer = transformers.Trainer(
            model,
            arguments(tmp_path, max_steps=1, logging_steps=1, gradient_accumulation_steps=number),
            train_dataset=rows, data_collator=hf.collator(tokenizer, seed=1),
        )  # fmt: skip
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] < 2 * norms[0]


def test_a_directory_in_use_is_left_alone(runs, capsys, tmp_path):
    (tmp_path / "mine").write_text("x")
    assert main([str(runs / "smiles"), str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty" in capsys.readouterr().err


def test_export_is_of_the_step_that_is_named_and_keeps_its_chains(runs, tmp_path):
    step = runs / "smiles" / "checkpoints" / "step-000002"
    export(load_pretrained(step, print), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 3" in card and "smiles, embedded" in card
    assert load_pretrained(step, print).sha256 in card
    tokenizer, model = opened(tmp_path / "out")
    assert model.chain_share == pytest.approx(2 / 3)
    ids = tokenizer("C[MASK]C(=O)[MASK]", return_tensors="pt").input_ids
    found_SV = model(ids).logits[ids == tokenizer.mask_token_id]
    want_SV = read_row(load_pretrained(step, print).model(), ids, 2 / 3).log_token_SV
    torch.testing.assert_close(found_SV, want_SV, atol=1e-5, rtol=1e-5)
    without_SV = read_row(model.exlm, ids).log_token_SV
    assert not torch.allclose(found_SV, without_SV, atol=1e-4)
