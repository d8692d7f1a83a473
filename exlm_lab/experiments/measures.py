"""Measurements of a trained model, under the names that records use.

``measure(model, config, corpus)`` returns ``{name: number}``. The rows are spread over the
held-out part and masked with a seed of their own, so models with equal masking are measured on
the same rows and masks.

A token is *lost* when all its copies are masked (Appendix E). Only predictions of lost tokens
count: in Repeated MLM, masked copies of other tokens are left out, and the k predictions of a lost
token are averaged. Without repetition every masked token is lost.

For toy languages the measures do not depend on the actual words behind the masks. For each word
by itself, loss and accuracy are expectations under the true distribution; for all words of a row
together, several fillings are drawn from that distribution, and the model's bits are compared
with the true bits of the same fillings.

Shapes: B rows, N tokens of a row, M targets, L states, k copies or states, S masked positions,
R lost tokens of a batch, V vocabulary, W words of the toy language.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from exlm_lab.experiments.probes import probe_accuracy
from exlm_lab.experiments.states import (
    entropy_bits,
    fully_masked,
    log_token_alone,
    pairwise_divergence_bits,
)
from exlm_lab.experiments.toy_contexts import Contexts
from exlm_mini.config import RunConfig
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.corpus import Corpus
from exlm_mini.data.masking import MaskedBatch, is_inner
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.toy import Grammar
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import StateScores
from exlm_mini.model.objectives import nats_to_bits
from exlm_mini.reading.filling import measure_fillings
from exlm_mini.reading.prize import measure_prize
from exlm_mini.training.parts import make_masker

MOST_ROWS, MOST_TOKENS = 1024, 2**15
"""Most held-out rows to measure on, and most tokens in them."""
PRIZE_ROWS, FILLED_ROWS = 512, 1024
FREQUENCY_ROWS = 4096
"""Training rows from which token frequencies are counted."""
NUM_FILLINGS = 8
MOST_NUMBERS = 2**24
"""Largest states x vocabulary of a batch; memory use is a few times as much."""
LEAST_VISIBLE = 1e-3
"""``missed_share`` is measured only if the visible words tell more bits than this of a lost one."""


def measure(
    model: MaskedLM | ExLM,
    config: RunConfig,
    corpus: Corpus,
    num_rows: int | None = None,
    seed: int = 0,
    with_probe: bool = True,
) -> dict[str, float]:
    """Measure a model on held-out rows: metrics by name.

    All are means, in bits unless another unit is named. "Alone" means that each lost token is
    predicted by itself. ``lost_share``, the share of tokens that are lost, and ``lost_per_row``,
    their number per row; alone, ``entropy_bits`` (Appendices E, Q.1), ``cross_entropy_bits`` of the
    true word and ``accuracy``; ``frequency_bits``, -log2 of its frequency in training rows;
    ``bits_per_row``, -log2 P(all lost tokens of a row | context), for ExLM a sum over paths, and
    ``bits_per_mask``. What links save: ``linked_bits``, a row's cross-entropy alone minus
    ``bits_per_row``, below 0 if probability is lost to fillings of another length; and, for ExLM
    with edges, ``dependence_bits``, where only fillings of the right length are compared.

    ExLM: ``clones_used``, 2 to the power of the entropy of the clone index of visited states, from
    1 to k; ``specialisation_bits``, Jensen-Shannon divergence of two clones' words, from 0 to 1.

    Toy languages: alone, ``optimum_entropy_bits``, the entropy of the true distribution, and
    ``excess_bits``, KL(true || model); ``missed_share``, the share of the visible words'
    information that the model does not use, 1 if it knows only the places; per row,
    ``floor_bits_per_row``, the sum of the marginal entropies, ``joint_bits_per_row``, the joint
    entropy, ``total_correlation_bits``, their difference, and ``captured_bits``, how far
    ``bits_per_row`` is below the floor; ``probe_accuracy``, see ``probes``.

    Args:
        model: trained with any objective; its mode (training or evaluation) is restored.
        config: settings of its run; objective, masking and data are used.
        corpus: what ``prepare_corpus`` made for ``config.data``.
        num_rows: held-out rows, or all if there are fewer; None: 1,024, or fewer if they are long.
            At least one of their tokens must be lost.
        seed: for masks, fillings and the probe.
        with_probe: also measure ``probe_accuracy``; takes scikit-learn and a second or two.
    """
    if num_rows is None:
        longest = int(corpus.validation.lengths_R.max())
        num_rows = min(MOST_ROWS, len(corpus.validation), MOST_TOKENS // longest)
    was_training, language = model.training, _Language.of(config, corpus)
    model.eval()
    numbers = _summary(_read(model, config, corpus, language, num_rows, seed))
    if with_probe and language is not None:
        numbers["probe_accuracy"] = probe_accuracy(model, config.num_copies, *language, seed)
    model.train(was_training)
    return numbers


def measure_together(
    model: MaskedLM | ExLM, config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> dict[str, float]:
    """Measure what hidden tokens of a row tell about each other, and how well they are filled in.

    Returns:
        the numbers of ``reading.prize``, on ``PRIZE_ROWS`` held-out rows with masks from a seed of
        their own; for molecules also the shares of ``reading.filling``, on ``FILLED_ROWS`` rows.
    """
    pack = corpus.validation
    masker = replace(make_masker(config, pack.special_ids, pack.tokenizer), seed=0)
    prize = measure_prize(model, pack, masker, PRIZE_ROWS)
    numbers = {
        "at_once_bits": prize.at_once,
        "in_turn_bits": prize.left_to_right,
        "two_passes_bits": prize.two_passes,
        "together_bits": prize.joint,
        "prize_bits": prize.prize,
        "links_win_bits": prize.links_win,
    }
    if corpus.kind == "smiles":
        ways = measure_fillings(model, tokenizer, pack, masker, FILLED_ROWS)
        for way, (readable, exact) in ways.items():
            name = way.replace(",", "").replace(" ", "_")
            numbers |= {f"readable_{name}": readable, f"exact_{name}": exact}
    return numbers


# ---- reading the rows ----


class _Language(NamedTuple):
    """A toy language, and the token ids that a run uses for its words."""

    grammar: Grammar
    token_ids_W: np.ndarray
    """Token of each word."""

    @classmethod
    def of(cls, config: RunConfig, corpus: Corpus) -> _Language | None:
        """The language that a run is trained on; None for other data."""
        if corpus.kind != "toy":
            return None
        language = grammar(config.data.grammar)
        tokens = Tokenizer.load(corpus.tokenizer_path).encode_batch(language.words)
        return cls(language, np.array(tokens).reshape(-1))

    def contexts(self, token_ids_BN: Tensor, is_lost_BN: Tensor) -> Contexts:
        """Exact distributions for the sentences in rows, without the framing [BOS] and [EOS]."""
        words_V = np.zeros(self.token_ids_W.max() + 1, dtype=np.int64)
        words_V[self.token_ids_W] = np.arange(len(self.token_ids_W))
        word_ids_SN = words_V[token_ids_BN[:, 1:-1].cpu().numpy()]
        return Contexts(self.grammar, word_ids_SN, is_lost_BN[:, 1:-1].cpu().numpy())

    def truth(self, contexts: Contexts, like_RkV: Tensor) -> Tensor:
        """P(token | visible words) of each lost token by itself, (R, V)."""
        truth_RV = like_RkV.new_zeros(len(like_RkV), like_RkV.shape[2], dtype=torch.float64)
        token_ids_W = torch.from_numpy(self.token_ids_W).to(truth_RV.device)
        truth_RV[:, token_ids_W] = torch.from_numpy(contexts.marginal_RV).to(truth_RV.device)
        return truth_RV


_Values = dict[str, Tensor]
"""Numbers by name, one per lost token, mask or row. A metric that is the plain mean of such numbers
has their name."""


@torch.no_grad()
def _read(
    model: MaskedLM | ExLM,
    config: RunConfig,
    corpus: Corpus,
    language: _Language | None,
    num_rows: int,
    seed: int,
) -> _Values:
    """The values of all rows, float64 on the CPU."""
    pack, device = corpus.validation, next(model.parameters()).device
    masker = replace(make_masker(config, pack.special_ids, pack.tokenizer), seed=seed)
    size = _rows_of_a_batch(config, pack)
    frequency_bits_V = _frequency_bits(corpus.train).to(device)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for number, batch in enumerate(validation_batches(pack, masker, num_rows, size)):
        values = _read_batch(
            model,
            batch.to(device),
            masker.num_copies,
            language,
            frequency_bits_V,
            (seed, number),
        )
        for name, value in values.items():
            parts[name].append(value.double().cpu())
    return {name: torch.cat(values) for name, values in parts.items()}


def _frequency_bits(pack: Pack) -> Tensor:
    """-log2 P(token) from token counts, plus one each, in some rows of a pack; (V,)."""
    special = pack.special_ids
    token_ids_BN = pack.gather(pack.spread(FREQUENCY_ROWS))
    count_V = token_ids_BN.flatten().bincount(minlength=pack.vocab_size)
    count_V[[special.pad, special.bos, special.eos]] = 0  # never masked
    return -((count_V + 1) / (count_V + 1).sum()).log2()


def _rows_of_a_batch(config: RunConfig, pack: Pack) -> int:
    k = config.model.states_per_mask if config.objective == "exlm" else 1
    longest = int(pack.lengths_R.max())
    num_states = config.num_copies * k * (2 + config.masking.mask_ratio * longest)
    return max(1, min(64, int(MOST_NUMBERS / (num_states * pack.vocab_size))))


def _read_batch(
    model: MaskedLM | ExLM,
    batch: MaskedBatch,
    num_copies: int,
    language: _Language | None,
    frequency_bits_V: Tensor,
    seed: tuple[int, int],
) -> _Values:
    """The values of one batch."""
    is_lost_BN = fully_masked(batch.is_masked_BN, num_copies)
    token_ids_BN = batch.token_ids_BN[:, ::num_copies]
    target_ids_R, row_R = token_ids_BN[is_lost_BN], is_lost_BN.nonzero()[:, 0]
    values = {
        "lost_per_row": is_lost_BN.sum(1),
        "tokens": is_inner(token_ids_BN, model.special_ids).sum(1),
        "frequency_bits": frequency_bits_V[target_ids_R],
    }
    if isinstance(model, ExLM):
        scores = model.answer(batch).double()
        log_p_RkV = log_token_alone(scores).unsqueeze(1)
        if scores.is_linked:
            values["length"] = nats_to_bits(-scores.log_fit())
            values["clone_use"] = scores.graph.of_masks(scores.visits())
        if model.config.states_per_mask > 1:
            token_RkV = scores.graph.of_masks(scores.log_token_BLV).exp()
            values["specialisation_bits"] = pairwise_divergence_bits(token_RkV)
    else:
        log_p_SV = model(batch.masked_ids_BN, batch.is_masked_BN).double().log_softmax(dim=1)
        is_lost_S = is_lost_BN.repeat_interleave(num_copies, dim=1)[batch.is_masked_BN]
        log_p_RkV = log_p_SV[is_lost_S].unflatten(0, (-1, num_copies))
    contexts = truth_RV = None
    if language is not None:
        contexts = language.contexts(token_ids_BN, is_lost_BN)
        truth_RV = language.truth(contexts, log_p_RkV)
        values["place"] = torch.from_numpy(contexts.place_bits_R)
        values["floor_bits_per_row"] = torch.from_numpy(contexts.floor_bits_S)
        values["joint_bits_per_row"] = torch.from_numpy(contexts.joint_bits_S)
    values |= _predictions(log_p_RkV, target_ids_R, truth_RV)
    if not isinstance(model, ExLM):
        bits_R = values["cross_entropy_bits"]
        bits_B = bits_R.new_zeros(len(token_ids_BN)).index_add(0, row_R, bits_R)
    elif contexts is None or language is None:
        bits_B = nats_to_bits(-scores.log_joint(target_ids_R))
    else:
        bits_B = _expected_bits(scores, contexts, language.token_ids_W, seed)
    return values | {"bits_per_row": bits_B}


def _predictions(log_p_RkV: Tensor, target_ids_R: Tensor, truth_RV: Tensor | None) -> _Values:
    """Values of each lost token by itself; expectations, if its true distribution is given."""
    values = {}
    if truth_RV is None:
        truth_RV = F.one_hot(target_ids_R, log_p_RkV.shape[2]).double()
    else:
        values["optimum_entropy_bits"] = entropy_bits(truth_RV.log())
    guess_R = log_p_RkV.exp().mean(dim=1).argmax(dim=1)
    # 0 log 0 = 0: what cannot be true costs nothing.
    loss_RkV = torch.where(truth_RV.unsqueeze(1) > 0, -truth_RV.unsqueeze(1) * log_p_RkV, 0.0)
    return values | {
        "entropy_bits": entropy_bits(log_p_RkV).mean(dim=1),
        "cross_entropy_bits": nats_to_bits(loss_RkV.sum(dim=2).mean(dim=1)),
        "accuracy": truth_RV.gather(1, guess_R.unsqueeze(1)).squeeze(1),
    }


def _expected_bits(
    scores: StateScores, contexts: Contexts, token_ids_W: np.ndarray, seed: tuple[int, int]
) -> Tensor:
    """-log2 P(masked words) of each row, expected over the true distribution of fillings; (B,).

    The true bits of each filling and their mean are known, so only the difference between model
    and truth is estimated from draws.
    """
    joint_bits_B = torch.from_numpy(contexts.joint_bits_S)
    excess_B = torch.zeros_like(joint_bits_B)
    for word_ids_SN in contexts.sample(NUM_FILLINGS, seed):
        token_ids_R = torch.from_numpy(token_ids_W[word_ids_SN[contexts.is_masked_SN]])
        token_ids_R = token_ids_R.to(scores.state_BLD.device)
        model_bits_B = nats_to_bits(-scores.log_joint(token_ids_R)).cpu()
        excess_B += model_bits_B - torch.from_numpy(contexts.surprise_bits(word_ids_SN))
    return joint_bits_B + excess_B / NUM_FILLINGS


# ---- putting it together ----

_MEANS = (
    "entropy_bits", "cross_entropy_bits", "frequency_bits", "accuracy", "lost_per_row",
    "bits_per_row", "specialisation_bits", "optimum_entropy_bits", "floor_bits_per_row",
    "joint_bits_per_row",
)  # fmt: skip
"""Metrics that are plain means, in the order of a record."""


def _summary(values: _Values) -> dict[str, float]:
    """The metrics, computed from the values of all rows."""
    out = {name: values[name].mean().item() for name in _MEANS if name in values}
    out["lost_share"] = (values["lost_per_row"].sum() / values["tokens"].sum()).item()
    out["bits_per_mask"] = out["bits_per_row"] / out["lost_per_row"]
    out["linked_bits"] = out["cross_entropy_bits"] * out["lost_per_row"] - out["bits_per_row"]
    if "length" in values:
        out["dependence_bits"] = out["linked_bits"] + values["length"].mean().item()
    if "clone_use" in values:
        use_k = values["clone_use"].sum(dim=0)
        out["clones_used"] = 2 ** entropy_bits((use_k / use_k.sum()).log()).item()
    if "place" in values:
        out["excess_bits"] = out["cross_entropy_bits"] - out["optimum_entropy_bits"]
        # The most bits that a model of dependencies can save over single predictions.
        shared = out["floor_bits_per_row"] - out["joint_bits_per_row"]
        out["total_correlation_bits"] = shared
        visible_bits = values["place"].mean().item() - out["optimum_entropy_bits"]
        if visible_bits > LEAST_VISIBLE:
            out["missed_share"] = out["excess_bits"] / visible_bits
        out["captured_bits"] = out["floor_bits_per_row"] - out["bits_per_row"]
    return out
