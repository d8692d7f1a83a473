"""The text that a finished run suggests to try its model on."""

import re

import pytest

from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.pretrain import parse
from exlm_mini.reading.summary import masked_example


class Row:
    """A pack of one row of another pack."""

    def __init__(self, pack, row):
        self.tokenizer, self.row = pack.tokenizer, pack.gather([row])

    def gather(self, rows):
        return self.row


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Examples of 20 held-out rows of a recipe, by its name and further options."""

    def make(recipe, *more):
        config = parse(["--recipe", recipe, *more]).config
        corpus = prepare_corpus(config.data, tmp_path_factory.mktemp("data"), seed=0)
        rows = [Row(corpus.validation, row) for row in range(20)]
        return [masked_example(config, corpus._replace(validation=row)) for row in rows]

    return make


def test_no_part_of_a_word_is_hidden(examples):
    for text in examples("text-tiny"):
        assert "[MASK]" in text and not re.search(r"\w\[MASK\]|\[MASK\]\w", text), text


@pytest.mark.parametrize(("strategy", "hidden"), [("fixed_count", 1), ("spans", 3)])
def test_molecules_hide_as_many_symbols_as_the_run_did_at_once(examples, strategy, hidden):
    for smiles in examples("smiles-tiny", "--masking.strategy", strategy):
        assert "[MASK]" * hidden in smiles and smiles.count("[MASK]") == hidden


def test_a_toy_sentence_hides_its_slots(examples):
    assert all(text.count("[MASK]") == 2 for text in examples("toy-pairs"))
