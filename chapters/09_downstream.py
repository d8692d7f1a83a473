# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-downstream)=
# # What a score is worth
#
# A pre-trained model is judged by what it can be taught afterwards. The paper
# teaches ExLM to predict properties of molecules, to compare sentences and to
# answer questions, and its Tables 1 to 4 hold the scores. In this chapter you
# write every step from a pre-trained ExLM to such a score: the encoder without
# masks, a head, the training loop, and the metric. Then you ask how much of a
# score comes from the model and how much from chance.
#
# **You will know afterwards** how little is added to a pre-trained encoder, what
# ROC-AUC counts, why a split can make a test easy, and how many runs it takes
# before a difference between two models means something.
#
# **It takes** 45 minutes and a little over a minute of one CPU core. **Paper:**
# §5.1 and §5.2 of {cite}`zheng2025exlm` and Appendices B.2, D and J to O.

# %% tags=["remove-cell", "nbval-skip"]
# Colab opens this notebook alone: fetch the book around it and install its package.
import importlib.util
import os
import subprocess
import sys

url = "https://github.com/exlm-book/exlm-book"
package = importlib.util.find_spec("exlm_mini")
if package is None:
    if not os.path.isdir("exlm-book"):
        subprocess.run(
            ["git", "clone", "--depth", "1", url, "exlm-book"], check=True
        )
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip, "exlm-book[all]"], check=True)
    os.chdir("exlm-book/chapters")
    # This kernel started before the install.
    sys.path.insert(0, os.path.abspath(".."))
elif not os.path.exists("drawings.py"):
    # A copy of this notebook reads the records of the book its package is from.
    chapters = os.path.abspath(package.origin + "/../../chapters")
    if not os.path.isdir(chapters):
        sys.exit(f"a chapter needs the book around it: open it in a clone of {url}")
    os.chdir(chapters)
    sys.path.insert(0, chapters)

# %% tags=["remove-input"]
import matplotlib.pyplot as plt
from drawings import draw_tokens
from molecules import Pictures, atoms_of, tokens_of, tokens_svg
from rdkit import Chem

from exlm_lab.downstream.patterns import PATTERNS
from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()

# %%
import io
import json
import math
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from live import chapter_scale
from scipy.stats import rankdata
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import exlm_mini
from exlm_lab.downstream.patterns import counting_baseline, load
from exlm_lab.experiments.records import runs
from exlm_mini import pretrain
from exlm_mini.training.parts import make_model

scale = chapter_scale()

# %% [markdown]
# ## Three questions about a molecule
#
# A molecule is a graph of atoms and bonds. SMILES {cite}`weininger1988smiles`
# writes it as a line of text: `C`, `N`, `O` are atoms, neighbours in the text are
# bonded, `=` is a double bond, a branch stands in parentheses, and a ring is cut
# open at one bond whose two ends get the same digit. The model reads one token
# for each symbol, and learns from the text alone which digits and parentheses
# belong together.
#
# The paper's tasks (MoleculeNet, {cite}`wu2018moleculenet`) ask what a laboratory
# measured: is a molecule toxic, does it cross into the brain? The package has a
# task of the same form that needs no download: three yes-no questions about the
# molecules that come with RDKit, a chemistry library that also answers them.

# %% mystnb={"figure": {"caption": "Molecules for which the answer is yes. Yellow: the atoms that make it so. Below, the question and the string that the model reads.", "name": "fig-downstream-questions"}, "image": {"alt": "Three molecules with the atoms in yellow that answer the question, above the string of each."}} tags=["remove-input"]
SHOWN = {
    "para": ("CC1=CC=C(Cl)C=C1", "two groups face each other on a ring"),
    "benzyl": ("OCC1=CC=CC=C1", "a saturated carbon beside an aromatic ring"),
    "fused rings": ("C1=CC2=CC=CC=C2C=C1", "an atom in two rings"),
}
drawings = {}
for name, (smiles, meaning) in SHOWN.items():
    pattern = Chem.MolFromSmarts(PATTERNS[name])
    matches = Chem.MolFromSmiles(smiles).GetSubstructMatches(pattern)
    found = {n for atoms in matches for n in atoms}
    colors = [
        COLORS["mask"] if n in found else None for n in atoms_of(tokens_of(smiles))
    ]
    drawings[f"{name}: {meaning}: {smiles}"] = tokens_svg(smiles, colors, 200, 140)
Pictures(drawings)

# %%
task, splits = load()
share_C = splits.train.labels.mean(axis=0)
for question, share in zip(task.classes, share_C, strict=True):
    print(f"{question:11} {share:.0%} yes")
for name in ("train", "validation", "test"):
    print(f"{name:11} {len(getattr(splits, name).texts)} molecules")

# %% [markdown]
# Which molecules are in the test set matters as much as the model. Chemists make
# series of molecules that differ in a side chain, so in a random split most test
# molecules have close relatives in the training set. A *scaffold split* prevents
# that. The scaffold {cite}`bemis1996properties` is what is left of a molecule when
# the side chains are cut off, and all molecules of one scaffold go to the same
# part, the large groups to training. Here no test molecule has a scaffold that was
# trained on; in a random split 82% do. Implementations differ in details, such as
# whether stereo marks belong to the scaffold, so report the hash of the split
# beside a score.

# %% [markdown]
# ## The encoder without masks
#
# Pre-training is a command of the package. This cell runs it briefly, on the same
# molecules without their answers, and loads the result.

# %%
folder = tempfile.TemporaryDirectory()
run, steps = Path(folder.name) / "exlm", scale.pick(200, 2000)
options = f"""--recipe smiles-tiny --objective exlm --train.steps {steps}
    --train.warmup_steps {steps // 10} --train.save_every {steps}
    --train.validate_every {steps} --train.device {scale.device.type}"""
with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
    _ = pretrain.main([*options.split(), "--output", str(run)])

start = exlm_mini.load(run)
tokenizer, special = start.tokenizer, start.tokenizer.special_ids


def encode_rows(texts):
    """Token ids of each text, between [BOS] and [EOS]."""
    return [
        torch.tensor([special.bos, *tokenizer.encode(text), special.eos])
        for (text,) in texts
    ]


def pad(rows):
    """Rows as one tensor (B, N), padded on the right."""
    padded_BN = pad_sequence(rows, batch_first=True, padding_value=special.pad)
    return padded_BN.to(scale.device)


train_rows = encode_rows(splits.train.texts)
test_rows = encode_rows(splits.test.texts)
pad(train_rows[:2]).shape

# %% [markdown]
# Downstream nothing is masked. So there is nothing to expand, and most of what
# makes an ExLM is left behind: the states, the transition matrix, the head over the
# vocabulary. Only the encoder stays. One trace of the states remains in the
# released code, and by default in ours: [BOS] and [EOS] are cloned $k$ times in
# every row, so they are cloned here too. The answer is read from the first clone of
# [BOS].

# %% mystnb={"figure": {"caption": "What the encoder of an ExLM with two states per mask reads for ethanol, CCO. The head sees the hidden state of the yellow token.", "name": "fig-downstream-row"}, "image": {"alt": "Seven tokens: a yellow and a grey [BOS], C, C, O, two [EOS]. An arrow leads from the first to the head with three logits."}} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(3.6, 1.1))
row = ["[BOS]", "[BOS]", "C", "C", "O", "[EOS]", "[EOS]"]
draw_tokens(ax, row, ["mask", "boundary", *["token"] * 3, *["boundary"] * 2])
arrow = {"arrowstyle": "->", "color": "0.3"}
ax.annotate("", (0, 0.95), (0, 0.35), arrowprops=arrow)
ax.text(0.2, 0.7, "head: three logits", va="center", fontsize=9)
_ = ax.set(ylim=(-0.4, 1))

# %% [markdown]
# ## The classification head
#
# The paper describes no head; that of the released code, like BERT's, has two
# matrices. From the hidden state $\mathbf{h}$ of the first token it computes one
# number for each question, its *logit*:
#
# $$
# \mathbf{s} = W_2 \tanh(W_1 \mathbf{h} + \mathbf{b}_1) + \mathbf{b}_2
# $$ (eq-downstream-head)
#
# A logit above 0 means yes. The tanh layer is often called the pooler, because its
# output stands for the whole row.


# %%
class Classifier(nn.Module):
    """A pre-trained encoder and a head with one logit for each question."""

    def __init__(self, pretrained, num_questions):
        super().__init__()
        self.encoder = pretrained.encoder  # its weights are trained further
        self.encode = pretrained.encode
        width = pretrained.config.shape.width
        self.dense = nn.Linear(width, width)
        self.output = nn.Linear(width, num_questions)

    def forward(self, token_ids_BN):
        nothing_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
        # Arguments: input ids, what is masked, true ids. T > N: [BOS] has clones.
        hidden_BTD, _ = self.encode(token_ids_BN, nothing_BN, token_ids_BN)
        first_BD = hidden_BTD[:, 0]
        return self.output(torch.tanh(self.dense(first_BD)))


_ = torch.manual_seed(1)
model = Classifier(exlm_mini.load(run).model, len(task.classes)).to(scale.device)
tuple(model(pad(train_rows[:8])).shape)

# %% [markdown]
# ## The training loop
#
# Encoder and head are trained together. The loss is the cross-entropy of each yes
# or no, averaged over rows and questions. The loop differs from that of
# pre-training only in its numbers: a few passes over the data instead of a
# hundred thousand steps, and a learning rate that rises for 6% of the steps and
# then falls to 0. We train twice: from the pre-trained ExLM and, for comparison,
# from an untrained one.


# %%
def shuffled(rows, batch_size=32):
    """Batches of row numbers for one pass; rows of similar length share a batch."""
    length_R = torch.tensor([len(row) for row in rows])
    order_R = torch.randperm(len(rows))
    order_R = order_R[length_R[order_R].argsort(stable=True)]
    batches = order_R.split(batch_size)
    return [batches[i] for i in torch.randperm(len(batches))]


def fine_tune(model, rows, labels_RC, batches, peak=1e-3):
    """Train encoder and head; return the loss of every step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
    )
    steps, warmup, losses = len(batches), round(0.06 * len(batches)), []
    for step, batch in enumerate(batches, start=1):
        falling = (steps - step + 1) / (steps - warmup + 1)
        optimizer.param_groups[0]["lr"] = peak * min(step / warmup, falling)
        logits_BC = model(pad([rows[i] for i in batch]))
        answers_BC = labels_RC[batch].to(logits_BC)
        loss = F.binary_cross_entropy_with_logits(logits_BC, answers_BC)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def scores(model, rows):
    """The logits of all rows, (R, C)."""
    parts = [model(pad(rows[i : i + 64])) for i in range(0, len(rows), 64)]
    return torch.cat(parts).cpu()


labels_RC = torch.from_numpy(splits.train.labels)
untrained = make_model(start.config, tokenizer.vocab_size, special)
scores_of = {}
for name, pretrained in (
    ("untrained", untrained),
    ("ExLM", exlm_mini.load(run).model),
):
    _ = torch.manual_seed(1)
    model = Classifier(pretrained, len(task.classes)).to(scale.device)
    batches = [batch for _ in range(3) for batch in shuffled(train_rows)]
    _ = fine_tune(model.train(), train_rows, labels_RC, batches)
    scores_of[name] = scores(model.eval(), test_rows)

# %% [markdown]
# ## The metric: pairs in the right order
#
# How good are these logits? Accuracy has two faults: it needs a threshold, and
# where the answer is no for 9 of 10 molecules, always saying no is 90% right. The
# field uses ROC-AUC, the area under the curve of the true-positive rate against the
# false-positive rate. This area has a simpler meaning. Take every pair of a yes and
# a no, and count how often the yes has the larger logit $s$; a tie counts half:
#
# $$
# \text{AUC} = \sum_{a \in \text{yes}} \sum_{b \in \text{no}}
# \frac{[s_a > s_b]}{R_+ R_-}
# $$ (eq-roc-auc)
#
# where the bracket is 1 if the comparison holds, ½ at a tie, and 0 otherwise;
# $R_+$ rows have the answer yes and $R_-$ the answer no. A coin flip scores ½,
# whatever the share of yes.


# %%
def roc_auc(score_R, is_yes_R):
    """The share of (yes, no) pairs in which the yes has the larger score."""
    ahead = score_R[is_yes_R][:, None] - score_R[~is_yes_R][None]
    return ((ahead > 0) + 0.5 * (ahead == 0)).mean(dtype=torch.float64).item()


five_R = torch.tensor([0.9, 0.8, 0.6, 0.4, 0.2])
answer_R = torch.tensor([True, False, True, False, False])
print(f"five of six pairs: {roc_auc(five_R, answer_R):.3f}")

# %% [markdown]
# A score needs a simple baseline beside it. Ours is a logistic
# regression on how often each symbol occurs in the string; it cannot know what is
# bonded to what.

# %%
is_yes_RC = torch.from_numpy(splits.test.labels == 1)
areas = {"counting": counting_baseline(splits)}
for name, score_RC in scores_of.items():
    pairs = zip(score_RC.T, is_yes_RC.T, strict=True)
    areas[name] = np.array([roc_auc(*pair) for pair in pairs])

# %% mystnb={"figure": {"caption": "ROC-AUC on the 500 test molecules: counting symbols, and an ExLM fine-tuned for three passes from untrained and from pre-trained weights. One run each.", "name": "fig-downstream-live"}, "image": {"alt": "Counting lies below both models on fused rings by far, on para and in the mean; on benzyl it lies between them. The means of the two models are nearly equal."}} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(3.6, 3.2), layout="constrained")
looks = {
    "counting": ("0.45", "s", "counting symbols"),
    "untrained": (COLORS["mlm"], "o", "from untrained weights"),
    "ExLM": (COLORS["exlm"], "D", "from pre-trained ones"),
}
names = [*task.classes, "mean"]
for place, (name, (color, marker, label)) in enumerate(looks.items()):
    values = [*areas[name], areas[name].mean()]
    x = np.arange(len(values)) + 0.16 * (place - 1)
    ax.plot(x, values, marker, color=color, label=label)
ax.grid(axis="x", visible=False)
ax.axhline(0.5, color="0.6", lw=1, ls="--")
ax.text(3.4, 0.505, "a coin", ha="right", fontsize=8, color="0.35")
ax.set(xticks=range(4), xticklabels=names, ylabel="ROC-AUC", xlim=(-0.5, 3.5))
ax.tick_params(axis="x", labelsize=8)
_ = fig.legend(loc="outside lower center", fontsize=8, handletextpad=0.2)

# %% [markdown]
# On average both models are ahead of counting, and pre-training makes no visible
# difference. That is no surprise: 200 steps teach little, and the task itself
# teaches which symbols belong together. The run only shows that every step from a
# checkpoint to a score works.
#
# ## The same thing in the package
#
# The package does this for any run and any of its tasks, with dropout, checkpoints
# and several seeds, using the `Trainer` of transformers. It judges what you have
# written: its head must give the same logits and loss, its loop must learn as fast,
# and its metric, scikit-learn's, must give the same areas.

# %% mystnb={"code_prompt_show": "Checked: no test molecule has a scaffold of the training set, 82% in a random split; both models are above counting and less than 0.06 apart; the package's model, loss, loop and ROC-AUC give your numbers"} tags=["hide-cell", "check"]
from exlm_lab.downstream.scaffolds import index_sha1, random_parts, scaffold, split
from exlm_mini.data.molecules import embedded_molecules, read_molecule

everything = list(embedded_molecules())
keys = [m and scaffold(m, is_chiral=True) for m in map(read_molecule, everything)]
rows = [row for row, key in enumerate(keys) if key is not None]
by_scaffold, at_random = split(everything), random_parts(rows, seed=0)
known = {}
for rule, parts in (("scaffold", by_scaffold.parts), ("random", at_random)):
    train, _, test = parts
    known[rule] = np.mean([keys[row] in {keys[r] for r in train} for row in test])
assert known == {"scaffold": 0.0, "random": 0.82}, known
assert [len(part) for part in by_scaffold.parts] == [3992, 499, 500]
assert index_sha1(by_scaffold.test) == splits.notes["split_sha1"]["test"]

mean_area = {name: values.mean() for name, values in areas.items()}
assert 0.74 < mean_area["counting"] < 0.77
assert min(mean_area["untrained"], mean_area["ExLM"]) > mean_area["counting"]
assert abs(mean_area["untrained"] - mean_area["ExLM"]) < scale.pick(0.06, 0.2)

import warnings

# A library warns that it cannot draw a progress bar in the notebook.
warnings.filterwarnings("ignore", message="IProgress not found")

from exlm_lab.downstream.finetuning import fine_tune as package
from exlm_lab.downstream.finetuning import model_for
from exlm_lab.downstream.metrics import mean_roc_auc
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.trainer import answers_loss

# The model, with the same weights, on rows of different lengths.
problem = make_problem(task, splits, start)
tiny = TuneConfig(epochs=1, learning_rate=1e-3, weight_decay=0.01, precision="fp32")
theirs = model_for(start, problem, tiny, seed=1)
_ = torch.manual_seed(1)
ours = Classifier(exlm_mini.load(run).model, 3)
theirs.heads[0], theirs.heads[1] = ours.dense, ours.output
some_BN, some_BC = pad(train_rows[:8]).cpu(), labels_RC[:8].float()
with torch.no_grad():
    output = theirs.eval()(some_BN)
    logits_BC = ours.eval()(some_BN)
    torch.testing.assert_close(logits_BC, output.logits)
own = F.binary_cross_entropy_with_logits(logits_BC, some_BC)
torch.testing.assert_close(answers_loss(output, some_BC), own)

# The loop: 20 steps each on the same rows, each with its own batches.
few = problem.train._replace(
    rows=problem.train.rows[:640], labels=problem.train.labels[:640]
)
for own_N, their_N in zip(train_rows, problem.train.rows, strict=True):
    assert own_N.tolist() == their_N.tolist()
where, device = Path(folder.name) / "tuned", scale.device.type
run = package(start, problem._replace(train=few), tiny, 1, where, device)
order = torch.arange(640).split(32)
losses = fine_tune(ours.to(device).train(), train_rows, labels_RC, order)
assert abs(np.mean(losses) - run.history[0]["loss"]) < 0.05
assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05  # the loss falls

# The metric.
for name, score_RC in scores_of.items():
    area, num_questions = mean_roc_auc(score_RC.numpy(), splits.test.labels)
    assert num_questions == 3 and math.isclose(area, areas[name].mean())
five = mean_roc_auc(five_R[:, None].numpy(), answer_R[:, None].double().numpy())
assert math.isclose(five[0], 5 / 6) and math.isclose(
    roc_auc(five_R, answer_R), 5 / 6
)
folder.cleanup()

# %% [markdown]
# ```console
# $ python -m exlm_lab.finetune --task embedded-molecules \
#     --checkpoint runs/molecules
# $ python -m exlm_lab.finetune --recipe finetune/table-8 \
#     --task bace bbbp tox21 --checkpoint runs/smiles \
#     --data moleculenet
# ```
#
# Other tasks mostly change the head and the metric. GLUE {cite}`wang2019glue` has
# classes instead of yes and no; CoLA is scored by Matthews' correlation and STS-B
# by Spearman's, the others by accuracy or F1. For SQuAD 2.0
# {cite}`rajpurkar2018know` the head gives every token two logits, for the start
# and for the end of the answer; the best pair is the answer, unless [BOS], which
# stands for "no answer", scores higher.
#
# (downstream-recorded)=
# ## How much of a score is chance
#
# Longer runs than the one above were made once and recorded: on molecules and on
# text, an ExLM and an MLM read the same data for 10,000 steps, up to an hour on one
# core, and were then fine-tuned with three seeds on three sets of MoleculeNet and
# two tasks of GLUE. Here a seed decides the weights of the head and the order of
# the rows. Scores can move by several points from seed to seed, so two models are
# compared seed by seed: with $n$ differences of mean $\bar d$ and standard
# deviation $\sigma_d$, the 95% interval is
# $\bar d \pm t_{n-1}\,\sigma_d / \sqrt{n}$, and for three seeds Student's $t$ is
# 4.30. We count a difference only if its interval excludes zero. Of the five
# between ExLM and MLM, none does.


# %%
def paired_interval(ours, base, t=4.303):
    """Mean difference and half its 95% interval; t is Student's for three seeds."""
    d = np.subtract(ours, base)
    return d.mean(), t * d.std(ddof=1) / math.sqrt(len(d))


record = json.loads(Path("../book/results/downstream-small.json").read_text())
intervals = {}
for name, found in record["tasks"].items():
    seeds = {model: found["models"][model]["seeds"] for model in ("exlm", "mlm")}
    intervals[name] = paired_interval(seeds["exlm"], seeds["mlm"])
    print("{:8}{:+5.1f} ± {:4.1f}".format(name, *intervals[name]))

# %% [markdown]
# But what has been repeated? All three seeds of a model start from the *same*
# pre-trained weights, so the interval is about these two checkpoints. Whether
# ExLM is the better *method* depends on what another pre-training would have
# given, and there the unit is the pre-training run. The lower half of
# {numref}`fig-downstream-recorded` shows how much that matters: ExLM and MLM on a
# small language, each pre-trained ten times for equal steps on equal data, with
# 38.7% of the words masked (the scorecard of {ref}`chap-findings` has the runs with
# 15%). In one pair ExLM is 27 points ahead, in another 15 behind. The mean
# difference is 9 points, and the interval, ±10, contains zero; a single
# pre-training run could have led to either conclusion. The paper's three or five
# seeds are seeds of fine-tuning, and its tables print their mean or median without
# a spread. What our longer studies decide, with up to ten pre-training runs per
# model, is in {ref}`all-sweeps`.

# %% mystnb={"figure": {"caption": "Above: ExLM minus MLM after fine-tuning with three seeds from one pre-training run each, with the 95% interval of the mean; grey diamonds are the differences the paper prints. Below: accuracy on toy-inference after ten pre-training runs each; a line joins runs with the same seed; the dashed line, a third, is chance.", "name": "fig-downstream-recorded"}, "image": {"alt": "Above, all five intervals contain zero. Below, ten lines from MLM to ExLM: seven rise, two of them from chance or near it to 58 and 64 percent, and three fall."}} tags=["remove-input"]
LABELS = {"bbbp": "BBBP", "bace": "BACE", "clintox": "ClinTox", "cola": "CoLA"}
LABELS["sst2"] = "SST-2"
fig, (left, right) = plt.subplots(2, 1, figsize=(3.6, 5.4), layout="constrained")
for y, (name, found) in enumerate(record["tasks"].items()):
    models, paper = found["models"], found["paper"]
    gain = np.subtract(models["exlm"]["seeds"], models["mlm"]["seeds"])
    middle, half = intervals[name]
    left.plot([middle - half, middle + half], [y, y], color=COLORS["exlm"], lw=2)
    left.plot(gain, [y] * 3, "o", color=COLORS["exlm"], ms=5)
    (base,) = (v for k, v in paper.items() if k not in ("table", "ExLM"))
    left.plot(paper["ExLM"] - base, y + 0.28, "D", color="0.45", ms=4)
left.axvline(0, color="0.3", lw=1)
left.set(yticks=range(5), yticklabels=LABELS.values(), xlabel="ExLM − MLM (points)")
left.invert_yaxis()
left.grid(axis="y", visible=False)
left.set_title("three fine-tunings", fontsize=10)
accuracy = runs("k-and-p", Path("../book/results"))["downstream"]
pretrained_runs = {
    model: accuracy[f"toy-p0.387-{model}"].tolist() for model in ("mlm", "k4")
}
for ends in zip(*pretrained_runs.values(), strict=True):
    right.plot([0, 1], ends, color="0.6", lw=1.5, zorder=1)
    right.plot(0, ends[0], "o", color=COLORS["mlm"])
    right.plot(1, ends[1], "o", color=COLORS["exlm"])
right.axhline(100 / 3, color="0.6", lw=1, ls="--")
right.set(xlim=(-0.4, 1.4), xticks=[0, 1], xticklabels=["MLM", "ExLM"])
right.set(ylabel="accuracy (%)", ylim=(25, 90))
right.grid(axis="x", visible=False)
right.set_title("ten pre-trainings", fontsize=10)
for ax in (left, right):
    ax.tick_params(labelsize=9)

# %% [markdown]
# Three more things matter in a table of scores. **Settings are chosen.** For Table
# 3 the paper searches a grid of up to 64 settings per task and reports scores on
# the development sets; if the settings were chosen on the same rows, the scores are
# too good, and Exercise 3 simulates by how much at most. **Test molecules have been
# seen before.** Of BBBP's 204 test molecules 17 were in our pre-training data,
# without their answers. **Tables have slips.** Tables 1 and 9 give different
# numbers of molecules for three sets; the four scores of Vanilla MLM++ in Table 2
# have the mean 80.6, not 80.7, and the eight of the large ExLM in Table 3 have
# 86.8, not 86.9; and the 78.8 of ExLM on RTE in Table 3 cannot be the median of
# five runs, because no share of 277 pairs rounds to it.

# %% mystnb={"code_prompt_show": "Checked: the recorded intervals, the 9 ± 10 points, and the paper's own differences; 64 settings; 17 of 204 molecules; the slips"} tags=["hide-cell", "check"]
from exlm_lab.downstream.grid import TUNING, combinations, paper_numbers

for name, found in record["tasks"].items():
    stored = found["differences"]["exlm - mlm"]
    assert np.allclose(
        intervals[name], (stored["mean"], stored["half_width_95"]), atol=0.01
    )
    assert abs(stored["mean"]) < stored["half_width_95"]  # zero lies inside
    printed = paper_numbers((found["paper"]["table"],), name)
    assert found["paper"]["ExLM"] == printed[found["paper"]["table"]]["ExLM"]
middle, half = paired_interval(*map(pretrained_runs.get, ("k4", "mlm")), t=2.262)
assert (round(middle), round(half)) == (9, 10)
each = np.subtract(pretrained_runs["k4"], pretrained_runs["mlm"])
assert (len(each), round(min(each)), round(max(each))) == (10, -15, 27)
assert (each > 0).sum() == 7

from exlm_lab.downstream.moleculenet import BENCHMARKS
from exlm_mini.config.recipes import load_recipe

grid = load_recipe("finetune/table-11", TUNING)
sizes = {n: len(combinations(s, TuneConfig())) for n, s in grid.spaces.items()}
assert max(sizes.values()) == sizes["rte"] == 64 and len(grid.seeds) == 5
seen = record["tasks"]["bbbp"]["seen_in_pretraining"]
assert (seen["seen_in_test"], seen["test"]) == (17, 204)
TABLE_1 = {"bace": 1531, "bbbp": 2039, "tox21": 7831, "sider": 1427}
TABLE_1 |= {"muv": 93087, "clintox": 1478, "toxcast": 8575}
off = {
    name for name, size in TABLE_1.items() if sum(BENCHMARKS[name].sizes) != size
}
assert len(off) == 3, off
# Every printed mean over tasks is the mean of its row, except two.
GLUE = ("mnli", "qnli", "qqp", "rte", "sst2", "cola", "mrpc", "stsb")
MEANS = {
    ("Table 1", "SMILES-BERT*"): 73.2,
    ("Table 1", "ExLM"): 76.1,
    ("Table 2", "Vanilla MLM"): 79.6,
    ("Table 2", "Vanilla MLM++"): 80.7,
    ("Table 2", "ExLM"): 81.4,
    ("Table 3", "RoBERTa*"): 85.2,
    ("Table 3", "ExLM"): 86.2,
    ("Table 3", "ExLM large"): 86.9,
}
wrong = {}
for (table, name), printed in MEANS.items():
    rows = [paper_numbers((table,), t) for t in (*BENCHMARKS, *GLUE)]
    mean = np.mean([found[table][name] for found in rows if found])
    if abs(mean - printed) > 0.0501:  # half of the last digit
        wrong[name] = round(float(mean), 4)
assert wrong == {"Vanilla MLM++": 80.625, "ExLM large": 86.7875}
rte = paper_numbers(("Table 3",), "rte")["Table 3"]
shares = {round(100 * right / 277, 1) for right in range(278)}
assert rte["ExLM"] == 78.8 and 78.8 not in shares and rte["RoBERTa*"] in shares

# %% [markdown]
# ## Exercises
#
# **1. Missing answers.** In Tox21 not every molecule was measured in every test;
# a missing answer is `nan`. Write the loss as the mean over the answers that
# exist.

# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
nan = math.nan


def judge_loss(loss):
    """Compare with the package's loss, and check that the gradient is finite."""
    logits_BC = torch.tensor([[2.0, 1], [0, 9], [-1, 0]], requires_grad=True)
    answers_BC = torch.tensor([[1.0, 1], [1, nan], [0, nan]])
    found = loss(logits_BC, answers_BC)
    if found is None:
        return "not yet"
    wanted = answers_loss({"logits": logits_BC}, answers_BC)
    value = torch.as_tensor(found)
    if value.numel() != 1 or not torch.isclose(value.float(), wanted):
        return f"{found}, but it is {wanted.item():.3f}"
    if not value.requires_grad:
        return "the value is right, but it has no gradient"
    value.backward()
    if not torch.isfinite(logits_BC.grad).all():
        return "the value is right, but the gradient is not finite"
    return "right"


assert judge_loss(lambda logits_BC, answers_BC: logits_BC.mean()) != "right"


# %%
def masked_loss(logits_BC, answers_BC):
    """Mean binary cross-entropy; answers are 0, 1 or nan."""  # your turn


print(judge_loss(masked_loss))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def masked_loss(logits_BC, answers_BC):
    """Mean binary cross-entropy; answers are 0, 1 or nan."""
    is_there_BC = ~answers_BC.isnan()
    return F.binary_cross_entropy_with_logits(
        logits_BC[is_there_BC], answers_BC[is_there_BC]
    )


assert judge_loss(masked_loss) == "right"
# Multiplying by the mask does not work, because 0 * nan is nan.


# %% [markdown]
# **2. Without the pairs.** A set like MUV has 93,000 molecules, too many to store
# all pairs. Compute the same area from the *ranks* of the scores, which `rankdata`
# gives (the smallest has rank 1, ties share their mean rank). Hint: how many rows
# lie below a yes of rank $r$, and how many of them are yes themselves?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_auc(auc):
    """Compare with the count of pairs, ties included."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        score_R = torch.randint(0, 8, (40,), generator=generator).double()
        is_yes_R = torch.rand(40, generator=generator) < 0.3
        found = auc(score_R.numpy(), is_yes_R.numpy())
        if found is None:
            return "not yet"
        if not math.isclose(found, roc_auc(score_R, is_yes_R), rel_tol=1e-6):
            return f"{found:.3f}, but it is {roc_auc(score_R, is_yes_R):.3f}"
    return "right"


assert judge_auc(lambda score_R, is_yes_R: 0.5) != "right"


# %%
def auc_by_ranks(score_R, is_yes_R):
    """ROC-AUC from rankdata(score_R)."""  # your turn


print(judge_auc(auc_by_ranks))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def auc_by_ranks(score_R, is_yes_R):
    """ROC-AUC from rankdata(score_R)."""
    num_yes, num_no = is_yes_R.sum(), (~is_yes_R).sum()
    # Among themselves the yes rows have the ranks 1 to num_yes: subtract their sum.
    wins = rankdata(score_R)[is_yes_R].sum() - num_yes * (num_yes + 1) / 2
    return wins / (num_yes * num_no)


assert judge_auc(auc_by_ranks) == "right"


# %% [markdown]
# **3. What choosing costs.** RTE's development set has 277 pairs, and Table 11
# lists 64 settings. Suppose they are all equally good: each answers a pair
# correctly with probability 0.75. Simulate the score of the best one, in percent.


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_choice(best):
    """Average the best score over 400 simulated tables."""
    rng = np.random.default_rng(0)
    found = [best(64, 277, 0.75, rng) for _ in range(400)]
    if found[0] is None:
        return "not yet"
    if max(found) <= 1:
        return "in percent, please"
    mean, single = np.mean(found), np.mean([best(1, 40, 0.5, rng) for _ in found])
    if abs(single - 50) > 2:
        return f"a single setting with p = 0.5 should score 50, not {single:.1f}"
    if abs(mean - 80.9) > 0.4:
        return f"{mean:.1f}? Is the largest of 64 taken?"
    return "right: nothing is better than 75, and the table says 81"


assert judge_choice(lambda num, rows, p, rng: 100 * p).endswith("taken?")


# %%
def best_score(num_settings, num_rows, p, rng):
    """Best score, in percent, of equally good settings."""  # your turn


print(judge_choice(best_score))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def best_score(num_settings, num_rows, p, rng):
    """Best score, in percent, of equally good settings."""
    return 100 * rng.binomial(num_rows, p, num_settings).max() / num_rows


assert judge_choice(best_score).startswith("right")
# Real settings fail on the same hard pairs, which makes the gain smaller. They are
# not equally good either, so part of the gain is real. The rest comes from
# reporting scores on the rows on which the settings were chosen.
