"""Parity with the released code: our modules reproduce numbers that it computed.

The golden files are in ``tests/golden``, whose README describes them; every ``*.npz`` there, or in
the folder ``EXLM_GOLDEN``, becomes a test. ``k*`` files hold a whole model, ``mlm*`` and ``ctc*`` a
loss and its gradients, ``dp_*`` the dynamic programme in float64, ``finetune*`` (tested in
``test_finetuning``) a model with a head. Three files record defects of the released code; for each
of them, a test shows what our code does instead.
"""

import re

import pytest
import torch
from official import COMMITTED, DEFECTS, Golden, assert_close, golden_files
from small_models import loss_of

from exlm_mini.alignment import dag_log_likelihood
from exlm_mini.config import ModelConfig
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import log_likelihood
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.objectives import states_alignment_loss


def test_every_committed_case_is_described_and_met():
    names = {path.stem for path in COMMITTED.glob("*.npz")}
    cases, _ = (COMMITTED / "README.md").read_text().split("Names of arrays")
    first_column = re.findall(r"^\| (`.*?) \|", cases, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(first_column))) == names > DEFECTS
    assert all(name.startswith(("k", "ctc", "mlm", "dp_", "finetune")) for name in names)


@pytest.mark.parametrize("path", golden_files("k*.npz"))
def test_model_equals_the_released_one(path):
    golden = Golden(path)
    model = golden.load(ExLM)
    hidden_BTD, graph = model.encode(*golden.batch())
    expanded, _ = expand_masks(
        *golden.batch(), golden.config.states_per_mask, "official", model.special_ids
    )
    T = expanded.token_ids_BT.shape[1]
    real_BT = expanded.is_real_BT
    assert torch.equal(expanded.token_ids_BT, golden["ext_tokens"][:, :T].long())
    assert torch.equal(real_BT.sum(1), golden["output_length"].long())
    assert torch.equal(expanded.position_BT[real_BT], golden["pos_dim1"][:, :T][real_BT].long())
    assert torch.equal(expanded.clone_BT[real_BT], golden["pos_dim2"][:, :T][real_BT].long())
    assert torch.equal(graph.target_ids_BM, golden["dag_targets"].long())
    assert torch.equal(graph.num_targets_B, golden["target_length"].long())
    assert torch.equal(graph.num_states_B, golden["is_state"].sum(1))
    assert_close(hidden_BTD[real_BT], golden["features"][:, :T][real_BT], "features")

    scores = model(*golden.batch())
    for b, L in enumerate(graph.num_states_B.tolist()):
        place_L = graph.place_BL[b, :L]
        assert golden["is_state"][b, place_L].all()
        M = int(graph.num_targets_B[b])
        assert_close(
            scores.log_emission_BML[b, :M, :L],
            golden["match_all"][b, :M][:, place_L],
            "emission",
        )
        assert_close(
            scores.log_transition_BLL[b, :L, :L],
            golden["links_dense"][b, place_L][:, place_L],
            "transition",
        )
    assert_close(log_likelihood(scores), golden["seq_logprob"], "seq_logprob")


@pytest.mark.parametrize("path", golden_files("[kcm]*.npz"))
def test_loss_and_gradients_equal_the_released_ones(path):
    golden = Golden(path)
    kind = MaskedLM if path.stem.startswith("mlm") else ExLM
    transition = "ctc" if path.stem.startswith("ctc") else golden.config.transition
    config = ModelConfig(**{**vars(golden.config), "transition": transition})
    model, batch = golden.load(kind, config), golden.batch()
    if kind is MaskedLM:
        assert_close(model(*batch[:2]), golden["logits_masked"], "logits_masked")
    loss = loss_of(model, batch)
    assert_close(loss, golden["loss"], "loss")
    loss.backward()
    golden.assert_gradients(model)


@pytest.mark.parametrize("backend", ["enumerate", "naive", "vectorized", "scaled", "auto"])
@pytest.mark.parametrize("path", golden_files("dp_*.npz"))
def test_dynamic_programme_equals_the_released_one(path, backend):
    golden = Golden(path)
    log_emission_BML = golden["match_all"].requires_grad_()
    log_transition_BLL = golden["links_dense"].requires_grad_()
    num_targets_B, num_states_B = golden["target_length"].long(), golden["output_length"].long()
    log_likelihood_B = dag_log_likelihood(
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend
    )
    assert_close(log_likelihood_B, golden["seq_logprob"], "seq_logprob", 1e-10)
    has_path_B = log_likelihood_B != -torch.inf
    # The released code gives rows without a path a loss of 0 and divides by all rows.
    loss = -(log_likelihood_B / num_targets_B)[has_path_B].sum() / len(has_path_B)
    assert_close(loss, golden["loss"], "loss", 1e-10)
    loss.backward()
    valid = has_path_B.nonzero().flatten()
    for ours, name in ((log_emission_BML, "match_all"), (log_transition_BLL, "links_dense")):
        assert_close(ours.grad[valid], golden[f"grad_{name}"][valid], name, 1e-10)


def defect(name: str) -> Golden:
    return Golden(COMMITTED / f"{name}.npz")


def test_a_loss_does_not_depend_on_batch_mates():
    """k4_tail_bug: the released expansion fills short rows with copies of their last token."""
    golden, clean = defect("k4_tail_bug"), defect("k4_tail_fixed")
    model = golden.load(ExLM)
    together_B = log_likelihood(model(*golden.batch()))
    alone_B = [log_likelihood(model(*(t[b : b + 1] for t in golden.batch()))) for b in (0, 1)]
    assert_close(together_B, torch.cat(alone_B), "batch", 1e-5)
    assert_close(together_B, clean["seq_logprob"], "the clean twin")
    assert (together_B - golden["seq_logprob"]).abs().max() > 0.1  # the defect is really there


def test_the_graph_ends_in_the_last_state_not_in_an_ordinary_token():
    """k2_no_final_eos: the released graph ends at the last token, whatever it is."""
    golden = defect("k2_no_final_eos")
    model = golden.load(ExLM)
    scores = model(*golden.batch())
    last = int(golden["output_length"][0]) - 1
    assert not golden["is_state"][0, last], "theirs ends in an ordinary token"
    end = int(scores.graph.place_BL[0, scores.graph.num_states_B[0] - 1])
    assert golden["is_state"][0, end] and end < last
    assert torch.isfinite(log_likelihood(scores)).all()


def test_a_row_without_a_path_is_left_out_of_the_mean():
    """k2_invalid: the released loss is 0 for a row without a path, which counts in the mean."""
    golden = defect("k2_invalid")
    assert golden["seq_logprob"][0] == -torch.inf
    num_targets_B = golden["target_length"].long()
    left_out = states_alignment_loss(golden["seq_logprob"], num_targets_B)
    assert_close(
        left_out, 2 * golden["loss"], "the mean over the one row that has a path", 1e-5
    )
    # In our graph the row does have a path, because the graph ends in the last state.
    model = golden.load(ExLM)
    assert torch.isfinite(log_likelihood(model(*golden.batch()))).all()
