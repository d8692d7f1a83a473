"""Shares of sources are shares of tokens."""

import numpy as np

from exlm_mini.data.mixing import bucket_bound, wanted_tokens


def test_the_scarcest_source_is_used_whole():
    assert wanted_tokens([900, 400], [3, 1]) == [900, 300]
    assert wanted_tokens([900, 200], [3, 1]) == [600, 200]
    assert wanted_tokens([10, 10], [1, 1]) == [10, 10]


def test_a_bound_takes_the_first_buckets_that_are_enough():
    totals = np.array([2.0, 0, 3, 5, 0])
    assert [bucket_bound(totals, wanted) for wanted in (1, 2, 3, 5, 6, 10, 11)] == [
        1, 1, 3, 3, 4, 5, 5
    ]  # fmt: skip
