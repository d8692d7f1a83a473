"""The recipes agree with the paper's tables, which are typed here again from the paper."""

import itertools
import re
import shlex
from dataclasses import asdict

import pytest
from commands import dry_run, fails
from refusals import told

from exlm_mini import prepare
from exlm_mini.config import DataConfig, EncoderShape
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import (
    RECIPES,
    dotted,
    load_recipe,
    read_settings,
    recipe_names,
    replaced,
)
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.pretrain import main
from exlm_mini.training.cost import longest_row, row_flops

SMALL = {"smiles-spans", "smiles-tiny", "text-tiny", "toy-pairs"}
FULL = sorted(set(recipe_names()) - SMALL)

BASE, LARGE = EncoderShape(12, 768, 3072, 12), EncoderShape(24, 1024, 4096, 16)
COMMON = {
    "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.activation_dropout": 0.0,
    "masking.mask_ratio": 0.15, "train.adam_betas": (0.9, 0.98), "train.decay_from": 0.0,
    "model.clone_embedding_std": 0.0, "train.chain_warmup": 0.0,  # not in the paper
}  # fmt: skip
TABLE_5 = COMMON | {
    "shape": BASE, "train.learning_rate": 2e-3, "train.warmup_steps": 5000, "train.steps": 50_000,
    "train.batch_size": 4096, "train.weight_decay": 0.01, "train.clip_norm": 0.0,
}  # fmt: skip
TABLE_7 = COMMON | {
    "shape": EncoderShape(9, 768, 2048, 12), "model.states_per_mask": 2,
    "train.learning_rate": 5e-4, "train.warmup_steps": 10_000, "train.steps": 120_000,
    "train.batch_tokens": 64_000, "train.weight_decay": 0.0, "train.clip_norm": 1.0,
    "data.vocab_size": 369,
}  # fmt: skip
TABLE_10 = COMMON | {
    "shape": BASE, "train.learning_rate": 5e-4, "train.warmup_steps": 10_000,
    "train.steps": 125_000, "train.batch_size": 2048, "train.weight_decay": 0.01,
    "train.clip_norm": 0.0,
}  # fmt: skip
README = TABLE_5 | {
    "model.max_positions": 2048, "data.block_length": 128, "train.adam_eps": 1e-6,
    "train.batch_size": 2 * 64 * 32, "train.micro_batch_size": 64, "train.warmup_steps": 1380,
    "train.steps": 23_000, "seed": 1,
}  # fmt: skip
EXLM = {
    "objective": "exlm", "model.states_per_mask": 4, "model.transition": "gated",
    "model.rope": "2d", "model.sparse": False,
}  # fmt: skip
MLM = TABLE_5 | {"objective": "mlm", "model.max_positions": 512}
ABLATION = TABLE_5 | EXLM | {"model.max_positions": 512 * 4}
PAPER = {
    "repeated-mlm": MLM | {"objective": "repeated-mlm", "model.max_positions": 512 * 8},
    "vanilla-mlm": MLM,
    "vanilla-mlm-plus-plus": MLM | {"train.steps": 2 * 50_000},
    "exlm-ablation": ABLATION,
    "exlm-without-2d-rope": ABLATION | {"model.rope": "1d"},
    "exlm-without-transitions": ABLATION | {"model.transition": "ctc"},
    "exlm-sparse-dag": ABLATION | {"model.sparse": True},
    "text-base": TABLE_10 | EXLM,
    "text-large": TABLE_10 | EXLM | {"shape": LARGE},
    "smiles-base": EXLM | TABLE_7,
    "official-readme": README | EXLM,
}


def settings_of(name):
    """All settings of a recipe by dotted name, and the shape of its encoder."""
    config = load_recipe(name)
    return dotted(asdict(config)) | {"shape": config.model.shape}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_says_what_its_table_says(name):
    settings, paper = settings_of(name), PAPER[name]
    assert {setting: settings[setting] for setting in paper} == paper


def test_the_ablations_differ_from_the_full_model_in_one_setting():
    full = settings_of("exlm-ablation")
    for name in ("exlm-without-2d-rope", "exlm-without-transitions", "exlm-sparse-dag"):
        other = settings_of(name)
        names = {setting for setting in full if full[setting] != other[setting]}
        assert len(names - {"recipe"}) == 1, name


def test_the_hours_of_table_12_decide_the_length_of_a_row():
    # TFLOP/s of each A100, whose peak is 312, for 50,000 steps of 4,096 rows in 54.7 GPU hours.
    config, needed = load_recipe("vanilla-mlm"), {}
    for row in (128, 512):
        whole_run = row_flops(config, 50_265, row) * 4096 * 50_000
        needed[row] = whole_run / (54.7 * 3600) / 1e12
    assert needed[128] == pytest.approx(74, abs=0.5)
    assert needed[512] == pytest.approx(320, abs=0.5) and needed[512] > 312
    assert config.data.block_length == 128


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("repeated-mlm", {"masking.num_copies": 8}),  # in Figure 4
        (
            "exlm-ablation",
            {"model.states_per_mask": 8, "masking.mask_ratio": 0.387},
        ),  # in Table 4
    ],
)
def test_the_cells_of_the_paper_fit_into_the_position_range(name, largest):
    config = replaced(load_recipe(name), largest)
    assert longest_row(config, config.data.block_length) <= config.model.max_positions


def without_base():
    return [name for name in FULL if "base" not in read_settings(RECIPES / f"{name}.yaml")]


@pytest.mark.parametrize("name", without_base())
def test_every_command_of_a_header_is_understood(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    text = "\n".join(line.lstrip("#") for line in lines if line[0] == "#").replace("\\\n", " ")
    data = load_recipe(name).data
    (prepared,) = re.findall(r"^ +python -m exlm_mini\.prepare (.+)$", text, re.M)
    words = shlex.split(prepared)
    assert prepare.main([*words, "--dry-run"]) == 0
    given = dict(itertools.pairwise(words))
    assert given["--output"] == data.pack
    assert int(given["--data.block_length"]) == data.block_length
    assert int(given["--data.vocab_size"]) == data.vocab_size
    assert prepare._data(prepare._parser().parse_args(words)).kind == data.kind
    for command in re.findall(r"^ +python -m exlm_mini\.pretrain (.+)$", text, re.M):
        assert parse(shlex.split(command)).config.recipe == name
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_stands_on_another(tmp_path):
    (tmp_path / "a.yaml").write_text("base: toy-pairs\ntrain: {steps: 7}\nseed: 3\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nmodel: {dropout: 0.25}\n")
    below, found = load_recipe("toy-pairs"), load_recipe(str(tmp_path / "b.yaml"))
    asked = {"recipe": "b", "seed": 3, "train.steps": 7, "model.dropout": 0.25}
    assert found == replaced(below, asked)


@pytest.mark.parametrize(
    ("base", "part"),
    [
        ("a.yaml", "is based on itself"),
        ("b.yaml", "is based on itself"),
        ("d.yaml", "is based on itself"),
        ("toy-pears", "not the path of a .yaml file either; did you mean toy-pairs"),
        ("c.yaml", "cannot read"),
    ],
)
def test_a_base_that_cannot_be_is_refused(base, part, tmp_path):
    (tmp_path / "a.yaml").write_text(f"base: {base}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    (tmp_path / "d.yaml").write_text("base: d.yaml\n")
    told(lambda: load_recipe(str(tmp_path / "a.yaml")), tmp_path / "a.yaml", part)


# ---- dry runs ----


@pytest.mark.parametrize("name", FULL)
def test_every_recipe_dry_runs_without_data_or_network(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed, said = dry_run(capsys, "--recipe", name)
    assert "does not exist yet; this estimate uses data.vocab_size" in said
    assert list(tmp_path.iterdir()) == []
    assert printed["objective"] == PAPER[name]["objective"]
    assert printed["steps"] == f"{PAPER[name]['train.steps']:,}"
    assert printed["device hours"].startswith("unknown: ")


def test_batch_and_hours_follow_from_devices_and_speed(capsys):
    printed, _ = dry_run(capsys, "--recipe", "smiles-base", "--devices", 2)
    assert printed["batch"] == "64,000 tokens = 2 devices x 16,000 tokens x 2 accumulated"
    assert printed["tokens"] == f"at most {64_000 * 120_000:,}"
    options = ["--devices", 2, "--throughput", "100000"]
    printed, _ = dry_run(capsys, "--recipe", "official-readme", *options)
    assert printed["batch"] == "4,096 rows = 2 devices x 64 rows x 32 accumulated"
    assert printed["tokens"] == f"{4096 * 128 * 23_000:,}"
    hours = 23_000 * 4096 * 128 / 100_000 / 3600
    assert printed["device hours"].startswith(f"{hours:,.1f} at 100,000 tokens/s, ")
    assert f"{hours / 2:,.1f} hours if 2 devices divide the work" in printed["device hours"]


@pytest.mark.parametrize("option", [["--devices", "2"], ["--throughput", "9"]])
def test_options_of_a_dry_run_are_refused_where_they_would_do_nothing(option, capsys):
    words = ["works only with --dry-run"]
    fails(capsys, main, "--recipe", "toy-pairs", *option, parts=words)


def test_a_dry_run_reads_a_prepared_corpus(tmp_path, capsys):
    data = DataConfig(kind="text", vocab_size=300, block_length=32, max_documents=60)
    prepare_corpus(data, tmp_path, seed=1)
    printed, _ = dry_run(capsys, "--recipe", "vanilla-mlm", "--data.pack", tmp_path)
    assert printed["vocabulary"] == "300"
    assert printed["row"] == "32 tokens, 32 expanded"


def test_a_source_replaces_the_corpus_of_a_recipe():
    asked = ["--recipe", "smiles-spans", "--data.source", "my.smi"]
    assert parse(asked[:2]).config.data.pack is not None
    data = parse(asked).config.data
    assert data.pack is None and data.source == ("my.smi",)
    assert parse([*asked, "--data.column", "none"]).config.data.column is None
    assert parse([*asked[:2], "--data.source", "none"]).config.data.source == ()


def test_a_recipe_or_an_option_that_names_its_data_replaces_those_of_the_base(tmp_path, capsys):
    ours, above = tmp_path / "ours.yaml", tmp_path / "above.yaml"
    ours.write_text("base: smiles-spans\ndata:\n  source: [my.smi]\n")
    above.write_text("base: ours.yaml\ndata:\n  pack: corpora/mine\n")
    sources = load_recipe(str(ours)).data
    assert sources.pack is None and sources.source == ("my.smi",)
    for asked in (["--recipe", above], ["--recipe", ours, "--data.pack", "corpora/mine"]):
        packed = parse([str(word) for word in asked]).config.data
        assert packed.pack == "corpora/mine" and packed.source == ()

    both = "--data.pack", "corpora/mine", "--data.source", "my.smi"
    fails(capsys, main, "--recipe", "smiles-spans", *both, parts=["data.source", "drop one"])
    ours.write_text("data:\n  pack: corpora/mine\n  source: [my.smi]\n")
    fails(capsys, main, "--recipe", ours, parts=["ours.yaml", "data.source", "drop one"])
