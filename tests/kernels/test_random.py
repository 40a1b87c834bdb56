"""Dropout's numbers are what their definition says, depend on nothing else, and look random in every direction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fleetune.kernels.random import (
    Dropout,
    as_int64,
    keep_mask,
    keep_masks,
    keep_scale,
    levels,
    mix64,
    row_keys,
    site_key,
    threshold,
)

Levels = NDArray[np.uint16]
M64, M32 = (1 << 64) - 1, (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15
SITE = site_key(42, 3, 2, 1)


def plain_mix64(z: int) -> int:
    z &= M64
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M64
    z ^= z >> 31
    return z


def plain_level(seed: int, step: int, layer: int, site: int, example: int, position: int, head: int, c: int) -> int:
    """The 16 bits of one element, from the text of the definition, with Python's integers only."""
    h = 0
    for v in (seed, step, layer, site):
        h = plain_mix64(h + v + GOLDEN)
    row = plain_mix64(plain_mix64(example + GOLDEN) + (position + 1) * GOLDEN)
    stream = plain_mix64((row ^ h) + head * GOLDEN)
    k1, k2 = stream & M32, stream >> 32
    b, i = c // 32, c % 32
    n = 16 * b + i % 16
    x = (n * 0x9E3779B9 + k1) & M32
    x ^= x >> 16
    x = x * 0x21F0AAAD & M32
    x ^= x >> 15
    x = (x + k2) & M32
    x = x * 0x735A2D97 & M32
    x ^= x >> 15
    return x & 0xFFFF if i < 16 else x >> 16


def keys_of(num_examples: int, length: int, first: int = 0) -> Tensor:
    examples, positions = torch.arange(first, first + num_examples), torch.arange(length)
    return row_keys(examples.repeat_interleave(length), positions.repeat(num_examples))


def correlation(a: Levels, b: Levels) -> float:
    """Correlation times the root of the count: of independent numbers, it is normal with deviation 1."""
    x, y = (v.ravel().astype(np.float64) - 32767.5 for v in (a, b))
    return float((x * y).mean() / (65536**2 / 12) * np.sqrt(x.size))


# The definition


@pytest.mark.parametrize(("seed", "step", "layer", "site"), [(0, 0, 0, 0), (42, 7, 11, 12), (2**31, 10**6, 3, 1)])
def test_equals_the_definition_in_plain_integers(seed: int, step: int, layer: int, site: int) -> None:
    examples, positions = [0, 1, 1, 2**40, 391_000], [0, 0, 511, 3, 77]
    keys = row_keys(torch.tensor(examples), torch.tensor(positions))
    for head in (0, 1, 11):
        found = levels(keys, site_key(seed, step, layer, site), 101, head)
        for r, (example, position) in enumerate(zip(examples, positions, strict=True)):
            for c in (0, 1, 15, 16, 17, 31, 32, 47, 48, 63, 64, 100):
                assert found[r, c] == plain_level(seed, step, layer, site, example, position, head, c)


def test_mix64_of_arrays_equals_that_of_integers() -> None:
    words = [0, 1, 2, GOLDEN, M64, 1 << 63]
    assert mix64(np.array(words, dtype=np.uint64)).tolist() == [plain_mix64(w) for w in words]
    assert [mix64(w) for w in words] == [plain_mix64(w) for w in words]
    assert mix64(-1) == mix64(M64)


def test_splitmix64_gives_its_published_sequence() -> None:
    """The first numbers of the generator seeded with 1234567, as in the tests of many of its implementations."""
    found = [mix64(1234567 + (i + 1) * GOLDEN) for i in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_signed_keys_have_the_same_bits() -> None:
    assert [as_int64(k) for k in (0, 1, (1 << 63) - 1, 1 << 63, M64)] == [0, 1, (1 << 63) - 1, -(1 << 63), -1]
    keys = keys_of(3, 4)
    for site in range(8):
        key = site_key(1, 2, 3, site)
        assert torch.equal(keep_mask(keys, key, 50, 0.5), keep_mask(keys, as_int64(key), 50, 0.5))


def test_mask_is_where_the_level_reaches_the_threshold() -> None:
    keys = keys_of(5, 7)
    found = keep_mask(keys, SITE, 70, 0.1, head=3)
    assert found.dtype == torch.bool
    assert torch.equal(found, torch.from_numpy(levels(keys, SITE, 70, 3) >= 6554))


def test_masks_of_all_heads_are_those_of_each() -> None:
    keys = keys_of(1, 9)
    found = keep_masks(keys, SITE, 9, 0.3, num_heads=5)
    assert torch.equal(found, torch.stack([keep_mask(keys, SITE, 9, 0.3, head) for head in range(5)]))


@pytest.mark.parametrize("rate", [0.0, 1e-9, 2**-17 - 1e-12])
def test_a_rate_below_its_smallest_step_keeps_everything(rate: float) -> None:
    assert threshold(rate) == 0
    assert keep_scale(rate) == 1.0
    assert keep_mask(keys_of(50, 20), SITE, 384, rate).all()


def test_the_scale_is_that_of_the_rounded_rate() -> None:
    assert threshold(0.1) == 6554
    assert keep_scale(0.1) == 65536 / (65536 - 6554)
    assert (threshold(0.5), keep_scale(0.5)) == (32768, 2.0)
    assert threshold(1 - 2**-16) == 65535


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), 1 - 2**-18])
def test_other_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        keep_mask(keys_of(1, 2), SITE, 3, rate)


def test_wrong_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        row_keys(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 example ids and 2 positions"):
        row_keys(torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


def test_arrays_serve_as_well_as_tensors() -> None:
    examples, positions = np.arange(20) // 5, np.arange(20) % 5
    assert torch.equal(row_keys(examples, positions), keys_of(4, 5))


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_has_an_empty_mask(num_rows: int, num_columns: int) -> None:
    assert keep_mask(keys_of(1, num_rows), SITE, num_columns, 0.1).shape == (num_rows, num_columns)


def test_no_dropout_is_the_default() -> None:
    assert (Dropout().rate, Dropout().row_keys) == (0.0, None)


# A pure function


def test_a_row_has_its_mask_in_any_order_and_company() -> None:
    keys = keys_of(40, 25)
    whole = keep_mask(keys, SITE, 384, 0.1)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_mask(keys[order], SITE, 384, 0.1), whole[order])
    assert torch.equal(keep_mask(keys[::7], SITE, 384, 0.1), whole[::7])
    assert torch.equal(keep_mask(keys[-1:], SITE, 384, 0.1), whole[-1:])
    assert torch.equal(keep_mask(keys_of(3, 25, first=17), SITE, 384, 0.1), whole[17 * 25 : 20 * 25])


@pytest.mark.parametrize("num_columns", [1, 15, 16, 17, 31, 32, 33, 100, 383])
def test_the_width_does_not_change_the_columns(num_columns: int) -> None:
    keys = keys_of(4, 25)
    assert torch.equal(keep_mask(keys, SITE, num_columns, 0.5), keep_mask(keys, SITE, 384, 0.5)[:, :num_columns])


def test_torch_and_numpy_generators_play_no_part() -> None:
    before = keep_mask(keys_of(2, 3), SITE, 40, 0.5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(before, keep_mask(keys_of(2, 3), SITE, 40, 0.5))
    assert torch.equal(state, torch.get_rng_state())


# Quality. Every statistic is of one fixed set of numbers: a test that passes once always passes.


@pytest.fixture(scope="module")
def sample() -> Levels:
    """10 million levels of a usual size: 1000 examples of 26 tokens, 384 wide."""
    return levels(keys_of(1000, 26), SITE, 384).reshape(1000, 26, 384)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_that_of_the_rate(sample: Levels, rate: float) -> None:
    found = sample.ravel()[:4_000_000] >= threshold(rate)
    share = 1 - threshold(rate) / 65536
    assert abs(found.mean() - share) < 4 * np.sqrt(share * (1 - share) / found.size)


def test_kept_elements_are_as_many_in_every_row_and_column(sample: Levels) -> None:
    """Neither too unequal nor too equal: sums over a line spread as those of independent draws."""
    kept, share = sample >= threshold(0.1), 1 - threshold(0.1) / 65536
    for axes in ((2,), (0, 1), (0, 2), (1, 2)):
        counts = kept.sum(axis=axes).ravel()
        draws = kept.size // counts.size
        statistic = ((counts - draws * share) ** 2 / (draws * share * (1 - share))).sum()
        assert 1e-4 < stats.chi2.sf(statistic, counts.size) < 1 - 1e-4, axes


@pytest.mark.parametrize("shift", [0, 8], ids=["low byte", "high byte"])
def test_values_are_uniform_over_256_bins(sample: Levels, shift: int) -> None:
    counts = np.bincount((sample.ravel() >> shift) & 0xFF, minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4


def test_every_value_of_16_bits_is_as_likely(sample: Levels) -> None:
    assert 1e-4 < stats.chisquare(np.bincount(sample.ravel(), minlength=65536)).pvalue < 1 - 1e-4


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 128])
def test_columns_are_uncorrelated(sample: Levels, distance: int) -> None:
    """Columns at a distance of 16 share a 32-bit number where they are its two halves."""
    assert abs(correlation(sample[..., :-distance], sample[..., distance:])) < 4


def test_the_two_halves_of_a_number_are_uncorrelated(sample: Levels) -> None:
    blocks = sample.reshape(-1, 2, 16)
    assert abs(correlation(blocks[:, 0], blocks[:, 1])) < 4


def test_positions_and_examples_are_uncorrelated(sample: Levels) -> None:
    for distance in (1, 2, 3, 16):
        assert abs(correlation(sample[:, :-distance], sample[:, distance:])) < 4
        assert abs(correlation(sample[:-distance], sample[distance:])) < 4
        assert abs(correlation(sample[:-distance, :-distance, :-distance], sample[distance:, distance:, distance:])) < 4


CHANGES: dict[str, Callable[[int], Levels]] = {
    "heads": lambda i: levels(keys_of(100, 26), SITE, 384, head=i),
    "layers": lambda i: levels(keys_of(100, 26), site_key(42, 3, i, 1), 384),
    "sites": lambda i: levels(keys_of(100, 26), site_key(42, 3, 2, i), 384),
    "steps": lambda i: levels(keys_of(100, 26), site_key(42, i, 2, 1), 384),
    "seeds": lambda i: levels(keys_of(100, 26), site_key(i, 3, 2, 1), 384),
    "far examples": lambda i: levels(keys_of(100, 26, first=i << 32), SITE, 384),
}


@pytest.mark.parametrize("what", CHANGES)
def test_neighbours_are_uncorrelated(what: str) -> None:
    """Their values, and, which correlation may not see, the masks that they give."""
    parts = [CHANGES[what](i) for i in (0, 1, 2, 3)]
    for i, j in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3)):
        assert abs(correlation(parts[i], parts[j])) < 4
        both, share = (parts[i] < 6554) & (parts[j] < 6554), (6554 / 65536) ** 2
        assert abs(both.mean() - share) < 4 * np.sqrt(share * (1 - share) / both.size)


def pairs(sample: Levels) -> dict[str, tuple[Levels, Levels]]:
    return {
        "columns": (sample[..., 0::2], sample[..., 1::2]),
        "halves": (sample.reshape(-1, 2, 16)[:, 0], sample.reshape(-1, 2, 16)[:, 1]),
        "positions": (sample[:, 0::2], sample[:, 1::2]),
        "examples": (sample[0::2], sample[1::2]),
        "heads": (CHANGES["heads"](0), CHANGES["heads"](1)),
        "steps": (CHANGES["steps"](0), CHANGES["steps"](1)),
        "sites": (CHANGES["sites"](0), CHANGES["sites"](1)),
    }


@pytest.mark.parametrize("what", ["columns", "halves", "positions", "examples", "heads", "steps", "sites"])
@pytest.mark.parametrize("shift", [0, 5, 10], ids=["low bits", "middle bits", "high bits"])
def test_pairs_are_uniform(sample: Levels, what: str, shift: int) -> None:
    """The serial test in two dimensions (Knuth, The Art of Computer Programming, 3.3.2): all pairs of 6 bits."""
    a, b = ((x.ravel() >> shift).astype(np.int64) & 63 for x in pairs(sample)[what])
    assert 1e-4 < stats.chisquare(np.bincount(a * 64 + b, minlength=4096)).pvalue < 1 - 1e-4


def inputs_with_a_flipped_bit(bit: int) -> dict[str, Levels]:
    flip = 1 << bit
    ids = torch.arange(200)
    none = torch.zeros_like(ids)
    return {
        "example": levels(row_keys(ids ^ flip, none), SITE, 64),
        "position": levels(row_keys(none, ids ^ flip), SITE, 64),
        "seed": levels(row_keys(ids, none), site_key(42 ^ flip, 3, 2, 1), 64),
        "step": levels(row_keys(ids, none), site_key(42, 3 ^ flip, 2, 1), 64),
        "layer": levels(row_keys(ids, none), site_key(42, 3, 2 ^ flip, 1), 64),
        "site": levels(row_keys(ids, none), site_key(42, 3, 2, 1 ^ flip), 64),
        "head": levels(row_keys(ids, none), SITE, 64, head=0 ^ flip),
    }


@pytest.mark.parametrize("bit", [0, 1, 5, 12, 31])
def test_one_bit_of_any_input_changes_half_of_the_bits(bit: int) -> None:
    """Avalanche: each of the 16 bits of a level changes with probability 1/2."""
    ids = torch.arange(200)
    none = torch.zeros_like(ids)
    before = levels(row_keys(ids, none), SITE, 64)
    by_position = levels(row_keys(none, ids), SITE, 64)
    for what, after in inputs_with_a_flipped_bit(bit).items():
        changed = (by_position if what == "position" else before) ^ after
        for place in range(16):
            share = ((changed >> place) & 1).mean()
            assert abs(share - 0.5) < 4.5 * 0.5 / np.sqrt(changed.size), (what, place)


def test_no_two_rows_of_a_run_share_a_mask() -> None:
    """12 layers of 13 sites, 2000 rows: of 312,000 masks of 384 columns, all differ."""
    keys = keys_of(40, 50)
    seen: set[bytes] = set()
    for layer in range(12):
        for site in range(13):
            kept = keep_mask(keys, site_key(42, 0, layer, site), 384, 0.1)
            packed = np.packbits(kept.numpy(), axis=1)
            seen.update(row.tobytes() for row in packed)
    assert len(seen) == 12 * 13 * 2000


def test_row_keys_of_a_large_data_set_differ() -> None:
    """A million tokens of examples and positions on a grid, where a weaker hash would meet itself."""
    keys = keys_of(2000, 512)
    assert len(torch.unique(keys)) == 2000 * 512
    assert len(torch.unique(keys & M32)) > 2000 * 512 * (1 - 2e-4)  # the birthday bound: 122 pairs are expected
