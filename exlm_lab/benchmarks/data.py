"""How fast one process on one core turns a pack into masked batches.

Shapes: R rows of a pack, B rows of a batch, N tokens of a row.

The packs are random tokens in a temporary directory, of the size of real ones: their rows lie in
the page cache, as those of a real pack do after the first epoch where memory allows.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exlm_lab.benchmarks.measure import ENOUGH_SECONDS, MOST_RUNS, threads, time_call
from exlm_mini.config import MaskingConfig, SpecialIds, UserError
from exlm_mini.data.batches import TokenBatches, TrainingBatches
from exlm_mini.data.masking import Masker
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Rows

NUM_TOKENS = 100_000_000
"""Of each pack: more than a processor's caches hold."""
TEXT_ROW = 128
TEXT_ROWS = 34_000_000
"""Wikipedia and BookCorpus in rows of ``TEXT_ROW`` tokens, nearly."""
MOLECULE_ROWS = 20_700_000
"""Molecules of ZINC, nearly."""
ROW_BYTES = 40
"""Of memory for a row in the order of an epoch: its length, its place, and both sorted."""
MOLECULE_LENGTHS = (
    11, 15, 17, 19, 21, 23, 24, 25, 27, 28, 30, 31, 33, 35, 37, 40, 43, 47, 54, 69,
)  # fmt: skip
"""Tokens of the embedded molecules with [BOS] and [EOS], at the shares 0.025, 0.075, ... 0.975:
drawn with equal chances they stand for all."""
TEXT_VOCABULARY = 50265
MOLECULE_VOCABULARY = 85
"""That of the embedded molecules."""
BATCH_SHAPES = ((64, 128), (32, 512), (64, 512))
"""Rows and tokens of a row."""
MOLECULE_BATCH = 256
"""Rows."""
BATCH_TOKENS = 16_000
"""Of a batch that is counted in tokens, as in the recipe smiles-base."""
MASKERS = {
    "fixed_count": (MaskingConfig(0.15), 1),
    "bernoulli": (MaskingConfig(0.15, "bernoulli"), 1),
    "repeated": (MaskingConfig(0.622, "bernoulli"), 4),  # Figure 4
}
"""Settings and copies."""
CALLS_PER_RUN = 20
"""One batch is too short to be timed by itself."""
CHUNK = 1 << 20
"""Tokens made at a time."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Reading:
    """How long one step of the way from the disk to a batch takes; a JSON object when printed."""

    part: str
    """reading, masking, batch (order, reading and masking) or epoch (the order of all rows)."""
    name: str
    """What is done to which rows."""
    num_rows: float
    """Done at a time, in the mean."""
    num_tokens: float
    """The same in tokens, before copies are made and without padding."""
    median_ms: float
    """Wall clock."""
    median_cpu_ms: float
    """Processor time of the one thread there is."""
    runs: int

    @property
    def tokens_per_second(self) -> float:
        """By the wall clock."""
        return 1000 * self.num_tokens / self.median_ms

    @property
    def tokens_per_cpu_second(self) -> float:
        """By processor time, which does not count what other programs take."""
        return 1000 * self.num_tokens / self.median_cpu_ms

    def as_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """The fields, both speeds and the machine from ``provenance.machine``."""
        return {
            "benchmark": "data",
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_cpu_second": self.tokens_per_cpu_second,
            "threads": 1,
            "machine": machine,
        }


class Lengths:
    """A pack of which nothing but the lengths of the rows is asked for."""

    def __init__(self, lengths_R: np.ndarray) -> None:
        self.lengths_R = lengths_R

    def __len__(self) -> int:
        return len(self.lengths_R)


def made_pack(
    directory: Path,
    num_tokens: int,
    row_length: int | None,
    vocab_size: int,
    longest: int | None = None,
    seed: int = 0,
) -> Pack:
    """Random ordinary tokens between [BOS] and [EOS], written and opened like any pack.

    Args:
        directory: where to, as ``made.json``.
        num_tokens: of the pack, about; at least one row is made.
        row_length: of every row; none: rows of ``MOLECULE_LENGTHS``, at random.
        vocab_size: V, special tokens included.
        longest: rows are cut to it; none: they are not.
        seed: of tokens and lengths.

    Raises:
        UserError: if the disk is full.
        ValueError: if the vocabulary has no ordinary token.
    """
    special_ids = SpecialIds()
    if vocab_size <= len(special_ids):
        raise ValueError(f"a vocabulary of {vocab_size} has no ordinary token")
    rng = np.random.default_rng(seed)

    def rows() -> Iterator[Rows]:
        left = num_tokens
        mean = row_length or sum(MOLECULE_LENGTHS) / len(MOLECULE_LENGTHS)
        while left == num_tokens or left > 0:
            num_rows = max(1, round(min(left, CHUNK) / mean))
            lengths_R = np.full(num_rows, row_length or 0)
            if row_length is None:
                lengths_R = rng.choice(MOLECULE_LENGTHS, num_rows).clip(max=longest)
            token_ids = rng.integers(len(special_ids), vocab_size, lengths_R.sum())
            ends = np.cumsum(lengths_R)
            token_ids[ends - lengths_R], token_ids[ends - 1] = special_ids.bos, special_ids.eos
            left -= len(token_ids)
            yield Rows(token_ids, lengths_R)

    path = directory / "made.json"
    write_pack(
        path,
        rows(),
        row_length=row_length,
        vocab_size=vocab_size,
        special_ids=special_ids,
        tokenizer_sha256="none",
        source="random tokens",
        counts=Counts(),
    )
    return Pack.open(path)


def readings(
    num_tokens: int = NUM_TOKENS, seconds: float = ENOUGH_SECONDS
) -> Iterator[Reading]:
    """Reading, masking and whole batches, of text and of molecules.

    Args:
        num_tokens: of each pack.
        seconds: see ``measure.time_call``; for each of them.

    Raises:
        UserError: if a pack would be too small for its batches, or the disk is full.
    """
    least = 2 * max(B * N for B, N in BATCH_SHAPES)
    if num_tokens < least:
        raise UserError(f"packs of {num_tokens:,} tokens are too small; ask for {least:,}")
    with threads(1):
        for row_length in dict.fromkeys(N for _, N in BATCH_SHAPES):
            with tempfile.TemporaryDirectory() as folder:
                pack = made_pack(Path(folder), num_tokens, row_length, TEXT_VOCABULARY)
                for B, N in BATCH_SHAPES:
                    if row_length == N:
                        yield from _of_pack(pack, B, f"{B} x {N}", seconds)
                yield _token_batches(pack, f"text of {row_length}", seconds)
        with tempfile.TemporaryDirectory() as folder:
            pack = made_pack(Path(folder), num_tokens, None, MOLECULE_VOCABULARY)
            yield from _of_pack(pack, MOLECULE_BATCH, f"{MOLECULE_BATCH} molecules", seconds)
            yield _token_batches(pack, "molecules", seconds)


def epochs(text_rows: int = TEXT_ROWS, molecule_rows: int = MOLECULE_ROWS) -> Iterator[Reading]:
    """The order of all rows, which the first batch of each epoch has to wait for.

    Args:
        text_rows, molecule_rows: of an epoch.
    """
    with threads(1):
        text = Lengths(np.broadcast_to(np.int64(TEXT_ROW), (text_rows,)))
        yield _epoch(f"rows of {TEXT_ROW}", text, TrainingBatches(text, None, 64, seed=0))
        rng = np.random.default_rng(0)
        molecules = Lengths(rng.choice(MOLECULE_LENGTHS, molecule_rows))
        by_rows = TrainingBatches(molecules, None, MOLECULE_BATCH, seed=0)
        yield _epoch("molecules", molecules, by_rows)
        by_tokens = TokenBatches(molecules, None, BATCH_TOKENS, num_parts=1, seed=0)
        yield _epoch(f"molecules, batches of {BATCH_TOKENS} tokens", molecules, by_tokens)


def _of_pack(pack: Pack, num_rows: int, shape: str, seconds: float) -> Iterator[Reading]:
    """Random rows, their masks, and both together in the order of training."""
    rng = np.random.default_rng(0)
    # Enough for all runs, so that no row is in the caches because it was read a moment ago.
    num_batches = CALLS_PER_RUN * (MOST_RUNS + 1)
    drawn = itertools.cycle(rng.integers(len(pack), size=(num_batches, num_rows)))
    sizes = (num_rows, num_rows * pack.num_tokens / len(pack))
    yield _timed("reading", shape, sizes, lambda: pack.gather(next(drawn)), seconds)
    row_B = rng.integers(len(pack), size=num_rows)
    for name in MASKERS:
        yield _masking(pack, row_B, name, shape, seconds)
    batches = TrainingBatches(pack, _masker(pack), num_rows, seed=0)
    steps = itertools.count()
    yield _timed("batch", shape, sizes, lambda: batches.batch(next(steps)), seconds)


def _masking(pack: Pack, row_B: np.ndarray, name: str, shape: str, seconds: float) -> Reading:
    masker = _masker(pack, name)
    token_ids_BN, lengths_B = pack.gather(row_B)
    epoch_B, steps = np.zeros_like(row_B), itertools.count()
    return _timed(
        "masking",
        f"{shape}, {name}",
        (len(row_B), int(lengths_B.sum())),
        lambda: masker(token_ids_BN, epoch_B, row_B, next(steps)),
        seconds,
    )


def _token_batches(pack: Pack, rows: str, seconds: float) -> Reading:
    """Batches of ``BATCH_TOKENS`` tokens, padding counted."""
    batches = TokenBatches(pack, _masker(pack), BATCH_TOKENS, num_parts=1, seed=0)
    num_batches = len(batches.starts) - 1
    sizes = (len(pack) / num_batches, pack.num_tokens / num_batches)
    steps = itertools.count()
    name = f"{BATCH_TOKENS} tokens, {rows}"
    return _timed("batch", name, sizes, lambda: batches.parts(next(steps)), seconds)


def _masker(pack: Pack, name: str = "fixed_count") -> Masker:
    masking, num_copies = MASKERS[name]
    return Masker(masking, pack.special_ids, seed=0, num_copies=num_copies)


def _epoch(name: str, pack: Lengths, batches: TrainingBatches | TokenBatches) -> Reading:
    if isinstance(batches, TrainingBatches):
        firsts = (-(-epoch * len(pack) // batches.batch_size) for epoch in itertools.count())
    else:
        firsts = (epoch * (len(batches.starts) - 1) for epoch in itertools.count())
    sizes = (len(pack), int(pack.lengths_R.sum()))
    return _timed("epoch", name, sizes, lambda: batches.rows(next(firsts)), calls=1)


def _timed(
    part: str,
    name: str,
    sizes: tuple[float, float],
    call: Callable[[], Any],
    seconds: float = ENOUGH_SECONDS,
    calls: int = CALLS_PER_RUN,
) -> Reading:
    """Medians of one call, timed ``calls`` at a time; the order of an epoch is not run before."""

    def run() -> None:
        for _ in range(calls):
            call()

    timing = time_call(run, CPU, seconds, is_warm=calls == 1)
    return Reading(
        part,
        name,
        *sizes,
        timing.median_ms / calls,
        timing.median_cpu_ms / calls,
        len(timing.wall_ms),
    )
