"""The models: every combination trains, rows stand alone, sizes are the paper's, batches overfit.

Shapes: B rows, N tokens, T expanded tokens, S masked tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.encoder import initialise
from exlm_mini.model.objectives import log_likelihood, mlm_loss, states_alignment_loss
from exlm_mini.model.transition import parallel_chains

PAD, BOS, EOS, UNK, SEP, MASK = SpecialIds()
V = 20
SMALL = {
    "num_layers": 2, "width": 16, "ffn_width": 24, "num_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "max_positions": 40,
}  # fmt: skip
EVERY_KIND = [
    {"transition": "gated", "boundary": "official"},
    {"transition": "gated", "boundary": "paper", "sparse": True, "use_position": False},
    {"transition": "paper", "boundary": "official", "sparse": True, "rope": "1d"},
    {"transition": "paper", "boundary": "paper", "states_per_mask": 1},
    {"transition": "ctc", "boundary": "official", "clone_embedding_std": 0.3},
    {"transition": "ctc", "boundary": "paper"},
    {"transition": "uniform", "boundary": "official", "states_per_mask": 1},
    {"transition": "uniform", "boundary": "paper", "expand_at": 1},
    {"transition": "gated", "boundary": "paper", "expand_at": 1, "clone_embedding_std": 0.3},
    {"transition": "spans", "boundary": "official", "expand_at": 1},
    {"transition": "spans", "boundary": "paper", "use_position": False},
    {"transition": "chains", "boundary": "official"},
]
TRAINED_ONLY = [
    {"emission": "chunked", "emission_chunk": 7},
    {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
]


def make_model(kind: type = ExLM, seed: int = 0, std: float = 0.3, **changes) -> nn.Module:
    torch.manual_seed(seed)
    model = kind(ModelConfig(**{**SMALL, **changes}), V).double()
    initialise(model, std)
    return model


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Rows with 2, 1, 0 and 3 masks: masked ids, which are masked, tokens."""
    token_ids_BN = torch.tensor(
        [
            [BOS, 6, 7, 8, EOS, PAD, PAD],
            [BOS, 9, 10, EOS, PAD, PAD, PAD],
            [BOS, 6, 11, 12, EOS, PAD, PAD],
            [BOS, 13, 14, 15, SEP, 16, EOS],
        ]
    )
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, [1, 3]] = True
    is_masked_BN[1, 2] = True
    is_masked_BN[3, [1, 2, 5]] = True
    return token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN


def exlm_loss(model: ExLM, batch: tuple[Tensor, Tensor, Tensor], **kwargs) -> Tensor:
    scores = model(*batch, **kwargs)
    return states_alignment_loss(log_likelihood(scores), scores.is_scored_BM.sum(1))


def mlm_loss_of(model: MaskedLM, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    masked_ids_BN, is_masked_BN, token_ids_BN = batch
    return mlm_loss(model(masked_ids_BN, is_masked_BN), token_ids_BN[is_masked_BN])


def assert_trains(model: nn.Module) -> None:
    """Every parameter has a finite gradient, and one that is not zero where it can be."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A key bias shifts all scores of a state alike: its gradient is rounding noise.
        assert name == "transition.key.bias" or parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("changes", [None, *EVERY_KIND, *TRAINED_ONLY])
def test_every_kind_of_model_gives_finite_loss_and_gradients(changes):
    is_mlm = changes is None
    model = make_model(MaskedLM) if is_mlm else make_model(**changes)
    loss = (mlm_loss_of if is_mlm else exlm_loss)(model, make_batch())
    loss.backward()
    assert loss.isfinite() and loss > 0
    assert_trains(model)


@pytest.mark.parametrize("changes", EVERY_KIND)
def test_a_rows_likelihood_does_not_depend_on_its_batch_mates(changes):
    model, batch = make_model(**changes).eval(), make_batch()
    for with_boundaries in (True, False):
        together_B = log_likelihood(model(*batch), with_boundaries)
        for b, length in enumerate((batch[2] != PAD).sum(1).tolist()):
            alone = model(*(t[b : b + 1, :length] for t in batch))
            alone_1 = log_likelihood(alone, with_boundaries)
            assert abs(together_B[b] - alone_1[0]) < 1e-10


def test_the_clone_embedding_reaches_the_layers_above_the_expansion_and_clones_alone():
    model = make_model(clone_embedding_std=0.3, expand_at=1, boundary="paper").eval()
    seen = []
    model.encoder.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    _, graph = model.encode(*make_batch())
    with torch.no_grad():
        model.clone.weight.zero_()
    model.encode(*make_batch())
    added_BTD = seen[0] - seen[1]
    is_clone_BT = added_BTD.abs().sum(2) > 0
    expected_BT = torch.zeros_like(is_clone_BT).scatter(1, graph.place_BL, graph.clone_BL > 0)
    assert expected_BT.any() and torch.equal(is_clone_BT, expected_BT)


def test_masked_logits_come_row_by_row_from_left_to_right():
    model = make_model(MaskedLM).eval()
    masked_ids_BN, is_masked_BN, _ = make_batch()
    # Columns of nothing but padding on the right are cut off; masks still find their tokens.
    more_ids_BN = nn.functional.pad(masked_ids_BN, (0, 3), value=PAD)
    more_masked_BN = nn.functional.pad(is_masked_BN, (0, 3), value=False)
    logits_SV = model(masked_ids_BN, is_masked_BN)
    assert torch.equal(model(more_ids_BN, more_masked_BN), logits_SV)
    places = is_masked_BN.nonzero().tolist()
    assert len(logits_SV) == len(places)
    for ours_V, (b, n) in zip(logits_SV, places, strict=True):
        hidden_1ND = model.encode(masked_ids_BN[b : b + 1])  # a row alone
        expected_1V = model.head.logits(hidden_1ND[:, n], model.encoder.embedding.weight)
        torch.testing.assert_close(ours_V, expected_1V[0], rtol=0, atol=1e-11)


def test_emissions_are_the_log_probabilities_of_the_states():
    model = make_model(clone_embedding_std=0.3).eval()
    batch = make_batch()
    scores = model(*batch)
    hidden_BTD, graph = model.encode(*batch)
    log_probability_BLV = model.token_logits(model.states(hidden_BTD, graph)).log_softmax(-1)
    for b, M in enumerate(graph.num_targets_B.tolist()):
        L = int(graph.num_states_B[b])
        expected_ML = log_probability_BLV[b, :L, graph.target_ids_BM[b, :M]].t()
        torch.testing.assert_close(
            scores.log_emission_BML[b, :M, :L], expected_ML, rtol=0, atol=1e-11
        )


def test_the_tokens_behind_the_masks_reach_the_model_as_targets_alone():
    model = make_model(states_per_mask=2).eval()
    masked_ids_BN, is_masked_BN, token_ids_BN = make_batch()
    scores = model(masked_ids_BN, is_masked_BN, token_ids_BN)
    other_ids_BN = token_ids_BN.masked_fill(is_masked_BN, 17)
    other = model(masked_ids_BN, is_masked_BN, other_ids_BN)
    assert torch.equal(other.log_transition_BLL, scores.log_transition_BLL)
    assert not torch.equal(other.log_emission_BML, scores.log_emission_BML)
    hidden_BTD, _ = model.encode(masked_ids_BN, is_masked_BN, token_ids_BN)
    other_BTD, _ = model.encode(masked_ids_BN, is_masked_BN, other_ids_BN)
    assert torch.equal(hidden_BTD, other_BTD)


# ---- the encoder used as it is ----


@pytest.mark.parametrize("expand_at", [0, 1])
def test_with_the_papers_boundary_the_encoder_is_that_of_a_masked_language_model(expand_at):
    model = make_model(boundary="paper", expand_at=expand_at).eval()
    masked_lm = make_model(MaskedLM, seed=1).eval()
    masked_lm.encoder.load_state_dict(model.encoder.state_dict())
    _, is_masked_BN, token_ids_BN = make_batch()
    hidden_BTD, _ = model.encode(token_ids_BN, torch.zeros_like(is_masked_BN), token_ids_BN)
    is_real_BN = token_ids_BN != PAD
    assert torch.equal(hidden_BTD[is_real_BN], masked_lm.encode(token_ids_BN)[is_real_BN])


def test_too_long_rows_are_refused():
    row = torch.tensor([[BOS, *[6] * 18, EOS]])
    is_masked_BN = (row == 6) & (torch.arange(20) < 8)
    masked_ids_BN = row.masked_fill(is_masked_BN, MASK)
    # 20 tokens with 7 masks and 2 boundaries of 3 states each: 20 + 9 * 2 = 38
    for kind, length, inputs in (
        (ExLM, 38, (masked_ids_BN, is_masked_BN, row)),
        (MaskedLM, 20, (masked_ids_BN, is_masked_BN)),
    ):
        make_model(kind, states_per_mask=3, max_positions=length)(*inputs)
        with pytest.raises(ValueError, match=f"{length} tokens .* {length - 1}"):
            make_model(kind, states_per_mask=3, max_positions=length - 1)(*inputs)


# ---- chains at the start of training ----


def test_chain_share_leads_from_chains_to_learned_transitions():
    model = make_model(states_per_mask=3).eval()
    batch = make_batch()
    hidden_BTD, graph = model.encode(*batch)
    state_BLD = model.states(hidden_BTD, graph)
    chains_BLL = parallel_chains(state_BLD, graph).exp()
    learned_BLL = model.transition(state_BLD, graph).exp()
    for share in (0.0, 0.3, 1.0):
        ours_BLL = model(*batch, chain_share=share).log_transition_BLL.exp()
        expected_BLL = (1 - share) * learned_BLL + share * chains_BLL
        torch.testing.assert_close(ours_BLL, expected_BLL, rtol=0, atol=1e-12)


def test_while_the_chains_stand_transitions_learn_and_nothing_else_heeds_them():
    gradients = []
    for factor in (1.0, 2.0):
        model = make_model()
        with torch.no_grad():
            for parameter in model.transition.parameters():
                parameter.mul_(factor)
        exlm_loss(model, make_batch(), chain_share=1.0).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        is_same = torch.equal(gradient, gradients[1][name])
        assert is_same != name.startswith("transition."), name


def test_transitions_that_chains_have_taught_can_replace_them():
    model, batch = make_model(states_per_mask=2), make_batch()
    untaught, chains = (exlm_loss(model, batch, chain_share=s).item() for s in (0.0, 1.0))
    optimizer = torch.optim.Adam(model.transition.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        exlm_loss(model, batch, chain_share=1.0).backward()
        optimizer.step()
    assert exlm_loss(model, batch, chain_share=1.0).item() == chains
    assert exlm_loss(model, batch).item() < chains + 0.1 * (untaught - chains)


# ---- sizes ----


def count(kind: type, vocab_size: int, **changes) -> int:
    with torch.device("meta"):
        model = kind(ModelConfig(**changes), vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("millions", "vocab_size", "changes"),
    [
        # The released code's and the paper's sizes.
        (128.25, 50_265, {"preset": "base", "max_positions": 2048}),
        (361.2, 50_265, {"preset": "large", "max_positions": 2048}),
        # Table 7's 50.5 M is the model without its transition head.
        (50.5, 369, {"preset": "molecular", "transition": "ctc"}),
        (53.3, 369, {"preset": "molecular"}),
    ],
)
def test_parameters_are_as_many_as_the_papers(millions, vocab_size, changes):
    assert count(ExLM, vocab_size, **changes) == pytest.approx(1e6 * millions, rel=0.005)


def test_exlm_adds_the_transition_head_alone():
    changes = {"preset": "base", "max_positions": 2048}
    D, H, P = 768, 12, 2048
    head = P * D + 2 * (2 * D * D + D) + 2 * D * H + H
    assert count(ExLM, 1000, **changes) - count(MaskedLM, 1000, **changes) == head
    no_place = count(ExLM, 1000, use_position=False, **changes)
    assert no_place - count(MaskedLM, 1000, **changes) == 2 * (D * D + D) + D * H + H
    paper = count(ExLM, 1000, transition="paper", **changes)
    assert paper - count(MaskedLM, 1000, **changes) == 2 * D * D
    spans = count(ExLM, 1000, transition="spans", **changes)
    assert spans - count(MaskedLM, 1000, **changes) == head
    for transition in ("ctc", "uniform", "chains"):
        same = count(ExLM, 1000, transition=transition, **changes)
        assert same == count(MaskedLM, 1000, **changes)


def test_models_keep_parameters_and_no_buffers():
    for kind in (ExLM, MaskedLM):
        model = make_model(kind)
        assert not list(model.buffers())
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# ---- low precision, and training ----


@pytest.mark.parametrize("transition", ["gated", "paper", "ctc", "uniform", "spans", "chains"])
def test_bfloat16_autocast_scores_in_float32(transition):
    torch.manual_seed(0)
    model = ExLM(ModelConfig(**{**SMALL, "transition": transition}), V)
    batch = make_batch()
    exact = exlm_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(*batch)
        loss = states_alignment_loss(log_likelihood(scores), scores.is_scored_BM.sum(1))
    for score in scores[:3]:
        assert score is None or score.dtype == torch.float32
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.02 * exact
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (MaskedLM, {}),
        (ExLM, {"states_per_mask": 2}),
        (ExLM, {"states_per_mask": 2, "transition": "ctc"}),
    ],
)
def test_one_batch_is_learned_by_heart(kind, changes):
    torch.manual_seed(0)
    config = {**SMALL, "num_layers": 1, "width": 64, "ffn_width": 128, **changes}
    model = kind(ModelConfig(**config), V)
    rng = torch.Generator().manual_seed(0)
    token_ids_BN = torch.randint(6, V, (8, 12), generator=rng)
    token_ids_BN[:, 0], token_ids_BN[:, -1] = BOS, EOS
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    for b in range(8):
        is_masked_BN[b, 1 + torch.randperm(10, generator=rng)[:2]] = True
    batch = token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN
    loss_of = mlm_loss_of if kind is MaskedLM else exlm_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = loss_of(model, batch).item()
    for _ in range(130):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss_of(model, batch).item()
    assert first > 1.5 and last < 0.1, (first, last)
