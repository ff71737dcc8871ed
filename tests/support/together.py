"""Results and their lse together, and what tests of keys in parts have in common."""

import numpy as np

import sdpa

from .accuracy import assert_same_bits, judge
from .draw import float32, inf, nan
from .options import ON_HEADS, options_for


def both(*arrays, **options):
    return sdpa.attention(*arrays, return_lse=True, **options)


def assert_both_same(actual, expected):
    for one, other in zip(actual, expected):
        assert_same_bits(one, other)


def check(*arrays, **options):
    judge(*both(*arrays, **options), *arrays, **options)


def check_with_more(query, key, value, **options):
    """And with all that is done to scores or sums of heads."""
    check(query, key, value, **options | options_for(query, key, *ON_HEADS))


def assert_hidden_is_as_nothing(query, key, value, where, **options):
    """Whatever stands in the hidden keys and values."""
    expected = both(query, key, value, **options)
    for poison in nan, inf, -inf:
        key[:, :, where] = value[:, :, where] = poison
        assert_both_same(both(query, key, value, **options), expected)


def masks_and_biases(keys, joint, last_joint, some_rows, one_key):
    """Of whole parts of the keys, of which the first ends at `joint` and the last begins at `last_joint`."""
    first = np.arange(keys) < joint
    return {
        "mask of the first part": dict(mask=first),
        "mask of the last part": dict(mask=np.arange(keys) >= last_joint),
        "mask of another part for each row": dict(mask=first == some_rows),
        "mask of one part for some rows, of none for others": dict(mask=first & some_rows),
        "mask of one key": dict(mask=np.arange(keys) == one_key),
        "mask of nothing": dict(mask=np.zeros(keys, bool)),
        "bias that hides a part": dict(bias=np.where(first, -inf, 0.5).astype(float32)),
        "bias that favours a part": dict(bias=np.where(first, 80.0, -80.0).astype(float32)),
        "bias that underflows": dict(bias=np.where(first, 0, -1e30).astype(float32)),
    }
