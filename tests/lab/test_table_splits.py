"""Splitting a table by scaffold, at random, by a column or by files, and notes on the parts."""

import json

import numpy as np
import pandas
import pytest
from own_tables import SMILES, asked, frame_of, load
from refusals import told

from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.settings import ReadingConfig

pytest.importorskip("rdkit", reason="rdkit is not installed")


def texts(part):
    return [text for (text,) in part.texts]


def test_a_column_splits_by_its_words():
    words = ["Train"] * 20 + ["valid"] * 8 + ["TEST"] * 12
    _, splits = load(frame_of(x=[0, 1] * 20, Set=words), asked("x"), split="set")
    assert [texts(part) for part in splits[:3]] == [SMILES[:20], SMILES[20:28], SMILES[28:]]
    told(lambda: load(frame_of(x=[0, 1] * 20, Set="mine"), asked("x"), "Set"), "holds 'mine'")
    told(lambda: load(frame_of(x=[0, 1] * 20), asked("x"), "scafold"), "did you mean scaffold?")


def test_given_files_are_the_parts_and_validation_is_held_out_where_none_is():
    frame, test = frame_of(x=[0, 1] * 20), frame_of(x=[1, 0] * 20)[:6]
    told(lambda: load(frame, asked("x"), test=test), "the test rows", "--data.split random")
    _, splits = load(frame, asked("x"), split=None, test=test)
    assert texts(splits.test) == SMILES[:6] and splits.notes["split"] == "files"
    assert splits.notes["validation"] == "at random from the training rows"
    assert splits.notes["also_in_train"]["test"] == len({*SMILES[:6]} & {*texts(splits.train)})
    assert len(splits.validation.texts) == 4
    assert sorted(texts(splits.train) + texts(splits.validation)) == sorted(SMILES)


def test_rows_of_several_files_are_named_by_file_and_row_in_it():
    def load(test):
        parts, files = (
            {"train": frame_of(x=[0, 1] * 20), "test": test},
            {"train": "a", "test": "b"},
        )
        task = asked("x", kind="numbers")
        return load_table("a", parts, task, ReadingConfig(), files=files)

    bad = frame_of(x=[1, 0] * 20).assign(SMILES=["C1CC(", *SMILES[1:]])
    (note,) = load(bad)[1].notes["rejected"]
    assert (note["table"], note["row"]) == ("b", 0) and "C1CC(" in note["why"]
    told(lambda: load(bad.rename(columns={"x": "y"})), "b has no column 'x'", "SMILES, y")
    told(lambda: load(frame_of(x="no")), "b row 0 (from 0): 'x' is 'no'")


def test_without_a_word_molecules_are_split_by_scaffolds_and_text_at_random():
    _, splits = load(frame_of(x=[0, 1] * 20), asked("x"), split=None)
    *learnt, tested = ({t.lstrip("C") * ("1" in t) for t in texts(part)} for part in splits[:3])
    assert splits.notes["split"] == "scaffold" and splits.notes["scaffolds"] == 3
    assert tested and tested.isdisjoint(set.union(*learnt))
    _, splits = load(frame_of(x=[0, 1] * 20), asked("x", input="text"), split=None)
    assert splits.notes["split"] == "random" and splits.notes["sizes"] == [32, 4, 4]
    json.dumps(splits.notes)


def test_a_scaffold_that_most_molecules_share_is_told():
    of_one = pandas.DataFrame({"SMILES": ["C" * n for n in range(1, 41)], "x": [0, 1] * 20})
    told(
        lambda: load(of_one, asked("x"), None), "have the same scaffold", "--data.split random"
    )
    _, splits = load(of_one, asked("x"))
    assert splits.notes["sizes"] == [32, 4, 4]
    told(
        lambda: load(of_one, asked("x", input="text"), "scaffold"), "scaffold is for molecules"
    )


def test_molecules_are_the_same_in_any_spelling_and_pairs_in_any_order():
    rows = {"a": SMILES, "b": "CCO", "x": [0, 1] * 20}
    turned = pandas.DataFrame({"a": "OCC", "b": SMILES, "x": [0, 1] * 20})
    task, frame = asked("x", columns=("a", "b")), pandas.DataFrame(rows)
    _, splits = load(frame, task, split=None, test=turned)
    assert splits.notes["also_in_train"]["test"] == len(splits.train.texts) < 40
    _, splits = load(frame, task._replace(input="text"), split=None, test=turned)
    assert "also_in_train" not in splits.notes


def test_a_part_without_rows_is_refused():
    frame, none = frame_of(x=range(40)), frame_of(x=range(40))[:0]
    told(lambda: load(frame[:2], asked("x")), "the train part", "is empty", "2 rows")
    told(lambda: load(none, asked("x")), "0 rows")
    told(lambda: load(frame, asked("x"), None, validation=none), "the validation part")
    told(lambda: load(frame.assign(SMILES=7), asked("x")), "no row", "row 0", "it is not text")


def test_rows_are_held_out_by_the_seed_of_the_split():
    frame, held_out = frame_of(pIC50=np.arange(40.0)), []
    for seed in (0, 1):
        for rule, more in (("random", {}), (None, {"test": frame})):
            parts, how = {"train": frame, **more}, ReadingConfig(split=rule, split_seed=seed)
            _, splits = load_table("mine.csv", parts, asked("pIC50"), how)
            held_out.append(splits.validation.texts)
    assert held_out[0] != held_out[2] and held_out[1] != held_out[3]
