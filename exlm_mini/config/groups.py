"""The groups of a run's settings: one frozen dataclass for each prefix on the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from exlm_mini.config.checks import (
    RARE,
    Below1,
    Between,
    Count,
    Effect,
    Natural,
    NotNegative,
    Positive,
    Share,
    Threads,
    UserError,
    settings,
)

SPECIAL_TOKENS = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "[SEP]", "[MASK]")


class SpecialIds(NamedTuple):
    """Vocabulary ids of the special tokens, in the order of ``SPECIAL_TOKENS``."""

    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    sep: int = 4
    mask: int = 5


class EncoderShape(NamedTuple):
    """Size of a Transformer encoder."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int


ENCODER_PRESETS = {
    "tiny": EncoderShape(2, 64, 256, 4),
    "mini": EncoderShape(4, 128, 512, 4),
    "base": EncoderShape(12, 768, 3072, 12),  # Tables 5 and 10
    "large": EncoderShape(24, 1024, 4096, 16),  # Table 10
    "molecular": EncoderShape(9, 768, 2048, 12),  # Table 7
}


@settings("model.")
class ModelConfig:
    """Architecture of the model (§4.2, Tables 5, 7 and 10)."""

    preset: Literal["tiny", "mini", "base", "large", "molecular"] = "tiny"
    """Size of the encoder; num_layers, width and others override its numbers."""
    num_layers: Annotated[Count | None, Field(le=1000), RARE] = None
    """Number of Transformer layers; if not set, the preset's."""
    width: Annotated[Count | None, RARE] = None
    """Hidden size D; if not set, the preset's."""
    ffn_width: Annotated[Count | None, RARE] = None
    """Feed-forward size; if not set, the preset's."""
    num_heads: Annotated[Count | None, RARE] = None
    """Number of attention heads; if not set, the preset's."""
    vocab_size: Annotated[Count | None, RARE] = None
    """Vocabulary size V; if not set, the tokenizer's. Set it for --dry-run only."""
    max_positions: Annotated[Count, RARE] = 512
    """Longest row that the model can read, in tokens after expansion or repetition."""
    dropout: Below1 = 0.1
    """Dropout probability after the embedding and each sublayer."""
    attention_dropout: Annotated[Below1, RARE] = 0.1
    """Dropout probability on the attention probabilities."""
    activation_dropout: Annotated[Below1, RARE] = 0.0
    """Dropout probability after the feed-forward activation."""
    states_per_mask: Count = 4
    """Hidden states per [MASK], k in §4."""
    boundary: Annotated[Literal["official", "paper"], RARE] = "official"
    """States of [BOS] and [EOS]. official: k scored states each; paper: one unscored state each."""
    transition: Literal["gated", "paper", "ctc", "uniform", "spans", "chains"] = "gated"
    """Edges between states. gated: as released; paper: as in §4.2; ctc, uniform: none; spans,
    chains: learned or fixed edges within spans of adjacent masks."""
    use_position: Annotated[bool, RARE] = True
    """gated and spans only: edges depend on learned positions too, as in the released code."""
    chain_bonus: Annotated[NotNegative, RARE] = 6.0
    """spans only: bonus, in nats, for the edge to the next mask's clone of the same number."""
    sparse: Annotated[bool, RARE] = False
    """Forbid edges between the states of one mask (Appendix Q.3)."""
    clone_embedding_std: Annotated[NotNegative, RARE] = 0.0
    """Initial standard deviation of a learned vector per clone, which is added to the states and,
    if expand_at is above 0, to the copies made there. 0, as in the paper: no such vector."""
    expand_at: Annotated[Natural, RARE] = 0
    """exlm only: number of lower layers that see the row before expansion, with one token per mask,
    whose state is then copied to all clones of the mask. 0, as in the paper: no such layer."""
    rope: Literal["2d", "1d"] = "2d"
    """Rotary embedding of the token and clone index, or only of the expanded position (Table 2)."""
    emission: Annotated[Literal["buffer", "chunked"], RARE] = "buffer"
    """Keep one buffer of states x V, or recompute it chunk by chunk in the backward pass."""
    emission_chunk: Annotated[Count, RARE] = 1024
    """chunked only: states per chunk."""
    init_std: Annotated[Positive, RARE] = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.sparse and self.transition not in ("gated", "paper"):
            raise UserError(
                f"model.sparse cannot be used with model.transition {self.transition}, which has "
                "no edges inside a mask; drop one of the two"
            )
        shape = self.shape
        if self.expand_at >= shape.num_layers:
            raise UserError(
                f"model.expand_at is {self.expand_at}; it must be below model.num_layers "
                f"{shape.num_layers}, so that a layer above can tell the clones apart"
            )
        # 2D RoPE splits each head into two halves and rotates each half in pairs.
        if shape.width % (4 * shape.num_heads):
            raise UserError(
                f"model.width {shape.width} divided by model.num_heads {shape.num_heads} must give "
                "a head size that is a multiple of 4, for 2D RoPE"
            )

    @property
    def shape(self) -> EncoderShape:
        """The preset, with the numbers that override it."""
        preset = ENCODER_PRESETS[self.preset]
        own = (self.num_layers, self.width, self.ffn_width, self.num_heads)
        return EncoderShape(*(p if o is None else o for p, o in zip(preset, own, strict=True)))


@settings("masking.")
class MaskingConfig:
    """Which tokens are hidden (§2, §3.1)."""

    mask_ratio: Between = 0.15
    """Share of the tokens to mask, p in the paper."""
    strategy: Literal["fixed_count", "spans", "units", "bernoulli", "slots"] = "fixed_count"
    """How masks are drawn. fixed_count, spans, units: a fixed number of tokens, singly, in spans or
    in units (branches, rings, words, names); bernoulli: independently, as always in repeated-mlm
    (§3); slots: the slots of a toy language."""
    num_copies: Annotated[Count, RARE] = 2
    """repeated-mlm only: copies of each token, k in §3."""
    span_length: Annotated[Count, RARE] = 3
    """spans only: number of tokens in a span."""
    span_law: Annotated[Literal["fixed", "geometric"], RARE] = "fixed"
    """spans only: length of a span. fixed: span_length; geometric: drawn from SpanBERT's geometric
    distribution with span_length as its mean, cut off at twice that."""


def _words(value: Any) -> Any:
    """Accept a single string in place of a list of one."""
    return (value,) if isinstance(value, str) else value


@settings("data.")
class DataConfig:
    """Where the text comes from and how it is cut into rows."""

    kind: Literal["toy", "text", "smiles"] = "text"
    """Kind of data: a small language with known entropies, text, or molecules."""
    source: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    """Files (.txt .smi .csv .tsv .jsonl .parquet, also .gz .xz, and Uni-Mol's .lmdb), a data set
    that prepare --help lists, or hub:ID,CONFIG,SPLIT for one on the Hugging Face hub; if not set,
    the embedded data."""
    column: str | None = None
    """Column of a table or hub data set, ignoring case; if not set, the column text or smiles."""
    max_documents: Annotated[Count | None, Field(ge=2), RARE] = None
    """Read at most this many documents of each data set; consecutive files count as one set."""
    pack: str | None = None
    """A prepared corpus to use instead of data.source."""
    tokenizer: Annotated[str | None, RARE] = None
    """A tokenizer.json to use; if not set, one is trained on the training documents."""
    vocab_size: Annotated[Count, Field(le=2**22)] = 4000
    """Vocabulary size of the tokenizer to train, special tokens included."""
    block_length: Annotated[Count, Field(ge=3)] = 128
    """Tokens per row, [BOS] and [EOS] included; for molecules, the longest row that is kept."""
    validation_share: Annotated[Between, RARE] = 0.05
    """Share of the documents to hold out for validation."""
    max_unknown: Annotated[Share, RARE] = 0.001
    """Stop if a larger share of the tokens is [UNK]."""
    max_rejected: Annotated[Share, RARE] = 0.01
    """smiles only: stop if RDKit rejects a larger share of the lines."""
    grammar: str = "pairs"
    """toy only: name of the grammar."""
    num_sentences: Annotated[Count, RARE] = 65536
    """toy only: number of training sentences to draw."""

    def __post_init__(self) -> None:
        if self.kind == "toy" and (self.source or self.tokenizer):
            raise UserError(
                "data.source or data.tokenizer is set, but data.kind toy draws its own sentences; "
                "drop it, or use a recipe for text or smiles"
            )


@settings("train.")
class TrainConfig:
    """Optimisation and bookkeeping."""

    steps: Count = 1000
    """Number of optimiser steps."""
    batch_size: Count = 32
    """Rows per optimiser step."""
    micro_batch_size: Count | None = None
    """Rows per forward pass; if not set, the whole batch."""
    batch_tokens: Annotated[Count | None, RARE] = None
    """Most tokens per optimiser step, in place of batch_size rows. They are counted as rows times
    the longest of them, before expansion (Table 7)."""
    micro_batch_tokens: Annotated[Count | None, RARE] = None
    """With batch_tokens: most tokens per forward pass; if not set, the whole batch."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    warmup_steps: Natural = 100
    """Steps in which the rate rises linearly from 0; it then falls linearly to 0 at the end."""
    decay_from: Annotated[Below1, RARE] = 0.0
    """Share of the steps after which the learning rate falls; until then it stays at its peak. 0,
    as in the paper: it falls right after the warm-up."""
    adam_betas: Annotated[tuple[Below1, Below1], RARE] = (0.9, 0.98)
    """Decay rates of Adam's running means of the gradient and of its square."""
    adam_eps: Annotated[Positive, RARE] = 1e-6
    """Adam's epsilon, added to the root of the mean square."""
    weight_decay: Annotated[NotNegative, RARE] = 0.01
    """Decoupled weight decay on every parameter, as in fairseq."""
    clip_norm: Annotated[NotNegative, RARE] = 0.0
    """Norm to which larger gradients are clipped; 0: no clipping."""
    grow_at: Annotated[Below1, RARE] = 0.0
    """exlm only: share of the steps trained as an MLM, before each mask splits into its states.
    Weights and schedule continue, the optimiser warms up again. 0, as in the paper: none."""
    start_from: Annotated[str | None, RARE] = None
    """Start at step 0 from the weights of another run, given as its directory or one of its
    checkpoints. It must have the same objective or be an MLM, which may grow into an ExLM."""
    chain_warmup: Annotated[Share, Field(le=0.5), RARE] = 0.0
    """exlm only: share of the steps, from grow_at on, with fixed parallel chains as edges. The
    chains then fade out over an equal share of the steps. 0, as in the paper: no chains."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; normalisations, the transition matrix and the dynamic programme
    stay in fp32. auto: bf16 on a GPU that supports it, otherwise fp32."""
    max_skipped: Annotated[Count, Effect.COURSE, RARE] = 10
    """Stop after this many steps in a row with a non-finite loss or gradient; each is skipped."""
    compile: Annotated[bool, RARE] = False
    """Compile the encoder's layers, and nothing else, with torch.compile."""
    save_every: Annotated[Count, Effect.NOTHING, RARE] = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[Natural, Effect.NOTHING, RARE] = 3
    """Number of newest checkpoints to keep; 0: all."""
    log_every: Annotated[Count, Effect.NOTHING, RARE] = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: Annotated[bool, Effect.NOTHING, RARE] = False
    """Also write the numbers of metrics.jsonl to OUTPUT/tensorboard, for TensorBoard."""
    validate_every: Annotated[Count, Effect.COURSE] = 200
    """Steps between validations; the last step is always validated."""
    validation_rows: Annotated[Count, Effect.COURSE, RARE] = 512
    """Held-out rows per validation, evenly spread over all of them."""
    num_threads: Annotated[Threads | None, Effect.COURSE] = None
    """CPU threads; if not set, PyTorch's choice."""
    device: Annotated[str, Effect.NOTHING] = "auto"
    """Device to train on: auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if self.grow_at and self.start_from is not None:
            raise UserError(
                f"train.grow_at {self.grow_at:g} first trains an MLM, but train.start_from "
                f"{self.start_from} is already a trained one; drop one of the two"
            )
        if self.grow_at and self.grow_at + 2 * self.chain_warmup > 1:
            raise UserError(
                f"train.grow_at {self.grow_at:g} leaves the fixed chains (train.chain_warmup "
                f"{self.chain_warmup:g}) no time to fade out; lower one of the two"
            )
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise UserError(
                f"train.micro_batch_size {self.micro_batch_size} must divide train.batch_size "
                f"{self.batch_size}"
            )
        micro, whole = self.micro_batch_tokens, self.batch_tokens
        if micro is not None and whole is None:
            raise UserError(
                f"train.micro_batch_tokens is {micro}, but batches are counted in rows; set "
                "train.batch_tokens too, or use train.micro_batch_size"
            )
        rows = self.batch_size, self.micro_batch_size
        if whole is not None and rows != (TrainConfig.batch_size, None):
            raise UserError(
                f"train.batch_size {rows[0]} and train.micro_batch_size {rows[1]} count rows, but "
                f"train.batch_tokens {whole} counts tokens; drop one (--train.batch_tokens null)"
            )
        if micro is not None and whole is not None and whole % micro:
            raise UserError(
                f"train.micro_batch_tokens {micro} must divide train.batch_tokens {whole}"
            )

    def rate(self, step: int, grown_at: int = 0) -> float:
        """Learning rate of a step, counted from 0.

        It warms up linearly, stays at its peak until ``decay_from``, and decays linearly to 0 after
        the last step (polynomial decay, power 1). Adam's moments are reset when an MLM grows, so
        the rate warms up once more."""
        update = step + 1
        rate, left = self.learning_rate, self.steps - update + 1
        peak_ends = max(self.warmup_steps, round(self.decay_from * self.steps))
        if update <= self.warmup_steps:
            rate = rate * update / self.warmup_steps
        elif update > peak_ends:
            rate = rate * left / (self.steps - peak_ends + 1)
        if 0 < grown_at < update <= grown_at + self.warmup_steps:
            rate *= (update - grown_at) / self.warmup_steps
        return rate
