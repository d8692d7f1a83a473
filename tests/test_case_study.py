"""``book/case_study.py``: what the chapter on reading shows comes from two finished runs."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from exlm_mini import pretrain
from exlm_mini.alignment import posteriors
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.reading.decoding import read_states
from exlm_mini.reading.entropy import entropy_bits
from exlm_mini.reading.scene import read_scene, scene_from_json
from exlm_mini.reading.trained import encode_row, load

BOOK = Path(__file__).resolve().parents[1] / "book"
STORED = BOOK / "results" / "case-study.json"
sys.path.append(str(BOOK))
import case_study  # noqa: E402
import record  # noqa: E402

TINY = [
    *("--recipe", "toy-pairs", "--objective", "exlm", "--train.steps", "3"),
    *("--train.batch_size", "4", "--train.validation_rows", "8", "--train.save_every", "2"),
    *("--train.device", "cpu", "--train.num_threads", "1", "--data.num_sentences", "64"),
    *("--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"),
    *("--model.max_positions", "128"),
]
ADDED = {"quartets": {"text", "scene"}, "town": {"num_sentences", "state_entropy_bits"}}
GRAPH = ["--model.states_per_mask", "4", "--model.boundary", "paper"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both runs, three steps each."""
    directory = tmp_path_factory.mktemp("runs")
    for language in ADDED:
        argv = [*TINY, *GRAPH, "--data.grammar", language]
        assert pretrain.main([*argv, "--output", str(directory / language)]) == 0
    return [directory / language for language in ADDED]


def kept(target):
    return {r["config"]["data"]["grammar"]: r for r in json.loads(target.read_text())}


@pytest.fixture(scope="module")
def recorded(runs, tmp_path_factory):
    """The file that both runs become."""
    target = tmp_path_factory.mktemp("results") / "case-study.json"
    assert case_study.main([*map(str, runs), "--to", str(target)]) == 0
    return target


def test_each_record_is_the_ordinary_one_and_what_the_chapter_adds(runs, recorded):
    entries = kept(recorded)
    assert list(entries) == ["quartets", "town"]
    for run in runs:
        ordinary, entry = record.record_of(run), entries[run.name]
        assert {name: entry[name] for name in ordinary} == ordinary
        assert entry.keys() - ordinary.keys() == ADDED[run.name]


def test_the_scene_is_that_of_the_recorded_sentence(runs, recorded):
    entry = kept(recorded)["quartets"]
    loaded = load(runs[0])
    row_BN = encode_row(loaded, entry["text"])
    scene = read_scene(read_states(loaded.model, row_BN), loaded.tokenizer, row_BN)
    assert scene_from_json(entry["scene"]) == scene
    assert scene.labels[1:5] == ["1.1", "1.2", "1.3", "1.4"]
    assert " ".join(scene.text).split() == entry["text"].replace("[MASK]", "").split()


def test_the_entropies_are_means_over_sentences_of_the_language(runs, recorded):
    # Again, from row ids instead of text and with the posterior written out.
    entry = kept(recorded)["town"]
    loaded, language = load(runs[1]), grammar("town")
    special_ids = loaded.tokenizer.special_ids
    total_S = torch.zeros(len(language.slots), dtype=torch.float64)
    for word_ids_N in language.sample(entry["num_sentences"], seed=2):
        ids = [loaded.tokenizer.encode(language.words[w])[0] for w in word_ids_N]
        for slot in language.slots:
            ids[slot] = special_ids.mask
        row_BN = torch.tensor([[special_ids.bos, *ids, special_ids.eos]])
        reading = read_states(loaded.model, row_BN)
        log_E_LL = reading.graph.log_transition_LL.double()
        M, L = len(language.slots) + 2, len(log_E_LL)
        any_word_BML = torch.zeros(1, M, L, dtype=torch.float64)
        counts = torch.tensor([M]), torch.tensor([L])
        state_ML = posteriors(any_word_BML, log_E_LL[None], *counts).state_BML[0]
        total_S += state_ML[1:-1] @ entropy_bits(reading.states.log_token_LV.double())
    mean_S = total_S / entry["num_sentences"]
    assert entry["state_entropy_bits"] == pytest.approx(mean_S.tolist(), abs=5.1e-5)


def test_runs_that_are_swapped_or_unfinished_are_refused(runs, tmp_path, capsys):
    quartets, town = (shutil.copytree(run, tmp_path / run.name) for run in runs)
    target = tmp_path / "case-study.json"

    def refused(*runs):
        assert case_study.main([*map(str, runs), "--to", str(target)]) == 2
        return capsys.readouterr().err

    assert f"{town} was trained with data.grammar town, not quartets" in refused(town, quartets)
    (quartets / "checkpoints" / "step-000003" / "model.safetensors").write_bytes(b"")
    assert "last step 3, only of step 2" in refused(quartets, town)
    (town / "metrics.jsonl").write_text("")
    assert "step 0 of 3" in refused(quartets, town)
    assert not target.exists()


def test_the_stored_case_study_is_whole_and_made_by_a_commit():
    entries = kept(STORED)
    assert len(entries) == len(json.loads(STORED.read_text())) == 2
    for language, entry in entries.items():
        assert entry.keys() >= ADDED[language]
        assert len(entry["versions"]["commit"]) == 40  # and not "with changes"
    assert entries["quartets"]["text"] == case_study.SENTENCE
    assert len(entries["town"]["state_entropy_bits"]) == len(grammar("town").slots)
    assert entries["town"]["num_sentences"] == case_study.NUM_SENTENCES
