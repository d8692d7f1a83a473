"""The groups of settings; a field says everything about its setting."""

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
    """Vocabulary ids of the special tokens; the order of ``SPECIAL_TOKENS``."""

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
    """Architecture (§4.2, Tables 5, 7 and 10)."""

    preset: Literal["tiny", "mini", "base", "large", "molecular"] = "tiny"
    """Encoder size; num_layers, width, ffn_width and num_heads override single numbers."""
    num_layers: Annotated[Count | None, Field(le=1000), RARE] = None
    """Transformer layers; none: the preset's."""
    width: Annotated[Count | None, RARE] = None
    """Hidden size D; none: the preset's."""
    ffn_width: Annotated[Count | None, RARE] = None
    """Feed-forward size; none: the preset's."""
    num_heads: Annotated[Count | None, RARE] = None
    """Attention heads; none: the preset's."""
    vocab_size: Annotated[Count | None, RARE] = None
    """Vocabulary size V; none: the tokenizer's. Set it for --dry-run only."""
    max_positions: Annotated[Count, RARE] = 512
    """Longest expanded sequence, in tokens."""
    dropout: Below1 = 0.1
    """After embedding and sublayers."""
    attention_dropout: Annotated[Below1, RARE] = 0.1
    """On attention probabilities."""
    activation_dropout: Annotated[Below1, RARE] = 0.0
    """After the feed-forward activation."""
    states_per_mask: Count = 4
    """k of §4: hidden states per [MASK]."""
    boundary: Annotated[Literal["official", "paper"], RARE] = "official"
    """official: [BOS] and [EOS] have k scored states each; paper: one unscored state each."""
    transition: Literal["gated", "paper", "ctc", "uniform", "spans", "chains"] = "gated"
    """Edges between states: as released, as in §4.2, none (two kinds), or within spans of adjacent
    masks (learned, fixed)."""
    use_position: Annotated[bool, RARE] = True
    """gated and spans only: learned positions besides the features, as in the released code."""
    chain_bonus: Annotated[NotNegative, RARE] = 6.0
    """spans only: bonus, in nats, for the edge to the clone of the same number."""
    sparse: Annotated[bool, RARE] = False
    """Forbid edges between states of one mask (Appendix Q.3)."""
    clone_embedding_std: Annotated[NotNegative, RARE] = 0.0
    """Spread of a learned vector per clone, added to the states and, if expand_at is above 0, to
    the copies there; 0: none, as in the paper."""
    expand_at: Annotated[Natural, RARE] = 0
    """exlm only: number of lower layers that see the row before expansion, each mask as one token;
    its state is then copied to its clones; 0: none, as in the paper."""
    rope: Literal["2d", "1d"] = "2d"
    """Rotation by token and clone, or by expanded place alone (Table 2)."""
    emission: Annotated[Literal["buffer", "chunked"], RARE] = "buffer"
    """Keep one states x V buffer, or recompute it chunk by chunk in the backward pass."""
    emission_chunk: Annotated[Count, RARE] = 1024
    """chunked only: states per chunk."""
    init_std: Annotated[Positive, RARE] = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.sparse and self.transition not in ("gated", "paper"):
            raise UserError(
                f"model.sparse has no meaning with model.transition {self.transition}, which has "
                "no edges inside a mask; drop one of the two"
            )
        shape = self.shape
        if self.expand_at >= shape.num_layers:
            raise UserError(
                f"model.expand_at is {self.expand_at}; it must be below model.num_layers "
                f"{shape.num_layers}, for a layer above to distinguish the clones"
            )
        # Each head is split in two halves, each rotated in pairs (2D RoPE).
        if shape.width % (4 * shape.num_heads):
            raise UserError(
                f"model.width {shape.width} over model.num_heads {shape.num_heads} must give a "
                "head size that is a multiple of 4, for 2D RoPE"
            )

    @property
    def shape(self) -> EncoderShape:
        """The preset with its overrides."""
        preset = ENCODER_PRESETS[self.preset]
        own = (self.num_layers, self.width, self.ffn_width, self.num_heads)
        return EncoderShape(*(p if o is None else o for p, o in zip(preset, own, strict=True)))


@settings("masking.")
class MaskingConfig:
    """Which tokens are hidden (§2, §3.1)."""

    mask_ratio: Between = 0.15
    """p: share of tokens masked."""
    strategy: Literal["fixed_count", "spans", "units", "bernoulli", "slots"] = "fixed_count"
    """A fixed number of tokens, spans or units (branches, rings, words, names); independent draws;
    slots of a toy language. repeated-mlm always draws independently (§3)."""
    num_copies: Annotated[Count, RARE] = 2
    """repeated-mlm only: copies, k of §3."""
    span_length: Annotated[Count, RARE] = 3
    """spans only: tokens of a span."""
    span_law: Annotated[Literal["fixed", "geometric"], RARE] = "fixed"
    """spans only: all of span_length, or SpanBERT's geometric law with that mean, cut at twice
    it."""


def _words(value: Any) -> Any:
    """A single word for a list of one."""
    return (value,) if isinstance(value, str) else value


@settings("data.")
class DataConfig:
    """Where the text comes from and how it is cut into rows."""

    kind: Literal["toy", "text", "smiles"] = "text"
    """The small language with known entropies, text, or molecules."""
    source: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    """Files (.txt .smi .csv .tsv .jsonl .parquet, also .gz .xz, and Uni-Mol's .lmdb), a data set
    that prepare --help names, or hub:ID,CONFIG,SPLIT of the Hugging Face hub; none: the embedded
    data."""
    column: str | None = None
    """Column of a table or of the hub data set, case ignored; none: text or smiles."""
    max_documents: Annotated[Count | None, Field(ge=2), RARE] = None
    """Read at most this many documents of each data set, and of files that follow each other."""
    pack: str | None = None
    """A prepared corpus; nothing else is read."""
    tokenizer: Annotated[str | None, RARE] = None
    """A tokenizer.json to use; none: train one on the training documents."""
    vocab_size: Annotated[Count, Field(le=2**22)] = 4000
    """Size of the tokenizer to train, in tokens, specials included."""
    block_length: Annotated[Count, Field(ge=3)] = 128
    """Tokens per row, [BOS] and [EOS] included; for molecules the longest row kept."""
    validation_share: Annotated[Between, RARE] = 0.05
    """Share of documents held out."""
    max_unknown: Annotated[Share, RARE] = 0.001
    """Stop when a larger share of tokens is [UNK]."""
    max_rejected: Annotated[Share, RARE] = 0.01
    """smiles only: stop when RDKit rejects a larger share of lines."""
    grammar: str = "pairs"
    """toy only: name of the grammar."""
    num_sentences: Annotated[Count, RARE] = 65536
    """toy only: training sentences drawn."""

    def __post_init__(self) -> None:
        if self.kind == "toy" and (self.source or self.tokenizer):
            raise UserError(
                "data.source or data.tokenizer is set, but data.kind toy draws its own sentences; "
                "drop it, or take a recipe of text or smiles"
            )


@settings("train.")
class TrainConfig:
    """Optimisation and bookkeeping."""

    steps: Count = 1000
    """Optimiser steps."""
    batch_size: Count = 32
    """Rows per optimiser step."""
    micro_batch_size: Count | None = None
    """Rows per forward pass; none: the whole batch."""
    batch_tokens: Annotated[Count | None, RARE] = None
    """Tokens per optimiser step at most, in place of batch_size rows: rows times the longest of
    them, before expansion (Table 7)."""
    micro_batch_tokens: Annotated[Count | None, RARE] = None
    """With batch_tokens: the same per forward pass; none: the whole batch."""
    learning_rate: Positive = 1e-3
    """Peak of the schedule."""
    warmup_steps: Natural = 100
    """Steps of linear rise from 0; then linear fall, to 0 after the last step."""
    decay_from: Annotated[Below1, RARE] = 0.0
    """Share of the steps after which the rate falls; until then it stays at its peak. 0: it falls
    right after the warm-up, as in the paper."""
    adam_betas: Annotated[tuple[Below1, Below1], RARE] = (0.9, 0.98)
    """Decay per step of Adam's mean gradient and mean square."""
    adam_eps: Annotated[Positive, RARE] = 1e-6
    """Added to the root of the mean square."""
    weight_decay: Annotated[NotNegative, RARE] = 0.01
    """Decoupled, on every parameter, as fairseq does."""
    clip_norm: Annotated[NotNegative, RARE] = 0.0
    """Largest gradient norm; 0: no clipping."""
    grow_at: Annotated[Below1, RARE] = 0.0
    """exlm only: share of the steps as an MLM, before each mask splits into its states; weights and
    schedule continue, the optimiser warms up again; 0: none, as in the paper."""
    start_from: Annotated[str | None, RARE] = None
    """Start from the weights of another run (its directory or one of its checkpoints), at step 0: a
    run of the same objective, or an MLM, which may grow."""
    chain_warmup: Annotated[Share, Field(le=0.5), RARE] = 0.0
    """exlm only: share of the steps on fixed parallel chains, from grow_at on; they fade out over
    an equal share; 0: none, as in the paper."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of matrix products; normalisations, the transition matrix and the dynamic programme stay in
    fp32. auto: bf16 on a GPU that has it, otherwise fp32."""
    max_skipped: Annotated[Count, Effect.COURSE, RARE] = 10
    """Stop after this many steps in a row whose loss or gradient is not finite; each is skipped."""
    compile: Annotated[bool, RARE] = False
    """Compile the encoder's layers with torch.compile; the rest stays as it is."""
    save_every: Annotated[Count, Effect.NOTHING, RARE] = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[Natural, Effect.NOTHING, RARE] = 3
    """Newest checkpoints to keep; 0: all."""
    log_every: Annotated[Count, Effect.NOTHING, RARE] = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: Annotated[bool, Effect.NOTHING, RARE] = False
    """Write the numbers of metrics.jsonl to OUTPUT/tensorboard too, for TensorBoard."""
    validate_every: Annotated[Count, Effect.COURSE] = 200
    """Steps between validations; the last step is always validated."""
    validation_rows: Annotated[Count, Effect.COURSE, RARE] = 512
    """Held-out rows per validation, from all over them."""
    num_threads: Annotated[Threads | None, Effect.COURSE] = None
    """CPU threads; none: torch's choice."""
    device: Annotated[str, Effect.NOTHING] = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if self.grow_at and self.start_from is not None:
            raise UserError(
                f"train.grow_at {self.grow_at:g} begins with an MLM and train.start_from "
                f"{self.start_from} with one that is trained; drop one of the two"
            )
        if self.grow_at and self.grow_at + 2 * self.chain_warmup > 1:
            raise UserError(
                f"train.grow_at {self.grow_at:g} leaves fixed chains (train.chain_warmup "
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
                f"train.batch_size {rows[0]} and train.micro_batch_size {rows[1]} count rows, "
                f"train.batch_tokens {whole} tokens; drop one (--train.batch_tokens null)"
            )
        if micro is not None and whole is not None and whole % micro:
            raise UserError(
                f"train.micro_batch_tokens {micro} must divide train.batch_tokens {whole}"
            )

    def rate(self, step: int, grown_at: int = 0) -> float:
        """Learning rate of a step, from 0: linear warm-up, the peak until ``decay_from``, then
        linear decay to 0 after the last step (polynomial decay, power 1). Adam's moments are reset
        when an MLM grows, so the rate warms up once more."""
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
