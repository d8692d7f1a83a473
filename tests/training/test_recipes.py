"""The recipes say what the paper's tables say; the tables are typed again here, from the paper."""

import itertools
import re
import shlex

import pytest
from commands import dry_run, fails

from exlm_mini import prepare
from exlm_mini.config import DataConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import RECIPES, recipe_names
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.pretrain import main
from exlm_mini.training.cost import longest_row, row_flops

SMALL = {"smiles-spans", "smiles-tiny", "text-tiny", "toy-pairs"}
FULL = sorted(set(recipe_names()) - SMALL)

TABLE_5 = {
    "learning rate": 2e-3, "warm-up": 5000, "updates": 50_000, "batch": 4096, "dropout": 0.1,
    "attention dropout": 0.1, "activation dropout": 0.0, "layers": 12, "heads": 12, "width": 768,
    "feed-forward": 3072, "betas": (0.9, 0.98), "mask ratio": 0.15, "weight decay": 0.01,
    "clip norm": 0.0,
}  # fmt: skip
TABLE_7 = {
    "learning rate": 5e-4, "states": 2, "warm-up": 10_000, "updates": 120_000, "tokens": 64_000,
    "dropout": 0.1, "attention dropout": 0.1, "activation dropout": 0.0, "layers": 9,
    "heads": 12, "width": 768, "feed-forward": 2048, "betas": (0.9, 0.98), "mask ratio": 0.15,
    "weight decay": 0.0, "clip norm": 1.0, "vocabulary": 369,
}  # fmt: skip
TABLE_10 = {
    "learning rate": 5e-4, "states": 4, "warm-up": 10_000, "updates": 125_000, "batch": 2048,
    "dropout": 0.1, "attention dropout": 0.1, "activation dropout": 0.0, "layers": 12,
    "heads": 12, "width": 768, "feed-forward": 3072, "betas": (0.9, 0.98), "mask ratio": 0.15,
    "weight decay": 0.01, "clip norm": 0.0,
}  # fmt: skip
LARGE = {"layers": 24, "heads": 16, "width": 1024, "feed-forward": 4096}
README = {
    "positions": 2048, "states": 4, "mask ratio": 0.15, "row": 128, "betas": (0.9, 0.98),
    "epsilon": 1e-6, "clip norm": 0.0, "learning rate": 2e-3, "batch": 2 * 64 * 32, "micro": 64,
    "warm-up": 1380, "updates": 23_000, "dropout": 0.1, "attention dropout": 0.1,
    "weight decay": 0.01, "seed": 1, "layers": 12, "heads": 12, "width": 768,
    "feed-forward": 3072,
}  # fmt: skip
EXLM = {"objective": "exlm", "states": 4, "transition": "gated", "rope": "2d", "sparse": False}
PAPER = {
    "repeated-mlm": TABLE_5 | {"objective": "repeated-mlm", "positions": 512 * 8},
    "vanilla-mlm": TABLE_5 | {"objective": "mlm", "positions": 512},
    "vanilla-mlm-plus-plus": TABLE_5
    | {"objective": "mlm", "positions": 512, "updates": 2 * 50_000},
    "exlm-ablation": TABLE_5 | EXLM | {"positions": 512 * 4},
    "exlm-without-2d-rope": TABLE_5 | EXLM | {"positions": 512 * 4, "rope": "1d"},
    "exlm-without-transitions": TABLE_5 | EXLM | {"positions": 512 * 4, "transition": "ctc"},
    "exlm-sparse-dag": TABLE_5 | EXLM | {"positions": 512 * 4, "sparse": True},
    "text-base": EXLM | TABLE_10,
    "text-large": EXLM | TABLE_10 | LARGE,
    "smiles-base": EXLM | TABLE_7,
    "official-readme": EXLM | README,
}
CELLS = {0.0225: (1,), 0.15: (1, 2), 0.387: (1, 2, 4), 0.622: (1, 2, 4, 8), 0.789: (1, 2, 4, 8)}
"""Mask ratios of Figures 3 to 5, and the numbers of copies that were trained with each."""


def settings_of(name):
    """What a recipe says, by the words of the tables."""
    config = parse(["--recipe", name]).config
    model, train = config.model, config.train
    return {
        "objective": config.objective,
        "layers": model.shape.num_layers,
        "heads": model.shape.num_heads,
        "width": model.shape.width,
        "feed-forward": model.shape.ffn_width,
        "positions": model.max_positions,
        "states": model.states_per_mask,
        "transition": model.transition,
        "rope": model.rope,
        "sparse": model.sparse,
        "dropout": model.dropout,
        "attention dropout": model.attention_dropout,
        "activation dropout": model.activation_dropout,
        "mask ratio": config.masking.mask_ratio,
        "row": config.data.block_length,
        "vocabulary": config.data.vocab_size,
        "learning rate": train.learning_rate,
        "warm-up": train.warmup_steps,
        "updates": train.steps,
        "batch": train.batch_size if train.batch_tokens is None else None,
        "tokens": train.batch_tokens,
        "micro": train.micro_batch_size,
        "betas": train.adam_betas,
        "epsilon": train.adam_eps,
        "weight decay": train.weight_decay,
        "clip norm": train.clip_norm,
        "seed": config.seed,
    }


def source(name):
    return (RECIPES / f"{name}.yaml").read_text()


# ---- the numbers of the paper ----


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_says_what_its_table_says(name):
    settings, paper = settings_of(name), PAPER[name]
    assert {word: settings[word] for word in paper} == paper
    config = parse(["--recipe", name]).config
    assert (
        config.model.clone_embedding_std == config.train.chain_warmup == 0
    )  # not of the paper
    updates, warmup, peak = (paper[w] for w in ("updates", "warm-up", "learning rate"))
    assert config.train.rate(warmup - 1) == pytest.approx(peak)
    assert config.train.rate(warmup // 2 - 1) == pytest.approx(peak / 2)
    # polynomial_decay of power 1: half of the way down at half of the time.
    middle = warmup + (updates - warmup) // 2
    assert config.train.rate(middle) == pytest.approx(peak / 2, rel=1e-3)
    assert 0 < config.train.rate(updates - 1) < peak / 1000


def test_the_ablations_differ_from_the_full_model_in_one_setting():
    full = settings_of("exlm-ablation")
    for name in ("exlm-without-2d-rope", "exlm-without-transitions", "exlm-sparse-dag"):
        other = settings_of(name)
        assert len([word for word in full if full[word] != other[word]]) == 1, name


def test_the_hours_of_table_12_decide_the_length_of_a_row():
    # 4,096 rows, 50,000 steps, 54.7 GPU hours: TFLOP/s of each A100, whose peak is 312.
    config, needed = parse(["--recipe", "vanilla-mlm"]).config, {}
    for row in (128, 512):
        whole_run = row_flops(config, 50_265, row) * 4096 * 50_000
        needed[row] = whole_run / (54.7 * 3600) / 1e12
    assert needed[128] == pytest.approx(74, abs=0.5)
    assert needed[512] == pytest.approx(320, abs=0.5) and needed[512] > 312
    assert config.data.block_length == 128


# ---- headers ----


def test_the_cells_of_the_paper_fit_into_the_position_range():
    assert sum(map(len, CELLS.values())) == 14
    cells = [
        ("repeated-mlm", f"--masking.mask_ratio {ratio} --masking.num_copies {k}", k)
        for ratio, copies in CELLS.items()
        for k in copies
    ]
    for states, ratio in itertools.product((2, 4, 8), (0.15, 0.387)):  # Table 4
        options = f"--masking.mask_ratio {ratio} --model.states_per_mask {states}"
        cells.append(("exlm-ablation", options, None))
    for name, options, k in cells:
        config = parse(["--recipe", name, *options.split()]).config
        longest = longest_row(config, config.data.block_length)
        assert longest <= config.model.max_positions, (name, options)
        assert k is None or longest == k * config.data.block_length


@pytest.mark.parametrize("name", FULL)
def test_every_command_of_a_header_is_understood(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(line.lstrip("#") for line in source(name).splitlines() if line[0] == "#")
    text = text.replace("\\\n", " ")
    data = parse(["--recipe", name]).config.data
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


# ---- dry runs ----


@pytest.mark.parametrize("name", FULL)
def test_every_recipe_dry_runs_without_data_or_network(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed, said = dry_run(capsys, "--recipe", name)
    assert "is not there yet: counted with data.vocab_size" in said
    assert list(tmp_path.iterdir()) == []
    paper = PAPER[name]
    assert printed["objective"] == paper["objective"]
    assert printed["steps"] == f"{paper['updates']:,}"
    if "tokens" in paper:
        assert printed["batch"] == "64,000 tokens = 1 device x 16,000 tokens x 4 accumulated"
        assert printed["tokens"] == f"at most {64_000 * paper['updates']:,}"
    else:
        row = int(printed["row"].split()[0])
        assert printed["batch"].startswith(f"{paper['batch']:,} rows = 1 device x ")
        assert printed["tokens"] == f"{paper['batch'] * row * paper['updates']:,}"
    assert printed["device hours"].startswith("unknown: ")
    assert "--throughput" in printed["device hours"]


def test_batch_and_hours_follow_from_devices_and_speed(capsys):
    printed, _ = dry_run(capsys, "--recipe", "official-readme", "--devices", 2)
    assert printed["batch"] == "4,096 rows = 2 devices x 64 rows x 32 accumulated"
    options = ["--devices", 2, "--throughput", "100000"]
    printed, _ = dry_run(capsys, "--recipe", "vanilla-mlm", *options)
    hours = 50_000 * 4096 * 128 / 100_000 / 3600
    assert printed["device hours"].startswith(f"{hours:,.1f} at 100,000 tokens/s, ")
    assert f"{hours / 2:,.1f} hours if 2 devices lose nothing" in printed["device hours"]


@pytest.mark.parametrize("option", [["--devices", "2"], ["--throughput", "9"]])
def test_options_of_a_dry_run_are_refused_where_they_would_do_nothing(option, capsys):
    words = ["is for --dry-run alone"]
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
