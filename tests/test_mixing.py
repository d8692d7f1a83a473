"""Fast cutting equals the plain one; shares are of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_mini.config import SpecialIds
from exlm_mini.data.mixing import Documents, bucket_bound, smiles_rows, text_rows, wanted_tokens
from exlm_mini.data.rows import Counts, block_rows, molecule_rows

SPECIAL = SpecialIds()
SHARDS = st.lists(
    st.lists(st.lists(st.integers(6, 999), min_size=1, max_size=30), max_size=8), min_size=1
)


def arrays(shards):
    for shard in shards:
        token_ids = np.array([token for d in shard for token in d], dtype=np.uint16)
        yield Documents(token_ids, np.array([len(d) for d in shard], dtype=np.int64))


def joined(rows):
    rows = list(rows)
    tokens = [token for part in rows for token in part.token_ids.tolist()]
    return tokens, [length for part in rows for length in part.lengths_R.tolist()]


@settings(max_examples=50)
@given(SHARDS, st.integers(3, 20))
@pytest.mark.parametrize(
    ("fast", "plain"), [(text_rows, block_rows), (smiles_rows, molecule_rows)]
)
def test_rows_of_shards_equal_rows_of_documents(fast, plain, shards, block_length):
    counts, want_counts = Counts(), Counts()
    documents = [document for shard in shards for document in shard]
    rows = joined(fast(arrays(shards), SPECIAL, block_length, counts))
    assert rows == joined(plain(documents, SPECIAL, block_length, want_counts))
    # block_rows counts what is behind the last block, of a chunk or of all
    assert counts == want_counts


def test_the_scarcest_source_is_used_whole():
    assert wanted_tokens([900, 400], [3, 1]) == [900, 300]
    assert wanted_tokens([900, 200], [3, 1]) == [600, 200]
    assert wanted_tokens([10, 10], [1, 1]) == [10, 10]


def test_a_bound_takes_the_first_buckets_that_are_enough():
    totals = np.array([2.0, 0, 3, 5, 0])
    assert [bucket_bound(totals, wanted) for wanted in (1, 2, 3, 5, 6, 10, 11)] == [
        1, 1, 3, 3, 4, 5, 5
    ]  # fmt: skip
