# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-downstream)=
# # Downstream: molecules, sentences, answers
#
# A pre-trained model is judged by what it can be taught afterwards. The paper
# teaches ExLM to predict properties of molecules, to compare sentences and to
# answer questions. This chapter does the same in small and looks at every step
# between a data set and a number in a table, because much can happen there.
#
# **You will** read molecules as strings and see them drawn, split them so that
# the test is fair, pre-train an MLM and an ExLM, fine-tune both, draw a ROC curve
# and compute its area in three ways. You will score answers as GLUE and SQuAD do,
# choose an answer from the logits of a model, and measure how much a table gains
# when its settings are chosen on the rows it reports.
#
# **You will know after** what each number in the paper's Tables 1 to 4 is, how it
# was put together from several runs, and which differences between two such
# numbers mean something.
#
# **It needs** a good minute on one CPU core, no GPU and no download. **It
# covers** §5.1 and §5.2 of {cite}`zheng2025exlm` and Appendices B.2, D and J to O.

# %% tags=["remove-cell", "nbval-skip"]
# Colab opens this notebook alone: fetch the book around it and install its package.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("exlm_mini") is None:
    url = "https://github.com/exlm-book/exlm-book"
    subprocess.run(["git", "clone", "--depth", "1", url, "exlm-book"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip, "exlm-book[text,chem,train,tasks]"], check=True)
    os.chdir("exlm-book/chapters")
    # This kernel started before the install.
    sys.path.insert(0, os.path.abspath(".."))

# %%
import io
import json
import math
import tempfile
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from rdkit import Chem, DataStructs, rdBase
from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator
from rdkit.Chem.rdMolDescriptors import CalcMolFormula
from scipy.stats import rankdata

from exlm_lab.downstream.catalogue import ReadingConfig
from exlm_lab.downstream.finetuning import FineTuner
from exlm_lab.downstream.grid import TUNING, paper_numbers, summary
from exlm_lab.downstream.heads import loss_sum
from exlm_lab.downstream.inputs import padded
from exlm_lab.downstream.metrics import (
    accuracy,
    f1,
    matthews,
    mean_roc_auc,
    pearson,
    spearman,
)
from exlm_lab.downstream.moleculenet import BENCHMARKS
from exlm_lab.downstream.patterns import PATTERNS, counting_baseline, load
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.scaffolds import index_sha1, molecules, scaffold, split
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.spans import (
    BestSpans,
    best_spans,
    choose_answers,
    encode_question,
    windows,
)
from exlm_lab.downstream.squad import (
    exact_match,
    f1_of_words,
    normalize_answer,
    read_questions,
    score_predictions,
)
from exlm_mini import pretrain
from exlm_mini.config.recipes import load_recipe
from exlm_mini.data.smiles import embedded_molecules
from exlm_mini.data.tokenizer import train_byte_level_bpe, train_smiles
from exlm_mini.plotting import COLORS, draw_tokens, use_book_style
from exlm_mini.plotting.molecules import (
    Pictures,
    atoms_of,
    molecule_svg,
    scaffold_svg,
    tokens_of,
    tokens_svg,
)
from exlm_mini.reading.pretrained import Pretrained, load_pretrained
from exlm_mini.training.live import chapter_scale
from exlm_mini.training.run_directory import read_metrics

use_book_style()
scale = chapter_scale()
str(scale)

# %% [markdown]
# ## A molecule as a string
#
# **Question.** How can a language model read a molecule?
#
# A molecule is a graph: its nodes are atoms, its edges are bonds. SMILES
# {cite}`weininger1988smiles` writes such a graph as a line of text, by walking
# through it from atom to atom. Appendix D of the paper introduces it in a few
# sentences. You need no chemistry for what follows, only these rules. RDKit, the
# library of the field for molecules, is the judge of each.


# %%
def parse(smiles: str) -> Chem.Mol:
    """The molecule RDKit reads."""
    molecule = Chem.MolFromSmiles(smiles)
    assert molecule is not None, smiles
    return molecule


def bonds(smiles: str) -> dict[tuple[int, int], float]:
    """Order of each bond, by the numbers of its two atoms."""
    return {
        (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()): bond.GetBondTypeAsDouble()
        for bond in parse(smiles).GetBonds()
    }


def canonical(smiles: str) -> str:
    """The one spelling RDKit chooses for a molecule."""
    return Chem.MolToSmiles(parse(smiles))


# %% [markdown]
# **Atoms** are written as chemical symbols: `C` carbon, `O` oxygen, `N` nitrogen,
# `Cl` chlorine. Neighbours in the string are bonded. Hydrogen is not written: an
# atom takes as many as it has free bonds, four for carbon, three for nitrogen,
# two for oxygen. So `CCO` is ethanol, the example of Appendix D.

# %%
ethanol = parse("CCO")
assert [atom.GetSymbol() for atom in ethanol.GetAtoms()] == ["C", "C", "O"]
assert bonds("CCO") == {(0, 1): 1, (1, 2): 1}
assert [atom.GetTotalNumHs() for atom in ethanol.GetAtoms()] == [3, 2, 1]
assert CalcMolFormula(ethanol) == "C2H6O"

# %% [markdown]
# **Bonds** are single (`-`, mostly left out), double (`=`) or triple (`#`). A
# **branch** stands in parentheses, and the string goes on from the atom before
# them. A **ring** is cut open at one bond, and its two ends get the same digit;
# from 10 on, `%` and two digits.

# %%
orders = {s: bonds(s)[0, 1] for s in ("CC", "C-C", "C=C", "C#N")}
assert orders == {"CC": 1, "C-C": 1, "C=C": 2, "C#N": 3}
assert bonds("CC(=O)O") == {(0, 1): 1, (1, 2): 2, (1, 3): 1}  # acetic acid
assert set(bonds("C1CCCCC1")) == {(n, n + 1) for n in range(5)} | {(5, 0)}
assert canonical("C%12CCCCC%12") == canonical("C1CCCCC1")

# %% [markdown]
# **Aromatic** rings, such as benzene's, share their electrons evenly. They can be
# spelled with small letters or with double bonds in turn; both are one molecule
# with six equal bonds. **Brackets** hold what the plain symbol cannot say: a
# charge, an isotope, hydrogens by number. A **dot** separates parts without a
# bond.

# %%
assert canonical("C1=CC=CC=C1") == canonical("c1ccccc1") == "c1ccccc1"
assert set(bonds("C1=CC=CC=C1").values()) == {1.5}
ammonium, salt = parse("[NH4+]").GetAtomWithIdx(0), parse("[Na+].[Cl-]")
assert (ammonium.GetFormalCharge(), ammonium.GetTotalNumHs()) == (1, 4)
assert parse("[13CH4]").GetAtomWithIdx(0).GetIsotope() == 13
assert len(Chem.GetMolFrags(salt)) == 2 and not bonds("[Na+].[Cl-]")

# %% [markdown]
# **Stereo marks** tell molecules apart that have the same bonds and differ in
# space: `@` and `@@` at an atom with four different neighbours (mirror images,
# like two hands), `/` and `\` beside a double bond (same side or opposite sides).


# %%
def flat(smiles: str) -> str:
    """The canonical spelling without stereo marks."""
    return Chem.MolToSmiles(parse(smiles), isomericSmiles=False)


for one, other in (
    ("C[C@H](N)C(=O)O", "C[C@@H](N)C(=O)O"),  # the two forms of alanine
    ("F/C=C/F", "F/C=C\\F"),
):
    assert canonical(one) != canonical(other) and flat(one) == flat(other)

# %% [markdown]
# **Figure.** Six molecules and their strings. A corner without a letter is a
# carbon, as chemists draw it; a dashed wedge points away from you. Where was each
# ring cut?

# %%
EXAMPLES = {
    "ethanol": "CCO",
    "acetic acid": "CC(=O)O",
    "cyclohexane": "C1CCCCC1",
    "benzene": "c1ccccc1",
    "alanine": "C[C@H](N)C(=O)O",
    "aspirin": "CC(=O)Oc1ccccc1C(=O)O",
}
Pictures({f"{n}: {s}": molecule_svg(s, 200, 150) for n, s in EXAMPLES.items()})

# %% [markdown]
# **Check.** The walk may start anywhere and turn anywhere, so a molecule has many
# spellings. The canonical one is a convention of a program. And not every string
# is a molecule: a ring may be left open, a carbon may have five neighbours.

# %%
assert {canonical(s) for s in ("CCO", "OCC", "C(O)C", "[CH3][CH2][OH]")} == {"CCO"}
aspirin = EXAMPLES["aspirin"]
spellings = set(Chem.MolToRandomSmilesVect(parse(aspirin), 200, randomSeed=1))
assert {canonical(s) for s in spellings} == {canonical(aspirin)}
assert len(spellings) > 50
with rdBase.BlockLogs():  # RDKit explains each refusal
    for wrong in ("C1CC", "CC(", "C(C)(C)(C)(C)C", "Xx"):
        assert Chem.MolFromSmiles(wrong) is None
sorted(spellings)[:3]

# %% [markdown]
# **Takeaway.** SMILES is text with a strict grammar: parentheses must close, and
# digits come in pairs. To restore a hidden symbol, a model has to keep account of
# both.
#
# ## The tokens of a molecule
#
# **Question.** What does the model see of such a string?
#
# One token for each chemical symbol, cut by the regular expression that §5.1 takes
# from {cite}`schwaller2018found`. `Cl` is one token, and so is everything between
# two brackets.

# %%
tokens = tokens_of(aspirin)
numbers = atoms_of(tokens)
assert "".join(tokens) == aspirin
assert [n for n in numbers if n is not None] == list(
    range(parse(aspirin).GetNumAtoms())
)
assert tokens_of("C[C@H](Cl)Br") == ["C", "[C@H]", "(", "Cl", ")", "Br"]
ends = [i - 1 for i, token in enumerate(tokens) if token == "1"]
first, last = (numbers[i] for i in ends)
assert last - first == 5 and {(first, last), (last, first)} & set(bonds(aspirin))
" ".join(tokens)

# %% [markdown]
# **Figure.** Aspirin's tokens, and where its atoms are in the drawing. The two
# carbons marked in blue are neighbours in the ring and stand five atoms apart in
# the string: a digit joins them.

# %% mystnb={"figure": {"caption": "The tokens of aspirin. Yellow: oxygen; blue: the two ends of the ring; grey: no atoms.", "name": "fig-downstream-tokens"}} tags=["hide-input"]
kinds = ["mask" if token == "O" else "token" for token in tokens]
kinds = [
    "boundary" if n is None else k for k, n in zip(kinds, numbers, strict=True)
]
for end in ends:
    kinds[end] = "mlm"
fig, ax = plt.subplots(figsize=(8, 0.7))
draw_tokens(ax, tokens, kinds)

# %%
colors = [COLORS[kind] if kind in ("mask", "mlm") else None for kind in kinds]
Pictures({"the same atoms": tokens_svg(aspirin, colors, 300, 200)})

# %% [markdown]
# **Check.** How often does a bond join what stands far apart in the string? We
# count over 500 of the molecules that come with RDKit.

# %%
smiles = list(embedded_molecules())
apart = []
with rdBase.BlockLogs():
    parsed = [(s, Chem.MolFromSmiles(s)) for s in smiles[:500]]
for text, molecule in parsed:
    of_atom = [i for i, n in enumerate(atoms_of(tokens_of(text))) if n is not None]
    for bond in molecule.GetBonds():
        ends = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        apart.append(abs(of_atom[ends[0]] - of_atom[ends[1]]))
far = np.mean(np.array(apart) > 5)
assert 0.05 < far < 0.3
f"{len(apart):,} bonds, {far:.0%} of them between tokens more than 5 apart"

# %% [markdown]
# The vocabulary is the list of symbols that occurred in the pre-training data, and
# six special tokens; the paper's has 369 (Appendix J, Table 7). What it lacks
# becomes [UNK]. The embedded molecules have no stereo marks, so a model of theirs
# cannot read one. Nor can the vocabulary that was released with Uni-Mol, whose
# molecules the paper trains on; MoleculeNet has many. `finetune` looks at
# the vocabulary and removes the marks where it has none (`--data.stereo`).

# %%
tokenizer = train_smiles(smiles)
assert tokenizer.vocab_size == 88 and "[C@@H]" not in " ".join(smiles)
alanine = "C[C@@H](N)C(=O)O"
assert tokenizer.unknown_pieces(alanine) == ["[C@@H]"]
assert ReadingConfig().cleaning(tokenizer).strip_stereo
assert tokenizer.unknown_pieces(flat(alanine)) == []
# These molecules spell aromatic rings with double bonds.
assert tokenizer.unknown_pieces("c1ccccc1") == ["c"] * 6

# %% [markdown]
# **Takeaway.** A token is an atom, a bond or a piece of grammar. Vocabulary and
# spelling belong together: the same molecule in another convention can be
# unreadable.
#
# ## What is asked
#
# **Question.** What does a molecular task look like?
#
# The paper takes seven sets of MoleculeNet {cite}`wu2018moleculenet`: does a
# molecule cross the blood-brain barrier (BBBP), does it bind to a certain enzyme
# (BACE), is it toxic in one of twelve tests (Tox21)? Their answers were measured in
# laboratories. The package brings a task that needs no download: three questions
# about RDKit's own molecules, answered by RDKit. They ask what is linked to what.

# %%
SHOWN = {
    "para": ("CC1=CC=C(Cl)C=C1", "two groups face each other on a ring"),
    "benzyl": ("OCC1=CC=CC=C1", "a saturated carbon beside an aromatic ring"),
    "fused rings": ("C1=CC2=CC=CC=C2C=C1", "an atom in two rings"),
}
drawings = {}
for name, (text, meaning) in SHOWN.items():
    match = parse(text).GetSubstructMatches(Chem.MolFromSmarts(PATTERNS[name]))
    assert match, name
    found = {n for atoms in match for n in atoms}
    shown = [
        COLORS["mask"] if n in found else None for n in atoms_of(tokens_of(text))
    ]
    drawings[f"{name}: {meaning}"] = tokens_svg(text, shown, 200, 150)
Pictures(drawings)

# %%
task, splits = load()
labels_RC = np.concatenate([part.labels for part in splits[:3]])
assert task.classes == tuple(SHOWN) and task.metric == "roc_auc"
assert labels_RC.shape == (4991, 3) and not np.isnan(labels_RC).any()
yes = dict(zip(task.classes, labels_RC.mean(axis=0), strict=True))
", ".join(f"{name}: {share:.0%} yes" for name, share in yes.items())

# %% [markdown]
# **Check.** How far does one get without reading, by counting symbols? A logistic
# regression on the counts says so. 0.5 would be a coin and 1 is perfect; what the
# number is, we shall see below. A model that is not above the counts has not
# understood the string.

# %%
counting_C = counting_baseline(splits)
assert (counting_C > 0.65).all() and (counting_C < 0.85).all()
[round(float(value), 2) for value in counting_C]

# %% [markdown]
# **Takeaway.** Know what a simple method reaches before you praise a large one.
#
# ## A fair split
#
# **Question.** Which molecules should test the model?
#
# Chemists make series: dozens of molecules that differ in a side chain. If they
# are dealt out at random, most test molecules have close relatives in the training
# set. A *scaffold split* keeps relatives together. The scaffold of a molecule
# {cite}`bemis1996properties` is what remains when all side chains are cut off: its
# rings and the links between them. Here it is behind a colour.

# %%
DRAWN = {
    "toluene": "CC1=CC=CC=C1",
    "aspirin": "CC(=O)OC1=CC=CC=C1C(O)=O",
    "diphenylmethanol": "OC(C1=CC=CC=C1)C2=CC=CC=C2",
}
keys = {name: scaffold(parse(s), is_chiral=True) for name, s in DRAWN.items()}
assert keys["toluene"] == keys["aspirin"] == "c1ccccc1"
assert keys["diphenylmethanol"] == "c1ccc(Cc2ccccc2)cc1"
assert scaffold(parse("CCO"), is_chiral=True) == ""  # no ring: the empty one
Pictures({name: scaffold_svg(s, 200, 150) for name, s in DRAWN.items()})

# %% [markdown]
# The rule, in words: group the molecules by scaffold; take the groups from the
# largest to the smallest, of equal ones the later first; put a group into the
# training set if it still fits into eight tenths of all molecules, else into the
# validation set if both together stay within nine tenths, else into the test set.


# %%
def scaffold_split(keys: list[str | None]) -> tuple[list[int], ...]:
    """Rows of training, validation and test; None: RDKit reads no molecule."""
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        if key is not None:
            groups.setdefault(key, []).append(row)
    num_rows = sum(map(len, groups.values()))
    train, validation, test = [], [], []
    by_size = sorted(groups.values(), key=lambda g: (len(g), g[0]), reverse=True)
    for group in by_size:
        if 10 * (len(train) + len(group)) <= 8 * num_rows:
            train += group
        elif 10 * (len(train) + len(validation) + len(group)) <= 9 * num_rows:
            validation += group
        else:
            test += group
    return train, validation, test


mols = list(molecules(smiles))
keys = [m and scaffold(m, is_chiral=True) for m in mols]
by_hand = scaffold_split(keys)
[len(part) for part in by_hand]

# %% [markdown]
# **Check.** The library's split is the same, row by row; it leaves out 8 of 4,999
# strings that RDKit rejects. A hash of the row numbers names a split, so that two
# results can be told to be of one split. Tested molecules have scaffolds nobody
# has trained on; in a random split four of five have known ones.

# %%
ours = split(smiles, "unimol")
assert ours.parts == by_hand and len(ours.rejected) == 8
assert [len(part) for part in ours.parts] == splits.notes["sizes"]
assert splits.notes["sizes"] == [3992, 499, 500]
assert index_sha1(by_hand[2]) == splits.notes["split_sha1"]["test"]
at_random = split(smiles, "random", seed=0)
known = {}
for name, (train, _, test) in (("scaffold", ours[:3]), ("random", at_random[:3])):
    trained = {keys[row] for row in train}
    known[name] = float(np.mean([keys[row] in trained for row in test]))
assert known == {"scaffold": 0.0, "random": 0.82}
print("test:", index_sha1(by_hand[2])[:12])
known

# %% [markdown]
# **Figure.** How similar is a test molecule to its nearest relative in training?
# Similarity is the share of small substructures that two molecules have in common
# (Tanimoto similarity of Morgan fingerprints). The random split tests on much
# closer relatives, and some of its test molecules have a twin in training.

# %%
generator = GetMorganGenerator(radius=2)
prints = [m and generator.GetFingerprint(m) for m in mols]
nearest = {}
for name, parts in (("scaffold", ours), ("random", at_random)):
    trained = [prints[row] for row in parts.train]
    nearest[name] = [
        max(DataStructs.BulkTanimotoSimilarity(prints[row], trained))
        for row in parts.test
    ]
close = {name: np.mean(np.array(values) > 0.6) for name, values in nearest.items()}
assert close["random"] > 2 * close["scaffold"]
twins = {name: sum(s == 1 for s in values) for name, values in nearest.items()}
assert twins["random"] > 20 and twins["scaffold"] < 5
{name: f"{share:.0%} above 0.6" for name, share in close.items()}

# %% mystnb={"figure": {"caption": "Similarity of each test molecule to its nearest training molecule.", "name": "fig-downstream-split"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 2.8))
looks = {"random": COLORS["mlm"], "scaffold": COLORS["exlm"]}
for name, color in looks.items():
    ax.hist(
        nearest[name],
        bins=np.linspace(0, 1, 26),
        histtype="step",
        lw=2,
        color=color,
        label=f"{name} split",
    )
_ = ax.set(
    xlabel="similarity to the nearest training molecule", ylabel="test molecules"
)
_ = ax.legend(loc="upper left")

# %% [markdown]
# The paper follows Uni-Mol's split (§5.1). Uni-Mol's author points to GEM's rule,
# in which stereo marks are a part of the scaffold; DeepChem's leaves them out. Our
# molecules have none, so here the two agree. On BBBP they give the same sizes and
# different molecules, which is why the hash matters.
#
# **Check.** Table 9 gives the sizes, Table 1 the numbers of molecules. They agree
# for four sets of seven. Where they do not, the paper does not say why; the
# difference is printed below.

# %%
assert split(smiles, "deepchem").parts == ours.parts
TABLE_1 = {"bace": 1531, "bbbp": 2039, "tox21": 7831, "sider": 1427}
TABLE_1 |= {"muv": 93087, "clintox": 1478, "toxcast": 8575}
surplus = {n: sum(BENCHMARKS[n].sizes) - size for n, size in TABLE_1.items()}
off = {name: number for name, number in surplus.items() if number}
for name, (train, validation, test) in (
    (name, BENCHMARKS[name].sizes) for name in TABLE_1
):
    total = train + validation + test
    assert abs(train - 0.8 * total) < 3 and abs(test - validation) <= 1, name
off

# %% [markdown]
# **Takeaway.** A split is a part of the result. The same model scores higher on a
# random split, without being better.
#
# %% [markdown]
# ## Pre-training and fine-tuning, live
#
# **Question.** How does a pre-trained model become one that answers?
#
# We pre-train an MLM and an ExLM with the command of the other chapters, on the
# embedded molecules, with the same rows, masks and steps. A third model gets a
# single step: it stands for no pre-training at all.

# %%
folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
STEPS = scale.pick(300, 2000)


def pretrain_live(name: str, objective: str, steps: int) -> Pretrained:
    """A run of ``python -m exlm_mini.pretrain --recipe smiles-tiny``."""
    options = {
        "--objective": objective,
        "--train.steps": steps,
        "--train.warmup_steps": steps // 10,
        "--train.save_every": steps,
        "--train.validate_every": steps,
        "--train.device": scale.device.type,
        "--output": work / name,
    }
    words = [str(word) for option in options.items() for word in option]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert pretrain.main(["--recipe", "smiles-tiny", *words]) == 0
    return load_pretrained(work / name, print)


starts = {
    "no pre-training": pretrain_live("scratch", "mlm", 1),
    "MLM": pretrain_live("mlm", "mlm", STEPS),
    "ExLM": pretrain_live("exlm", "exlm", STEPS),
}
f"{STEPS} steps each"

# %% [markdown]
# **Check.** The two runs differ in the objective and in nothing else, and both
# have learned. Nothing is masked downstream, so ExLM expands no ordinary token:
# with the boundaries of the released code its encoder reads $N + 2(k-1)$ positions,
# and with those of Appendix P just the $N$ tokens.

# %%
settings = [asdict(starts[name].config) for name in ("MLM", "ExLM")]
assert {key for key in settings[0] if settings[0][key] != settings[1][key]} == {
    "objective"
}
bits = {
    name: read_metrics(work / name / "metrics.jsonl")[-1][
        "validation_bits_per_mask"
    ]
    for name in ("scratch", "mlm", "exlm")
}
assert max(bits["mlm"], bits["exlm"]) < bits["scratch"] - 1, bits

exlm = starts["ExLM"].model()
row = starts["ExLM"].tokenizer.encode(DRAWN["aspirin"])
special = exlm.special_ids
token_ids_BN = torch.tensor([[special.bos, *row, special.eos]])
nothing_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
hidden_BTD, _ = exlm.encode(token_ids_BN, nothing_BN, token_ids_BN)
N, k = token_ids_BN.shape[1], exlm.config.states_per_mask
assert hidden_BTD.shape[1] == N + 2 * (k - 1)
f"{N} tokens, {hidden_BTD.shape[1]} positions"

# %% [markdown]
# The vocabulary head and the transitions are thrown away. A new, small *head* reads
# the hidden state of the first token, [BOS] or its first clone:
#
# $$
# \mathbf{s} = W_2 \tanh(W_1 \mathbf{h}_1 + \mathbf{b}_1) + \mathbf{b}_2
# $$ (eq-downstream-head)
#
# with dropout before each of the two matrices ("pooler dropout" in Table 8).
# $\mathbf{s}$ has one number, a *logit*, for each question. Encoder and head are
# then trained together. We use the recipe `finetune/tiny` with fewer passes, twice
# for each start: the seed decides the weights of the head and the order of the
# rows.

# %%
space = load_recipe("finetune/tiny", TUNING).spaces[task.name]
(setting,) = space.settings(TuneConfig())
setting = replace(setting, epochs=scale.pick(2, 10))
problems = {name: make_problem(task, splits, p) for name, p in starts.items()}
SEEDS = (1, 2)
tuned = {}
for name, problem in problems.items():
    for seed in SEEDS:
        directory = work / "tuned" / f"{name}-{seed}"
        device = scale.device.type
        tuner = FineTuner(starts[name], problem, setting, seed, directory, device)
        assert tuner.run().is_complete
        tuned[name, seed] = tuner

# %% [markdown]
# **Check.** The head by hand, on the first test molecule.

# %%
model = tuned["ExLM", 1].model.cpu().eval()
part = problems["ExLM"].parts["test"]
test_BN = padded(part.rows[:1], special.pad)
with torch.no_grad():
    h_BD = model.hidden(test_BN)[:, 0]
    dense, output = model.head.dense, model.head.output
    s_BC = torch.tanh(h_BD @ dense.weight.T + dense.bias) @ output.weight.T
    s_BC = s_BC + output.bias
torch.testing.assert_close(s_BC, model(test_BN))
stored = torch.from_numpy(tuned["ExLM", 1].scores["test"][0])
# On a GPU fine-tuning computes in bfloat16.
precision = scale.pick(1e-3, 5e-2)
torch.testing.assert_close(s_BC[0], stored, rtol=precision, atol=precision)

# %% [markdown]
# **Takeaway.** Pre-training leaves an encoder; a task adds a head of two matrices.
# What is compared downstream are encoders.
#
# ## The ROC curve and its area
#
# **Question.** How is a model scored that gives a number where the answer is yes
# or no?
#
# Call a molecule "yes" if its logit lies above a threshold. As the threshold falls,
# more of the true ones are found (*true positive rate*) and more of the false ones
# are accused (*false positive rate*). The ROC curve shows one against the other,
# and ROC-AUC is the area below it. A small case first: five molecules.


# %%
def roc_curve(scores_R: np.ndarray, is_yes_R: np.ndarray) -> tuple[np.ndarray, ...]:
    """False and true positive rates, from (0, 0) to (1, 1)."""
    order = np.argsort(-scores_R, kind="stable")
    # Equal scores pass the threshold together.
    is_last = np.append(np.diff(scores_R[order]) != 0, True)
    found = np.cumsum(is_yes_R[order])[is_last]
    accused = np.cumsum(1 - is_yes_R[order])[is_last]
    return (
        np.append(0, accused / accused[-1]),
        np.append(0, found / found[-1]),
    )


def pairwise_area(scores_R: np.ndarray, is_yes_R: np.ndarray) -> float:
    """How often a yes has a larger score than a no; equal scores count half."""
    yes, no = scores_R[is_yes_R == 1], scores_R[is_yes_R == 0]
    difference = yes[:, None] - no[None]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


five = np.array([0.9, 0.8, 0.6, 0.4, 0.2]), np.array([1.0, 0, 1, 0, 0])
x, y = roc_curve(*five)
assert x.tolist() == [0, 0, 1 / 3, 1 / 3, 2 / 3, 1]
assert y.tolist() == [0, 0.5, 0.5, 1, 1, 1]
# Of 2 x 3 pairs of a yes and a no, one is in the wrong order.
assert math.isclose(np.trapezoid(y, x), 5 / 6)
assert math.isclose(pairwise_area(*five), 5 / 6)

# %% [markdown]
# **Check.** On the model's test molecules the area under the curve, the share of
# pairs in the right order, and scikit-learn's number are one.

# %%
labels_RC = part.labels
scores = {key: np.stack(t.scores["test"]) for key, t in tuned.items()}
for scores_RC in scores.values():
    for c in range(3):
        x, y = roc_curve(scores_RC[:, c], labels_RC[:, c])
        area = np.trapezoid(y, x)
        assert math.isclose(area, pairwise_area(scores_RC[:, c], labels_RC[:, c]))
        theirs = mean_roc_auc(scores_RC[:, [c]], labels_RC[:, [c]])[0]
        assert math.isclose(area, theirs)

# %% [markdown]
# **Figure.** The three questions, answered by the fine-tuned ExLM. A coin would
# follow the dashed diagonal. Compare the areas with those of counting symbols:
# where one is not larger, two passes over the molecules were too few.

# %% mystnb={"figure": {"caption": "ROC curves of one fine-tuned ExLM on the test molecules.", "name": "fig-downstream-roc"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(4.6, 3.8))
for c, name in enumerate(task.classes):
    x, y = roc_curve(scores["ExLM", 1][:, c], labels_RC[:, c])
    ax.plot(x, y, label=f"{name}: {np.trapezoid(y, x):.2f}")
ax.plot([0, 1], [0, 1], "--", color="0.5", lw=1)
_ = ax.set(xlabel="false positive rate", ylabel="true positive rate")
_ = ax.legend(title="area", loc="lower right")

# %% [markdown]
# **Takeaway.** ROC-AUC is the chance that a random yes is ranked above a random
# no. It needs no threshold, and it does not mind that most molecules are "no".
#
# ## Answers that are missing
#
# **Question.** In Tox21, ToxCast and MUV not every molecule was measured in every
# test. What becomes of the gaps?
#
# They count nowhere. In training the loss is a mean over the answers that are
# there. In scoring each question has its own rows, and the areas are averaged. A
# question with a single kind of answer has no ROC curve, and is left out of the
# mean. A worked table, with four questions:

# %%
nan = math.nan
answers_RC = np.array(
    [
        [1, 1, 0, nan],
        [1, nan, 0, nan],
        [0, 1, 0, nan],
        [1, 0, nan, nan],
        [0, 0, 0, nan],
    ]
)
logits_RC = np.array([[2.0, 1, 3, 0], [0, 9, 0, 0], [1, 0, 1, 0], [3, -1, 0, 1]])
logits_RC = np.concatenate([logits_RC, [[-1.0, 0.5, 2, 0]]])

area_A = 5 / 6  # five of 3 x 2 pairs; (second, third) is the wrong one
area_B = 3 / 4  # rows 1, 3, 4, 5: of 2 x 2 pairs, (third, fifth) is wrong
mean, num_tasks = mean_roc_auc(logits_RC, answers_RC)
assert num_tasks == 2 and math.isclose(mean, (area_A + area_B) / 2)

# %% [markdown]
# **Check.** Scoring the two lost questions 0.5, or 0, would give another mean. And
# the loss looks at the 13 answers that are there, whatever stands in the gaps.

# %%
is_there_RC = ~np.isnan(answers_RC)
probability_RC = 1 / (1 + np.exp(-logits_RC))
right_RC = np.where(answers_RC == 1, probability_RC, 1 - probability_RC)
by_hand = -np.log(right_RC[is_there_RC]).sum()
logits, answers = torch.tensor(logits_RC), torch.tensor(answers_RC)
assert math.isclose(loss_sum("labels", logits, answers).item(), by_hand)
assert is_there_RC.sum() == 13
other = torch.where(torch.tensor(is_there_RC), logits, torch.randn(5, 4) * 9)
assert math.isclose(loss_sum("labels", other, answers).item(), by_hand)

as_half, as_zero = (area_A + area_B + 1) / 4, (area_A + area_B) / 4
f"left out {mean:.3f}, as a half {as_half:.3f}, as zero {as_zero:.3f}"

# %% [markdown]
# **Takeaway.** A mean over tasks needs its number of tasks beside it; `finetune`
# writes both.
#
# ## What a tiny run can show
#
# **Question.** Which of the three starts is best?
#
# Two things move a score besides the model: the seed, and the molecules that
# happen to be in the test. For the second we draw the 500 test molecules again and
# again, with replacement (the *bootstrap*), always the same for all models, and
# look at the difference between two of them.

# %%
is_yes_RC = labels_RC == 1


def mean_area(scores_RC: np.ndarray, is_yes_RC: np.ndarray) -> float:
    """Mean ROC-AUC, by the ranks of the yes."""
    rank_RC = rankdata(scores_RC, axis=0)
    num_yes_C, R = is_yes_RC.sum(axis=0), len(is_yes_RC)
    wins_C = (rank_RC * is_yes_RC).sum(axis=0) - num_yes_C * (num_yes_C + 1) / 2
    return float((wins_C / (num_yes_C * (R - num_yes_C))).mean())


reached = {key: mean_area(s, is_yes_RC) for key, s in scores.items()}
for key, tuner in tuned.items():
    assert math.isclose(reached[key], tuner.metrics["test"]["roc_auc"])

rng = np.random.default_rng(0)
draws = [rng.integers(0, 500, 500) for _ in range(300)]
redrawn = {
    key: np.array([mean_area(s[d], is_yes_RC[d]) for d in draws])
    for key, s in scores.items()
}
of_start = {n: np.mean([redrawn[n, s] for s in SEEDS], axis=0) for n in starts}
low, high = np.quantile(of_start["ExLM"] - of_start["MLM"], [0.025, 0.975])

# %% [markdown]
# **Figure.** Every dot is a fine-tuned model, every bar the middle 95% of its
# redrawn scores. The dashed line is what counting symbols reaches.

# %% mystnb={"figure": {"caption": "Mean ROC-AUC on the embedded test molecules, two seeds for each start, live.", "name": "fig-downstream-live"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 2.8))
looks = {"no pre-training": "0.45", "MLM": COLORS["mlm"], "ExLM": COLORS["exlm"]}
for place, (name, color) in enumerate(looks.items()):
    for seed in SEEDS:
        x = place + 0.3 * seed - 0.45
        bar = np.quantile(redrawn[name, seed], [0.025, 0.975])
        ax.plot([x, x], bar, color=color, lw=1.5)
        ax.plot(x, reached[name, seed], "o", color=color)
ax.axhline(counting_C.mean(), color="0.3", ls="--", lw=1)
ax.grid(axis="x", visible=False)
_ = ax.set(ylabel="mean ROC-AUC", xticks=range(3), xticklabels=list(looks))

# %% [markdown]
# **Check.** All models have learned to answer, and the one without pre-training is
# not behind. The bars tell how much the choice of the test molecules could move a
# score. They know nothing of another pre-training run: each start is a single one.

# %%
means = {n: np.mean([reached[n, s] for s in SEEDS]) for n in starts}
assert min(means.values()) > 0.65, means
slack = scale.pick(0.04, 0.2)
assert means["no pre-training"] > max(means.values()) - slack, means
assert 0.015 < high - low < 0.15, (low, high)
# Pre-training has read the test molecules too, though not their answers.
assert {text for (text,) in splits.test.texts} <= set(smiles)

# %% [markdown]
# **Takeaway.** This run shows that the machinery works, and nothing about MLM and
# ExLM. It does not even show a use of pre-training, and no wonder: before the task
# the encoder has seen the molecules of the task, for a few hundred steps, and what
# is asked is how symbols belong together, which the task itself teaches. A
# difference worth a sentence needs larger models, more data, and several runs from
# the start; {ref}`downstream-recorded` has longer runs.
#
# ## GLUE: agreement between two columns
#
# **Question.** GLUE {cite}`wang2019glue` has eight tasks about sentences and pairs
# of sentences (Appendix M). Five are scored by accuracy or by F1. Why are CoLA and
# STS-B not?
#
# CoLA asks whether a sentence is good English, and about 70% of its sentences are.
# "Always yes" is then 70% accurate. **Matthews' correlation** is 0 for such an
# answer and 1 for a perfect one:
#
# $$
# \frac{TP \cdot TN - FP \cdot FN}
# {\sqrt{(TP+FP)(TP+FN)(TN+FP)(TN+FN)}}
# $$ (eq-matthews)
#
# where $TP$ counts the yes that were found, $TN$ the no that were found, $FP$ and
# $FN$ the false yes and the false no.

# %%
truth = np.array([1] * 70 + [0] * 30)
always = np.ones(100, dtype=int)
careful = np.array([1] * 55 + [0] * 15 + [1] * 10 + [0] * 20)
assert accuracy(always, truth) == 0.70 and matthews(always, truth) == 0
TP, FN, FP, TN = 55, 15, 10, 20
below = math.sqrt((TP + FP) * (TP + FN) * (TN + FP) * (TN + FN))
by_hand = (TP * TN - FP * FN) / below
assert math.isclose(matthews(careful, truth), by_hand)
# It is the plain correlation of two columns of zeros and ones.
assert math.isclose(by_hand, np.corrcoef(careful, truth)[0, 1])
f"accuracy {accuracy(careful, truth):.2f}, Matthews {by_hand:.2f}"

# %% [markdown]
# The **F1** of the yes, shown for QQP and MRPC beside accuracy, is the harmonic
# mean of precision $TP/(TP+FP)$ and recall $TP/(TP+FN)$. It does not see $TN$, so
# it flatters "always yes".

# %%
precision, recall = TP / (TP + FP), TP / (TP + FN)
harmonic = 2 * precision * recall / (precision + recall)
assert math.isclose(f1(careful, truth), harmonic)
assert f1(always, truth) > f1(careful, truth)
[round(f1(answer, truth), 3) for answer in (always, careful)]

# %% [markdown]
# STS-B asks for a number: how similar are two sentences, on a scale to 5?
# **Spearman's correlation**, the paper's choice, compares only the order. It is
# the plain (Pearson's) correlation of the ranks. Five pairs, of which two
# neighbours are swapped:

# %%
wanted = np.array([0.0, 1.0, 2.5, 4.0, 5.0])
given = np.array([0.1, 0.2, 0.4, 4.9, 3.0])
ranks = rankdata(given)
assert ranks.tolist() == [1, 2, 3, 5, 4]
# Without ties: 1 - 6 (sum of squared rank differences) / (R (R^2 - 1)).
by_hand = 1 - 6 * ((ranks - rankdata(wanted)) ** 2).sum() / (5 * 24)
assert math.isclose(spearman(given, wanted), by_hand) and by_hand == 0.9
# A scale that keeps the order changes Pearson's number, not Spearman's.
assert math.isclose(spearman(np.exp(given), wanted), 0.9)
assert pearson(np.exp(given), wanted) < pearson(given, wanted) - 0.1
f"Spearman {by_hand:.1f}, Pearson {pearson(given, wanted):.2f}"

# %% [markdown]
# **Takeaway.** A percentage of Table 3 can be an accuracy, a correlation, or an F1.
# Appendix M names the first for MNLI, QNLI, RTE and SST-2, Matthews for CoLA and
# Spearman for STS-B; it names none for QQP and MRPC. The mean over the eight mixes
# them.
#
# ## SQuAD: choosing an answer
#
# **Question.** A question about a paragraph has a piece of that paragraph as its
# answer, or none (SQuAD 2.0, {cite}`rajpurkar2018know`). How does a model point at
# a piece?
#
# It gives each token two logits: that the answer begins there, and that it ends
# there. The score of a piece is the sum of its two. We take a paragraph with three
# questions and invent the logits.

# %%
PARAGRAPH = (
    "The Danube rises in the Black Forest and flows into the Black Sea. "
    "It passes four capital cities, among them Vienna and Budapest."
)
QUESTIONS = {
    "rise": ("Where does the Danube rise?", ["the Black Forest", "Black Forest"]),
    "cities": ("How many capital cities does it pass?", ["four"]),
    "deep": ("How deep is the Danube?", []),
}
rows = [
    {
        "id": id,
        "question": question,
        "answers": [
            {"text": text, "answer_start": PARAGRAPH.index(text)} for text in golds
        ],
    }
    for id, (question, golds) in QUESTIONS.items()
]
paragraph = {"context": PARAGRAPH, "qas": rows}
dataset = {"version": "v2.0", "data": [{"title": "", "paragraphs": [paragraph]}]}
questions, num_left_out = read_questions(dataset)
assert num_left_out == 0 and [q.id for q in questions] == list(QUESTIONS)

# %%
words = train_byte_level_bpe([PARAGRAPH] * 2, vocab_size=400)
encoded = [encode_question(q, words, 128, 64) for q in questions]
assert all(len(entry.windows) == 1 for entry in encoded)
for question, entry in zip(questions, encoded, strict=True):
    (window,), ((first, last),) = entry.windows, entry.targets
    if question.span is None:
        assert (first, last) == (0, 0)  # "no answer" is the span of [BOS]
    else:
        shift = window.first_token - window.context_column
        begin, end = entry.offsets[first + shift][0], entry.offsets[last + shift][1]
        assert PARAGRAPH[begin:end].strip() == question.answers[0]
[entry.targets[0] for entry in encoded]


# %% [markdown]
# These pairs are what the model is trained on: the first and the last column of the
# answer, and (0, 0), the column of [BOS], where there is none. Now the logits, all
# 0 but for a few columns. For the first question the likeliest *begin* is "Black"
# of "Black Sea" and the likeliest *end* is "Forest", which stands before it.


# %%
def column(entry, text: str, of: int) -> int:
    """Column of the token that holds the first or last letter of a piece."""
    place = PARAGRAPH.index(text) + (len(text) - 1 if of else 0)
    (window,) = entry.windows
    inside = [a <= place < b for a, b in entry.offsets]
    return window.context_column + inside.index(True)


width = max(len(entry.windows[0].token_ids_N) for entry in encoded)
start_BN, end_BN = torch.zeros(3, width), torch.zeros(3, width)
START = [{"Black Forest": 3.0, "Black Sea": 3.5}, {"four": 2.0}, {"Vienna": 1.5}]
END = [{"Black Forest": 4.0, "Black Sea": 2.0}, {"four": 2.5}, {"Budapest": 1.0}]
for b, entry in enumerate(encoded):
    for text, logit in START[b].items():
        start_BN[b, column(entry, text, 0)] = logit
    for text, logit in END[b].items():
        end_BN[b, column(entry, text, 1)] = logit
start_BN[:, 0] = end_BN[:, 0] = torch.tensor([0.5, 1.5, 1.0])  # "no answer"

batch = [entry.windows[0] for entry in encoded]
best = best_spans(start_BN, end_BN, batch)
chosen = choose_answers(questions, encoded, best)
assert start_BN[0].argmax() > end_BN[0].argmax()  # no piece at all
assert chosen.texts["rise"] == "Black Forest"
assert best.score_B.tolist() == [7.0, 4.5, 2.5]
assert best.null_score_B.tolist() == [1.0, 3.0, 2.0]
chosen.texts

# %% [markdown]
# **Check.** All pieces of at most 30 tokens by brute force.

# %%
for b, window in enumerate(batch):
    begin = window.context_column
    end = begin + len(window.is_clearest)
    tried = {
        (start_BN[b, i] + end_BN[b, j]).item()
        for i in range(begin, end)
        for j in range(i, min(i + 30, end))
    }
    assert max(tried) == best.score_B[b]

# %% [markdown]
# The third question has no answer, but a best piece it has always. So the piece
# competes with the *null score*, the sum of the two logits of [BOS]. The difference
# becomes a number between 0 and 1, and a question is left unanswered if that lies
# above a threshold.

# %%
differences = best.null_score_B - best.score_B
for id, difference in zip(QUESTIONS, differences.tolist(), strict=True):
    assert math.isclose(chosen.na_probs[id], 1 / (1 + math.exp(-difference)))
assert chosen.at(0.5)["deep"] == "Vienna and Budapest"
assert chosen.at(0.3)["deep"] == "" and chosen.at(0.3)["cities"] == "four"
{id: round(p, 2) for id, p in chosen.na_probs.items()}

# %% [markdown]
# **Scoring.** An answer counts as exact (EM) if it equals a gold answer after both
# are stripped of case, punctuation and articles. F1 gives credit for shared words.

# %%
assert normalize_answer("The  Black-Forest!") == "blackforest"
assert exact_match("the Black Forest", "Black forest.") == 1
# Two words of three given are right, and all of two wanted are found.
precision, recall = 2 / 3, 2 / 2
expected = 2 * precision * recall / (precision + recall)
assert math.isclose(f1_of_words("Black Forest", "deep Black Forest"), expected)
assert expected == 0.8

# %% [markdown]
# **Check.** With the threshold at 0.5 the third question is answered and wrong: 2
# of 3. The official script also reports the score at the *best* threshold, found on
# the rows it scores. We find it by trying all.

# %%
at_half = score_predictions(questions, chosen.texts, chosen.na_probs, 0.5)
assert math.isclose(at_half["exact"], 100 * 2 / 3)
by_threshold = {
    t: score_predictions(questions, chosen.at(t))["f1"]
    for t in [0.0, *chosen.na_probs.values()]
}
assert max(by_threshold.values()) == at_half["best_f1"] == 100
assert at_half["best_f1_thresh"] == chosen.na_probs["cities"]
{round(t, 3): round(f) for t, f in sorted(by_threshold.items())}

# %% [markdown]
# A long paragraph does not fit into the model. It is cut into overlapping
# *windows*, and a token may begin an answer only in the window that shows most of
# its surroundings. Ten tokens, windows with room for six, a new one every three:

# %%
few = windows([7, 8], list(range(100, 110)), max_length=11, stride=3)
pieces = [(w.first_token, w.is_clearest.astype(int).tolist()) for w in few]
assert sum(w.is_clearest.sum() for w in few) == 10  # each token in one window
pieces

# %% [markdown]
# "No answer" needs all windows to agree: its score is that of the window where it
# is least likely, since the others may simply not show the answer.

# %%
deep = encoded[2]._replace(windows=encoded[2].windows * 2)
two = BestSpans(
    best.first_B[[2, 2]],
    best.last_B[[2, 2]],
    score_B=torch.tensor([2.0, 4.0]),
    null_score_B=torch.tensor([9.0, 3.0]),
)
na_prob = choose_answers(questions[2:], [deep], two).na_probs["deep"]
assert math.isclose(na_prob, 1 / (1 + math.exp(4.0 - 3.0)))

# %% [markdown]
# **Takeaway.** On a development set EM and F1 are usually given at the threshold
# that is best for these very questions, which makes them a little too good. The
# paper does not say whether Table 3 does so; `finetune` reports both.
#
# ## From runs to a table
#
# **Question.** A table has one number where there were many runs. Which?
#
# The paper has three ways:
#
# | tables | runs | number |
# |---|---|---|
# | 1 | three seeds, one setting per task (Table 8) | mean |
# | 2, 4, 13, Figures 3, 8 | three seeds, one setting (Table 6) | mean |
# | 3 | five seeds, a setting chosen from a grid (Table 11) | median |
#
# Its tables print no spread. We report the standard deviation too. Five runs, one
# of which failed to learn, as it happens on small tasks:

# %%
runs = [0.755, 0.762, 0.748, 0.527, 0.769]
median, mean = summary(runs, "median"), summary(runs, "mean-sd")
assert median["value"] == 75.5  # does not notice the failure
assert math.isclose(mean["value"], 100 * np.mean(runs)) and mean["value"] < 72
assert math.isclose(mean["sd"], 100 * np.std(runs, ddof=1)) and mean["sd"] > 10
f"median {median['value']:.1f}, mean {mean['value']:.1f} ± {mean['sd']:.1f}"

# %% [markdown]
# **Check.** The means over the tasks that the paper prints are those of its rows,
# but for one: Vanilla MLM++ of Table 2, whose four numbers have the mean 80.6.

# %%
PRINTED = {
    ("Table 1", "SMILES-BERT*"): 73.2,
    ("Table 1", "ExLM"): 76.1,
    ("Table 2", "Vanilla MLM"): 79.6,
    ("Table 2", "Vanilla MLM++"): 80.7,
    ("Table 2", "ExLM"): 81.4,
    ("Table 3", "RoBERTa*"): 85.2,
    ("Table 3", "ExLM"): 86.2,
}
GLUE_TASKS = ("mnli", "qnli", "qqp", "rte", "sst2", "cola", "mrpc", "stsb")
off = {}
for (table, name), printed in PRINTED.items():
    rows = [paper_numbers((table,), t) for t in (*BENCHMARKS, *GLUE_TASKS)]
    values = [found[table][name] for found in rows if found]
    assert len(values) == {"Table 1": 7, "Table 2": 4, "Table 3": 8}[table]
    if abs(np.mean(values) - printed) > 0.0501:  # half of the last digit
        off[name] = round(float(np.mean(values)), 3)
assert off == {"Vanilla MLM++": 80.625}

# %% [markdown]
# **What choosing costs.** For RTE, Table 11 lists 64 settings. Suppose all of them
# are equally good: right with probability 75% on average, on easy sentences more
# often than on hard ones. The development set has 277 pairs. We choose the setting
# that scores best on it, report that very score, and compare with the score on
# fresh pairs. Two other habits: five seeds of the chosen setting, of which the
# first one made the choice, and their median; and five seeds for every setting, and
# the best median.

# %%
grid = load_recipe("finetune/table-11", TUNING)
num_settings = len(grid.spaces["rte"].settings(TuneConfig()))
assert num_settings == 64 and len(grid.seeds) == 5
PAIRS, REPEATS = 277, 400
rng = np.random.default_rng(0)
reports = {"one seed": [], "median, one chose": [], "median, all chose": []}
fresh = []
for _ in range(REPEATS):
    ease = rng.beta(2.25, 0.75, PAIRS)  # of each pair; mean 0.75
    right = rng.random((num_settings, 5, PAIRS)) < ease
    score = 100 * right.mean(axis=2)
    best_one = score[:, 0].argmax()
    reports["one seed"].append(score[best_one, 0])
    reports["median, one chose"].append(np.median(score[best_one]))
    reports["median, all chose"].append(np.median(score, axis=1).max())
    fresh.append(100 * (rng.random(PAIRS) < rng.beta(2.25, 0.75, PAIRS)).mean())
found = {name: np.mean(values) for name, values in reports.items()}
for name, value in found.items():
    print(f"{name:18} {value:.1f} on the chosen rows")
f"fresh rows         {np.mean(fresh):.1f}"

# %% [markdown]
# **Check.** The truth is 75. The best single run looks five points better, without
# anything being better. Choosing with one seed and reporting five hides most of
# the luck; choosing by the median of five brings half of it back.

# %%
error = 3 * np.std(fresh) / math.sqrt(REPEATS)
assert abs(np.mean(fresh) - 75) < error
assert found["one seed"] > 78
assert abs(found["median, one chose"] - 75) < 1.5
assert found["median, all chose"] > found["median, one chose"] + 1

# %% mystnb={"figure": {"caption": "What is reported of 64 settings that are all equally good: 400 simulated tables.", "name": "fig-downstream-selection"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6.4, 2.8))
bins = np.arange(64, 90, 1.0)
for (name, values), color in zip(
    reports.items(), (COLORS["exlm"], "0.45", COLORS["mask"]), strict=True
):
    ax.hist(values, bins=bins, histtype="step", lw=2, color=color, label=name)
ax.axvline(75, color="0.3", ls="--", lw=1)
_ = ax.set(xlabel="reported accuracy (%)", ylabel="tables")
_ = ax.legend(loc="upper left", fontsize=9)

# %% [markdown]
# Real settings are not equally good, and then a part of what is gained is real. The
# paper does not say how many seeds its search had. Our `--grid` searches with one
# (`--search-seeds` changes that), and where a test set with known answers exists,
# as for molecules, the validation rows choose epoch and setting and the test rows
# are reported.
#
# **Takeaway.** Chosen on the development set and reported there, a number is
# optimistic, for MLM and ExLM alike. A comparison is fair only if both had equally
# many tries, and a difference must be larger than the luck of choosing.
#
# ## The same from the command line
#
# On the embedded task, then on the real sets; `--data` is a directory with the
# files as the benchmarks publish them, and without it they come from the hub:
#
# ```console
# $ python -m exlm_lab.finetune --recipe finetune/tiny \
#     --task embedded-molecules --checkpoint runs/molecules
# $ python -m exlm_lab.finetune --recipe finetune/table-8 \
#     --task bace bbbp clintox tox21 toxcast sider muv \
#     --checkpoint runs/smiles --data moleculenet
# $ python -m exlm_lab.finetune --recipe finetune/table-6 \
#     --task mnli qnli qqp rte --checkpoint runs/ablation --data glue
# $ python -m exlm_lab.finetune --recipe finetune/table-11 --grid \
#     --task rte squad_v2 --checkpoint runs/text --data DIR
# ```
#
# `--dry-run` prints rows, runs and steps. Every seed of every setting is kept, so
# that the same command with the same `--output` goes on where it stopped;
# `table.md` there has the numbers beside the paper's, and `results.json` everything
# they rest on. The recipes hold the settings of the paper:

# %%
for name, tasks in (
    ("table-8", BENCHMARKS),
    ("table-6", ("mnli", "qnli", "qqp", "rte")),
    ("table-11", (*GLUE_TASKS, "squad_v2")),
):
    recipe = load_recipe(name, TUNING)
    assert set(recipe.spaces) == set(tasks)
    sizes = [len(s.settings(TuneConfig())) for s in recipe.spaces.values()]
    print(f"{name:8} {recipe.report} of {len(recipe.seeds)} seeds,", end=" ")
    print(f"{len(tasks)} tasks, {min(sizes)} to {max(sizes)} settings each")

# %% [markdown]
# (downstream-recorded)=
# ## Longer runs, recorded
#
# **Question.** What comes out on the real sets, with up to an hour of pre-training
# in place of seconds?
#
# `book/results/downstream-small.json` holds such runs: an ExLM and an MLM with the
# same rows, steps and settings, fine-tuned with three seeds on three sets of
# MoleculeNet and two tasks of GLUE. `scratch` is fine-tuned from the weights at the
# start. The commands stand at the top of `book/downstream_small.py`. This is their
# scale; the minutes are those of a machine with other work, and no comparison:

# %%
record = json.loads(Path("../book/results/downstream-small.json").read_text())
for run, told in record["scale"].items():
    if not run.endswith("scratch"):
        print(textwrap.fill(f"{run}: {told}", 80, subsequent_indent="  "))
tasks = record["tasks"]
print(textwrap.fill(tasks["bbbp"]["command"], 80, subsequent_indent="  "))

# %% [markdown]
# **Check.** Each number is a mean over seeds with their standard deviation. Each
# difference is taken seed by seed, with half its 95% interval. The paper's numbers
# are those of its tables. The last column counts test molecules that were among the
# molecules of pre-training, without their answers.

# %%
MODELS = ("scratch", "mlm", "exlm")
print("task     metric   scratch     MLM         ExLM       ExLM - MLM  seen")
for name, found in tasks.items():
    seeds = {model: found["models"][model]["seeds"] for model in MODELS}
    gain = np.subtract(seeds["exlm"], seeds["mlm"])
    stored = found["differences"]["exlm - mlm"]
    assert all(len(values) == 3 for values in seeds.values())
    for model, values in seeds.items():
        assert abs(np.mean(values) - found["models"][model]["mean"]) < 0.001
    assert abs(gain.mean() - stored["mean"]) < 0.001
    assert abs(gain.std(ddof=1) - stored["sd"]) < 0.001
    seen = found["seen_in_pretraining"] or {"seen_in_test": "-", "test": "-"}
    row = [f"{np.mean(v):.1f} ± {np.std(v, ddof=1):.1f}" for v in seeds.values()]
    row.append(f"{gain.mean():+.1f} ± {stored['half_width_95']:.1f}")
    cells = " ".join(f"{cell:11}" for cell in row)
    print(
        f"{name:8} {found['metric']:8} {cells}"
        f" {seen['seen_in_test']}/{seen['test']}"
    )
    printed = paper_numbers((found["paper"]["table"],), name)
    assert found["paper"]["ExLM"] == printed[found["paper"]["table"]]["ExLM"]

# %% [markdown]
# **Figure.** Dots are seeds. The grey lines are the paper's ExLM and its MLM
# (dashed), of models over a hundred times larger, trained for GPU days.

# %% mystnb={"figure": {"caption": "Fine-tuned after up to an hour of pre-training on one CPU core: three seeds for each start, and the paper's numbers.", "name": "fig-downstream-recorded"}} tags=["hide-input"]
fig, axes = plt.subplots(1, len(tasks), figsize=(1.75 * len(tasks), 2.9))
looks = {"scratch": "0.45", "mlm": COLORS["mlm"], "exlm": COLORS["exlm"]}
for ax, (name, found) in zip(axes, tasks.items(), strict=True):
    for place, (model, color) in enumerate(looks.items()):
        ax.plot([place] * 3, found["models"][model]["seeds"], "o", color=color)
    paper = {key: v for key, v in found["paper"].items() if key != "table"}
    for key, value in paper.items():
        ax.axhline(value, color="0.5", lw=1, ls="-" if key == "ExLM" else "--")
    ax.set(title=name, xlim=(-0.6, 2.6), xticks=range(3))
    ax.set_xticklabels(["none", "MLM", "ExLM"], fontsize=8)
    ax.tick_params(axis="y", labelsize=8)
    ax.grid(axis="x", visible=False)
_ = axes[0].set(ylabel="test or development set (%)")

# %% [markdown]
# **Check.** Which differences are more than the luck of three seeds? The record has
# the half width of their 95% interval (Student's $t$): $4.30/\sqrt{3} = 2.5$
# standard deviations. Of ExLM against MLM none is, though ExLM ended pre-training
# with fewer bits per masked token, on molecules and on text. Of both against no
# pre-training two are left: MLM on ClinTox, by six points, and ExLM on SST-2, by
# one.

# %%
clear = {}
for name, found in tasks.items():
    for pair, gain in found["differences"].items():
        assert abs(gain["half_width_95"] - 4.303 / math.sqrt(3) * gain["sd"]) < 0.01
        if abs(gain["mean"]) > gain["half_width_95"]:
            clear[name, pair] = gain["mean"]
assert list(clear) == [("clintox", "mlm - scratch"), ("sst2", "exlm - scratch")]
assert 5 < clear["clintox", "mlm - scratch"] < 7
assert 0.5 < clear["sst2", "exlm - scratch"] < 1.5
for corpus in ("smiles", "text"):
    bits = []
    for model in ("exlm", "mlm"):
        (curve,) = record["pretraining"][f"{corpus}-{model}"]["validation"].values()
        bits.append(curve[-1]["validation_bits_per_mask"])
    print(f"{corpus:7} bits per mask: ExLM {bits[0]:.2f}, MLM {bits[1]:.2f}")
    assert bits[0] < bits[1]

# %% [markdown]
# **Takeaway.** Two clear differences of fifteen, none of them between ExLM and MLM,
# and behind all three seeds of each stands a single pre-training run: another start
# may turn it round. Whichever it is, pre-training is hardly ahead of none, and what
# it would win is what the two could differ in. These numbers say what an hour on a
# CPU core can do. They neither confirm nor contradict Tables 1 and 3, which took
# models of 50 and 128 million parameters; {ref}`reproduction` keeps the account.

# %% [markdown]
# ## Summary
#
# * SMILES writes a graph as a line. A token is a chemical symbol, and the
#   vocabulary decides which spellings can be read.
# * A scaffold split tests on families of molecules that training has not seen; its
#   hash says which split it was.
# * Downstream nothing is masked: an encoder reads, a head on the first token
#   answers, and both are trained.
# * ROC-AUC is the share of pairs in the right order, averaged over the questions
#   that have both answers. Matthews' and Spearman's correlations are correlations
#   of zeros and ones, and of ranks.
# * A SQuAD answer is the piece with the largest sum of two logits, unless the null
#   score wins.
# * A table is made by a rule: mean or median, how many seeds, chosen on which rows.
#   What is chosen and reported on the same rows is optimistic.
#
# ## Exercises
#
# Predict before you run.
#
# **1.** How many different molecules are among `OCC`, `COC`, `C(O)C`, `C1CC1O`,
# `OC1CC1`, `CC=O`, `C=CO`, `[CH3]C=O`?

# %% tags=["hide-cell"]
eight = ["OCC", "COC", "C(O)C", "C1CC1O", "OC1CC1", "CC=O", "C=CO", "[CH3]C=O"]
assert len({canonical(s) for s in eight}) == 5
# Equal formulas do not make equal molecules.
for one, other in (("OCC", "COC"), ("CC=O", "C=CO")):
    assert CalcMolFormula(parse(one)) == CalcMolFormula(parse(other))
    assert canonical(one) != canonical(other)

# %% [markdown]
# **2.** What becomes of ROC-AUC when all logits are negated? When every "no"
# molecule stands in the test ten times? When the logits go through the logistic
# function? And of accuracy, at the threshold 0, in the second case?

# %% tags=["hide-cell"]
s_R, yes_R = scores["MLM", 1][:, 0].astype(np.float64), labels_RC[:, 0]
area = pairwise_area(s_R, yes_R)
assert math.isclose(pairwise_area(-s_R, yes_R), 1 - area)
times = np.where(yes_R == 0, 10, 1)
many_s, many_yes = np.repeat(s_R, times), np.repeat(yes_R, times)
assert math.isclose(pairwise_area(many_s, many_yes), area)
assert math.isclose(pairwise_area(1 / (1 + np.exp(-s_R)), yes_R), area)
# Accuracy becomes, nearly, the share of the "no" that are right.
of_no = accuracy(s_R[yes_R == 0] > 0, yes_R[yes_R == 0])
assert abs(accuracy(many_s > 0, many_yes) - of_no) < 0.05

# %% [markdown]
# **3.** One scaffold holds 85% of all molecules. In which part of the split does
# it land, and what is in the training set? And with 95%?

# %% tags=["hide-cell"]
for share, place in ((85, 1), (95, 2)):
    keys = ["benzene"] * share + [f"other {n}" for n in range(100 - share)]
    parts = scaffold_split(keys)
    assert set(parts[place]) >= set(range(share))
    assert set(parts[0]) == set(range(share, 100))  # all that is left
assert [len(part) for part in parts] == [5, 0, 95]  # and nothing validates

# %% [markdown]
# **4.** RTE is scored by accuracy on 277 pairs, and a median of five runs is the
# accuracy of one of them. Which of the RTE numbers of Table 3, 75.5 for RoBERTa*,
# 78.8 for ExLM, 79.1 for ExLM large, can be such a median? What is one pair worth?

# %% tags=["hide-cell"]
possible = {round(100 * right / 277, 1) for right in range(278)}
printed = paper_numbers(("Table 3",), "rte")["Table 3"]
assert printed == {"RoBERTa*": 75.5, "ExLM": 78.8, "ExLM large": 79.1}
assert {75.5, 79.1} <= possible and 78.8 not in possible
# 218 right are 78.7, 219 are 79.1: 78.8 is no median of five on these pairs. A mean
# of several runs it can be.
assert 78.8 in {round(100 * right / (3 * 277), 1) for right in range(3 * 277)}
assert 0.36 < 100 / 277 < 0.37  # points; ExLM is nine pairs ahead of RoBERTa*
assert round(0.033 * 277) == 9
folder.cleanup()
