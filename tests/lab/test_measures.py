"""The measures of sweeps are exact for models that know the language, and equal validation's.

Shapes: B rows, L states, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_runs import DATA

from exlm_lab.benchmarks import step
from exlm_lab.benchmarks.measure import Timing
from exlm_lab.experiments import measures
from exlm_lab.experiments.measures import measure
from exlm_lab.experiments.toy_contexts import Contexts
from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, SpecialIds
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import StateScores
from exlm_mini.model.transition import parallel_chains
from exlm_mini.training.cost import row_flops
from exlm_mini.training.evaluation import evaluate, row_bits_and_correct
from exlm_mini.training.parts import make_masker, make_model
from exlm_mini.training.processes import Engine

SMALL = ModelConfig(width=16, num_heads=2, ffn_width=16, states_per_mask=2)
TOWN = RunConfig(
    objective="mlm",
    model=SMALL,
    masking=MaskingConfig(mask_ratio=0.3, strategy="bernoulli"),
    data=DataConfig(kind="toy", grammar="town", num_sentences=8),
)
PAIRS = replace(
    TOWN,
    objective="exlm",
    masking=MaskingConfig(strategy="slots"),
    data=DataConfig(kind="toy", grammar="pairs", num_sentences=8),
)
TEXT = replace(
    TOWN, data=DataConfig(kind="text", vocab_size=300, block_length=32, max_documents=20)
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A prepared corpus of each kind of data, by grammar or kind."""
    return {
        config.data.grammar if config.data.kind == "toy" else config.data.kind: prepare_corpus(
            config.data, tmp_path_factory.mktemp(f"data{i}"), config.seed
        )
        for i, config in enumerate((TOWN, PAIRS, TEXT))
    }


def untrained(config: RunConfig, corpus) -> MaskedLM | ExLM:
    return make_model(config, corpus.train.vocab_size, corpus.train.special_ids)


class Believer(MaskedLM):
    """Ignores its input: in ``pairs``, each copy has a fixed probability of the first mood."""

    beliefs: tuple[float, ...]

    def forward(self, masked_ids_BN, is_masked_BN):
        place_S = is_masked_BN.nonzero()[:, 1].numpy()
        first_S = np.array(self.beliefs)[place_S % len(self.beliefs)]
        at_S = place_S // len(self.beliefs) - 1
        p_SV = torch.from_numpy(in_mood(np.stack((first_S, 1 - first_S), axis=1), at_S))
        return torch.nn.functional.pad(p_SV, (len(self.special_ids), 0)).log()


def in_mood(mood_SZ, place_S):
    """P(word) at places of ``pairs``, (S, W), for a distribution over moods at each, (S, Z)."""
    table_NZV = np.stack(grammar("pairs").word_probability_NZV)
    return np.einsum("sz,szv->sv", mood_SZ, table_NZV[place_S])


class Words(torch.nn.Module):
    """An encoder with one-hot words as states; zero for a copy that differs from the first."""

    def __init__(self, vocab_size, num_copies=1):
        super().__init__()
        self.word_VV, self.num_copies = torch.eye(vocab_size), num_copies

    def forward(self, token_ids_BT, *rest):
        first_BT = token_ids_BT[:, :: self.num_copies].repeat_interleave(self.num_copies, 1)
        is_whole_BT = first_BT[:, : token_ids_BT.shape[1]] == token_ids_BT
        return self.word_VV[token_ids_BT] * is_whole_BT.unsqueeze(2)


class Moods(ExLM):
    """Knows ``pairs``: each clone holds one mood, and edges join clones of the same mood."""

    def forward(self, masked_ids_BN, is_masked_BN, token_ids_BN, chain_share=0.0):
        _, graph = self.encode(masked_ids_BN, is_masked_BN, token_ids_BN)
        state_BLD = torch.stack([graph.owner_BL, graph.clone_BL], dim=2).double()
        log_token_BLV = self.token_logits(state_BLD).log_softmax(dim=2)
        index_BLM = graph.target_ids_BM.unsqueeze(1).expand(-1, state_BLD.shape[1], -1)
        log_emission_BML = log_token_BLV.gather(2, index_BLM).transpose(1, 2)
        is_scored_BM = torch.ones_like(graph.target_ids_BM, dtype=torch.bool)
        links = parallel_chains(state_BLD, graph)
        return StateScores(log_emission_BML, links, None, graph, is_scored_BM, state_BLD, self)

    def token_logits(self, state_BLD):
        language = grammar("pairs")
        logits_BLV = torch.full((*state_BLD.shape[:-1], 6 + len(language.words)), -torch.inf)
        logits_BLV = logits_BLV.double()
        for owner, slot in enumerate(language.slots, start=1):
            choices = language.positions[slot].choices.values()
            for clone, word in enumerate(choices, start=1):
                is_here_BL = (state_BLD == torch.tensor([owner, clone])).all(dim=-1)
                logits_BLV[..., 6 + language.words.index(word)][is_here_BL] = 0.0
        logits_BLV[..., 0][~logits_BLV.isfinite().any(dim=-1)] = 0.0  # boundaries
        return logits_BLV


def close(**expected):
    return {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}


@pytest.mark.parametrize("beliefs", [(0.5,), (0.6,), (0.6, 0.1), (0.9, 0.9, 0.001)])
def test_every_number_of_a_model_that_reads_nothing_is_known(corpora, beliefs):
    corpus, language, k, rows = corpora["pairs"], grammar("pairs"), len(beliefs), 64
    masking = MaskingConfig(strategy="bernoulli", mask_ratio=0.8, num_copies=k)
    objective = "mlm" if k == 1 else "repeated-mlm"
    config = replace(PAIRS, objective=objective, masking=masking)
    model = Believer(SMALL, corpus.train.vocab_size)
    model.beliefs, model.encoder = beliefs, Words(corpus.train.vocab_size, k)
    found = measure(model, config, corpus, num_rows=rows)

    masker = replace(make_masker(config, corpus.train.special_ids), seed=0)
    (batch,) = validation_batches(corpus.validation, masker, rows, rows)
    is_lost_BN = batch.is_masked_BN.unflatten(1, (-1, k)).all(dim=2)[:, 1:-1].numpy()
    word_BN = (batch.token_ids_BN[:, ::k] - 6)[:, 1:-1].numpy()
    slots = list(language.slots)
    first = [language.words.index(language.positions[n].choices["happy",]) for n in slots]
    # A visible slot reveals the mood.
    is_hidden_B = is_lost_BN[:, slots].all(axis=1)
    first_B = np.where(is_hidden_B, 0.5, (word_BN[:, slots] == first)[:, 0])
    row_R, place_R = is_lost_BN.nonzero()
    truth_RV = in_mood(np.stack((first_B, 1 - first_B), axis=1)[row_R], place_R)
    p_kRV = [in_mood(np.tile((b, 1 - b), (len(row_R), 1)), place_R) for b in beliefs]
    bits = lambda p, q: -(p * np.log2(np.where(p > 0, q, 1))).sum(axis=1)  # noqa: E731
    cross_R = np.mean([bits(truth_RV, p_RV) for p_RV in p_kRV], axis=0)
    alone_RV = in_mood(np.full((len(row_R), 2), 0.5), place_R)
    best_R = bits(truth_RV, truth_RV)
    lost, shared = len(row_R) / rows, is_hidden_B.mean()
    guess_R = np.mean(p_kRV, axis=0).argmax(axis=1)
    expected = {
        "lost_share": lost / language.length,
        "lost_per_row": lost,
        "entropy_bits": np.mean([bits(p_RV, p_RV) for p_RV in p_kRV]),
        "cross_entropy_bits": cross_R.mean(),
        "accuracy": truth_RV[np.arange(len(row_R)), guess_R].mean(),
        "bits_per_row": cross_R.sum() / rows,
        "bits_per_mask": cross_R.mean(),
        "linked_bits": 0,
        "optimum_entropy_bits": best_R.mean(),
        "excess_bits": (cross_R - best_R).mean(),
        "missed_share": (cross_R - best_R).mean() / (bits(alone_RV, alone_RV) - best_R).mean(),
        "floor_bits_per_row": best_R.sum() / rows,
        "joint_bits_per_row": best_R.sum() / rows - shared,
        "total_correlation_bits": shared,
        "captured_bits": (best_R - cross_R).sum() / rows,
        "probe_accuracy": 1,
        "frequency_bits": found["frequency_bits"],
    }
    assert found == close(**expected)
    assert 0 < shared < 1
    assert beliefs != (0.5,) or found["missed_share"] == pytest.approx(1)


def test_frequency_bits_are_of_training_rows_plus_one(corpora):
    corpus = corpora["text"]
    found = measure(untrained(TEXT, corpus), TEXT, corpus, num_rows=4, with_probe=False)
    masker = replace(make_masker(TEXT, corpus.train.special_ids), seed=0)
    (batch,) = validation_batches(corpus.validation, masker, 4, 4)
    rows_RN = corpus.train.gather(range(len(corpus.train)))
    special = corpus.train.special_ids
    frame = {special.pad, special.bos, special.eos}
    words = [word for word in rows_RN.flatten().tolist() if word not in frame]
    counts = Counter(words)
    total = len(words) + corpus.train.vocab_size
    lost = batch.token_ids_BN[batch.is_masked_BN].tolist()
    want = -np.mean([math.log2((counts[word] + 1) / total) for word in lost])
    assert found["frequency_bits"] == pytest.approx(want, rel=1e-5)


def test_links_win_nothing_where_one_state_per_mask_leaves_one_path_of_the_right_length(
    corpora,
):
    config = replace(TEXT, objective="exlm", model=replace(SMALL, states_per_mask=1))
    found = measure(untrained(config, corpora["text"]), config, corpora["text"], num_rows=4)
    assert found["dependence_bits"] == pytest.approx(0, abs=1e-5)
    assert found["linked_bits"] < -0.1  # some probability goes to other lengths


def test_clones_that_hold_one_mood_each_capture_everything(corpora):
    corpus = corpora["pairs"]
    model = Moods(SMALL, corpus.train.vocab_size)
    model.encoder = Words(corpus.train.vocab_size)
    found = measure(model, PAIRS, corpus, num_rows=64)
    # Each mood occurs in about half of the rows.
    assert 1.9 < found["clones_used"] <= 2
    ones = {
        "bits_per_row", "joint_bits_per_row", "captured_bits", "linked_bits", "dependence_bits",
        "entropy_bits", "specialisation_bits", "cross_entropy_bits", "optimum_entropy_bits",
        "total_correlation_bits", "probe_accuracy",
    }  # fmt: skip
    assert found == close(
        **dict.fromkeys(ones, 1),
        lost_share=2 / 11,
        lost_per_row=2,
        bits_per_mask=0.5,
        floor_bits_per_row=2,
        accuracy=0.5,
        excess_bits=0,
        clones_used=found["clones_used"],
        frequency_bits=found["frequency_bits"],
    )


@pytest.mark.parametrize(
    ("objective", "model", "own"),
    [
        ("mlm", {}, set()),
        ("exlm", {}, {"clones_used", "dependence_bits", "specialisation_bits"}),
        ("exlm", {"transition": "ctc"}, {"specialisation_bits"}),
        ("exlm", {"sparse": True, "states_per_mask": 1}, {"clones_used", "dependence_bits"}),
    ],
)
def test_on_text_the_numbers_are_those_of_validation(corpora, objective, model, own):
    corpus = corpora["text"]
    config = replace(TEXT, objective=objective, model=replace(SMALL, **model))
    network = untrained(config, corpus)
    masker = make_masker(config, corpus.train.special_ids)
    want = evaluate(network, corpus.validation, masker, 16, Engine(torch.device("cpu")))
    found = measure(network, config, corpus, num_rows=16, seed=config.seed)
    assert found["lost_per_row"] == want.num_masks / want.num_rows
    assert found["bits_per_row"] == pytest.approx(want.bits_per_row, rel=1e-5)
    assert found["bits_per_mask"] == pytest.approx(want.bits_per_mask, rel=1e-5)
    assert found["accuracy"] == pytest.approx(want.mask_accuracy)
    others = {"lost_share", "entropy_bits", "cross_entropy_bits", "frequency_bits"}
    compared = {"lost_per_row", "bits_per_row", "bits_per_mask", "accuracy", "linked_bits"}
    assert set(found) == others | compared | own


def test_as_many_rows_are_read_as_hold_the_most_tokens(tmp_path, monkeypatch):
    config = replace(TOWN, data=DATA["smiles"])
    corpus = prepare_corpus(config.data, tmp_path, config.seed)
    model, lengths_R = untrained(config, corpus), corpus.validation.lengths_R
    assert lengths_R.min() < lengths_R.max()
    for limit, most, num_rows in (
        ("MOST_TOKENS", 5 * int(lengths_R.max()), 5),
        ("MOST_ROWS", 3, 3),
    ):
        monkeypatch.setattr(measures, limit, most)
        assert measure(model, config, corpus) == measure(model, config, corpus, num_rows)


def test_models_with_equal_masking_meet_the_same_masks(corpora):
    corpus = corpora["town"]
    found = [
        measure(untrained(config, corpus), config, corpus, num_rows=16, with_probe=False)
        for config in (TOWN, replace(TOWN, seed=7), replace(TOWN, objective="exlm"))
    ]
    for name in ("lost_share", "optimum_entropy_bits", "joint_bits_per_row"):
        assert len({one[name] for one in found}) == 1, name
    model = untrained(TOWN, corpus).train()
    assert measure(model, TOWN, corpus, num_rows=16, with_probe=False) == found[0]
    assert model.training
    assert found[0]["entropy_bits"] != found[1]["entropy_bits"]


@pytest.mark.parametrize("config", [PAIRS, replace(TOWN, objective="exlm")], ids=["one", "two"])
def test_bits_of_a_filling_are_held_against_its_own_true_bits(config, corpora):
    corpus, language = corpora[config.data.grammar], grammar(config.data.grammar)
    model, masker = untrained(config, corpus).eval(), make_masker(config, SpecialIds())
    found = measure(model, config, corpus, num_rows=65, seed=3, with_probe=False)
    bits = []
    batches = validation_batches(corpus.validation, replace(masker, seed=3), 65, 64)
    for number, batch in enumerate(batches):
        words_SN, is_masked_SN = ((part[:, 1:-1]).numpy() for part in batch[:0:-1])
        contexts = Contexts(language, words_SN - 6, is_masked_SN)
        for words_SN in contexts.sample(8, (3, number)):
            filled_BN = batch.token_ids_BN.clone()
            filled_BN[:, 1:-1] = torch.from_numpy(words_SN) + 6
            filled = batch._replace(token_ids_BN=filled_BN)
            excess_S = row_bits_and_correct(model, filled)[0].numpy()
            excess_S -= contexts.surprise_bits(words_SN)
            bits += (contexts.joint_bits_S + excess_S).tolist()
    assert len(bits) == 8 * 65
    assert found["bits_per_row"] == pytest.approx(np.mean(bits), rel=1e-5)


def test_costs_are_of_processor_time_and_of_operations_with_links(corpora, monkeypatch):
    def timed(calls, device, seconds):
        assert set(calls) == {"exlm", "mlm"} and device.type == "cpu"
        for call in calls.values():
            call()
        return {"exlm": Timing(50.0, 6.0, 1), "mlm": Timing(2.0, 4.0, 1)}

    monkeypatch.setattr(step, "time_side_by_side", timed)
    corpus, train = corpora["pairs"], replace(PAIRS.train, chain_warmup=0.25)
    found = step.step_costs(replace(PAIRS, train=train), corpus)
    flops = [
        row_flops(replace(PAIRS, objective=name), corpus.train.vocab_size, 13)
        for name in ("exlm", "mlm")
    ]
    floor = flops[0] / flops[1]
    assert found == close(cost_ratio=1.5, cost_ratio_floor=floor, step_ms=6, mlm_step_ms=4)


def test_a_model_that_grows_is_timed_when_it_has_grown(corpora):
    grows = replace(PAIRS, train=replace(PAIRS.train, grow_at=0.5))
    with step.trainers({"exlm": grows}, corpora["pairs"]) as both:
        assert isinstance(both["exlm"].model, ExLM)
