"""What transformers expects of every model, tested for all ExLM heads and objectives.

The common tests of transformers (``ModelTesterMixin``) are not in its wheel, so those that apply
are rewritten here. ExLM has no attention outputs, inner hidden states, ``inputs_embeds``, position
ids, left padding (refused by name), gradient checkpointing, generation or caches. It has no
``torch.export`` either, because the number of states depends on the masks of a batch.
"""

from __future__ import annotations

import inspect

import datasets
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402
from exlm_mini.config.checks import UserError  # noqa: E402
from exlm_mini.data.tokenizer import train_byte_level_bpe, train_smiles  # noqa: E402

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
SETTINGS = {
    "exlm": {},
    "paper": {"boundary": "paper", "transition": "paper"},
    "ctc": {"transition": "ctc"},
    "late": {"expand_at": 1, "clone_embedding_std": 1.0},
    "spans": {"transition": "spans"},
    "chains": {"transition": "chains", "boundary": "paper"},
    "mlm": {"objective": "mlm"},
    "repeated": {"objective": "repeated-mlm", "num_copies": 3},
}
HEADS = {
    "Model": hf.ExLMModel,
    "MaskedLM": hf.ExLMForMaskedLM,
    "SequenceClassification": hf.ExLMForSequenceClassification,
    "QuestionAnswering": hf.ExLMForQuestionAnswering,
}
IDS = torch.tensor([[1, 7, 5, 5, 9, 8, 2], [1, 10, 11, 5, 2, 0, 0]])
"""Two rows with masks (token 5); the second ends in padding."""
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
MAIN = {"Model": "last_hidden_state", "QuestionAnswering": "start_logits"}
"""Main output of each head; those not listed have ``logits``."""


def config(setting: str = "exlm", **options) -> hf.ExLMConfig:
    options = {"num_labels": 3, "max_position_embeddings": 64, **SIZES, **options}
    return hf.ExLMConfig(**options, **SETTINGS[setting])


def make(head: str = "MaskedLM", setting: str = "exlm", **options):
    torch.manual_seed(1)
    return HEADS[head](config(setting, **options)).eval()


def labels(head: str) -> dict[str, Tensor]:
    of_heads = {
        "Model": {},
        "MaskedLM": {"labels": torch.where(IDS == 5, 12, -100)},
        "SequenceClassification": {"labels": torch.tensor([0, 2])},
        "QuestionAnswering": {
            "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])
        },
    }  # fmt: skip
    return of_heads[head]


def main_output(head: str, output) -> Tensor:
    return output[MAIN.get(head, "logits")]


every = pytest.mark.parametrize(
    ("head", "setting"),
    [(head, "exlm") for head in HEADS]
    + [("MaskedLM", name) for name in SETTINGS if name != "exlm"],
)
every_head = pytest.mark.parametrize("head", HEADS)
every_setting = pytest.mark.parametrize("setting", SETTINGS)


@every
def test_saving_and_loading_keep_every_number(head, setting, tmp_path):
    model = make(head, setting)
    model.save_pretrained(tmp_path)
    auto = getattr(transformers, "AutoModel" if head == "Model" else f"AutoModelFor{head}")
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert torch.equal(main_output(head, again(**INPUTS)), main_output(head, model(**INPUTS)))


@every_head
def test_arguments_come_in_one_order_and_results_as_a_tuple_if_asked(head):
    model, named = make(head), labels(head)
    by_name = model(**INPUTS, **named)
    by_place = model(IDS, INPUTS["attention_mask"], *named.values(), return_dict=False)
    assert type(by_place) is tuple
    for one, other in zip(by_name.to_tuple(), by_place, strict=True):
        assert torch.equal(one, other)
    # Trainer drops the columns that are not in this signature; the collator reads one more.
    names = list(inspect.signature(model.forward).parameters)
    more = ["special_tokens_mask", "offset_mapping"] * (head == "MaskedLM")
    assert names == ["input_ids", "attention_mask", *named, *more]
    for option in ("output_attentions", "output_hidden_states", "inputs_embeds"):
        with pytest.raises(TypeError, match=option):
            model(**INPUTS, **{option: True})


@every
def test_embeddings_can_be_resized(head, setting, tmp_path):
    model = make(head, setting)
    torch.nn.init.normal_(model.exlm.head.bias)
    bias = model.exlm.head.bias.detach().clone()
    before = main_output(head, model(**INPUTS))
    model.resize_token_embeddings(44)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 44
    after = main_output(head, model(**INPUTS))
    if head == "MaskedLM":
        assert after.shape == (*IDS.shape, 44)
        assert torch.equal(model.exlm.head.bias, torch.cat([bias, torch.zeros(4)]))
        if setting != "ctc":  # there the blank has a share of the probability
            torch.testing.assert_close(after[IDS == 5].exp().sum(dim=1), torch.ones(3))
    else:
        assert torch.equal(after, before)
    new = IDS.masked_fill(IDS == 7, 43)
    assert main_output(head, model(new)).isfinite().all()
    model.save_pretrained(tmp_path)
    again = HEADS[head].from_pretrained(tmp_path).eval()
    torch.testing.assert_close(main_output(head, again(new)), main_output(head, model(new)))
    model.resize_token_embeddings(20)
    assert main_output(head, model(**INPUTS)).isfinite().all()
    model.resize_token_embeddings(2000, mean_resizing=False)
    rows = model.get_input_embeddings().weight[20:]
    assert rows.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("saved", "opened"),
    [
        ({"objective": "mlm"}, {"objective": "exlm", "clone_embedding_std": 1.0}),
        ({"max_position_embeddings": 64}, {"max_position_embeddings": 128}),
        ({"clone_embedding_std": 1.0}, {"clone_embedding_std": 1.0, "states_per_mask": 8}),
    ],
)
def test_weights_that_no_file_holds_begin_as_in_training(saved, opened, tmp_path):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    old = hf.ExLMForMaskedLM(hf.ExLMConfig(**size, **saved, vocab_size=40))
    old.save_pretrained(tmp_path)
    new, told = hf.ExLMForMaskedLM.from_pretrained(
        tmp_path, **opened, ignore_mismatched_sizes=True, output_loading_info=True
    )
    drawn = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    fresh = hf.ExLMForMaskedLM(new.config).state_dict()
    assert drawn
    for name, weight in new.state_dict().items():
        if name not in drawn:
            assert torch.equal(weight, old.state_dict()[name])
        else:
            assert weight.std().item() == pytest.approx(
                fresh[name].std().item(), rel=0.2, abs=0
            )


@pytest.mark.slow
def test_a_compiled_model_says_the_same():
    model, inputs = make(), {**INPUTS, **labels("MaskedLM")}
    found = []
    for each in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        output = each(**inputs)
        output.loss.backward()
        gradients = [w.grad for w in model.parameters() if w.grad is not None]
        found.append([output.loss, output.logits, *(g.clone() for g in gradients)])
    torch.testing.assert_close(*found)


# ---- rows ----


@every_setting
def test_a_batch_without_masks_teaches_nothing(setting):
    model = make("MaskedLM", setting)
    plain = torch.tensor([[1, 7, 8, 2]])
    loss = model(plain, labels=torch.full_like(plain, -100)).loss
    loss.backward()
    assert loss.item() == 0
    for name, weight in model.named_parameters():
        assert weight.grad is None or not weight.grad.any(), name


@pytest.fixture(scope="module")
def molecules():
    """A tokenizer of molecules, and a model with its vocabulary."""
    own = train_smiles(["CC(=O)Nc1ccc(O)cc1"])
    return hf.tokenizer_for(own), make(vocab_size=own.vocab_size)


def test_the_trainer_passes_on_which_tokens_must_not_be_hidden(molecules, tmp_path):
    tokenizer, model = molecules
    row = dict(tokenizer("CC(=O)N"))
    row["special_tokens_mask"] = [int(i != 3) for i in range(len(row["input_ids"]))]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True),
        train_dataset=datasets.Dataset.from_list([row] * 8),
        data_collator=hf.collator(tokenizer, mask_ratio=0.9, seed=1),
    )
    (batch,) = trainer.get_train_dataloader()
    assert {*(batch["labels"] != -100).nonzero()[:, 1].tolist()} == {3}


def test_paths_run_between_what_begins_and_ends_a_row(molecules):
    tokenizer, model = molecules
    model.eval()
    pair = tokenizer("C[MASK]", "N[MASK]O", return_tensors="pt")
    bare = tokenizer("[MASK]N[MASK]", add_special_tokens=False, return_tensors="pt")
    for row in (pair, bare):
        filled_BN, log_joint_B = model.fill(**row)
        assert (filled_BN != row.input_ids).sum() == 2 and log_joint_B.isfinite().all()
    alone = tokenizer("C[MASK]", add_special_tokens=False, return_tensors="pt")
    for run in (model, model.fill):
        with pytest.raises(ValueError, match=r"row 0 has one .* neither .* add_special_tokens"):
            run(**alone)


def test_the_usual_collator_is_refused_for_the_right_reason(molecules):
    (tokenizer, model), has_pad = molecules, set()
    row = tokenizer("CC(=O)Nc1ccc(O)cc1")
    for seed in range(12):
        collate = transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=0.5, seed=seed
        )
        batch = collate([row] * 4)
        has_pad.add(bool((batch["input_ids"] == tokenizer.pad_token_id).any()))
        with pytest.raises(ValueError, match="labels must be set at every"):
            model(**batch)
    assert has_pad == {True, False}


def test_masks_that_stood_in_the_text_are_refused_for_the_right_reason(molecules):
    tokenizer, model = molecules
    with pytest.raises(ValueError, match=r"leave out texts that already contain \[MASK\]"):
        model(**hf.collator(tokenizer)([tokenizer("CC[MASK]Nc1ccc(O)cc1")]))


@every_setting
def test_what_stands_at_padding_has_no_effect(setting):
    model = make("MaskedLM", setting)
    other = IDS.masked_fill(IDS == 0, 5), INPUTS["attention_mask"]
    ours, same = model(*other, **labels("MaskedLM")), model(**INPUTS, **labels("MaskedLM"))
    assert torch.equal(ours.loss, same.loss) and torch.equal(ours.logits, same.logits)


@every_head
def test_padding_before_a_token_is_refused(head):
    model = make(head)
    inside, left = IDS.clone(), IDS.flip(1)
    inside[1, 2] = 0
    mask = torch.tensor([[1] * 7, [0] + [1] * 6])
    for inputs in ((inside,), (inside, torch.ones_like(IDS)), (left,), (IDS, mask)):
        with pytest.raises(ValueError, match=r"row 1 has padding .* pad rows on the right"):
            model(*inputs)
    for shapeless in (IDS[0], IDS[:0]):
        with pytest.raises(
            ValueError, match=r"input_ids must be \(B, N\) and not empty, got \("
        ):
            model(shapeless)


# ---- settings ----


@pytest.mark.parametrize(
    ("options", "attribute", "value"),
    [
        ({"hidden_size": 48}, "width", 48),
        ({"num_hidden_layers": 3, "num_attention_heads": 1}, "num_layers", 3),
        ({"intermediate_size": 10, "states_per_mask": 2}, "ffn_width", 10),
        ({"max_position_embeddings": 20, "hidden_dropout_prob": 0.3}, "max_positions", 20),
        ({"architecture": {"width": 32}}, "hidden_size", 32),
        ({"architecture": {"preset": "mini"}}, "num_hidden_layers", 4),
        ({"architecture": {"vocab_size": 30}}, "vocab_size", 30),
    ],
)
def test_a_setting_is_honoured_under_either_name(options, attribute, value, tmp_path):
    settings = hf.ExLMConfig(**options)
    settings.save_pretrained(tmp_path)
    stored = transformers.AutoConfig.from_pretrained(tmp_path)
    assert stored.to_json_string() == settings.to_json_string()
    for config in (settings, stored):
        assert getattr(config, attribute) == value
        for name in options.keys() - {"architecture"}:
            assert getattr(config, name) == options[name]
        model = hf.ExLMForMaskedLM(config)
        encoder = model.exlm.encoder
        assert encoder.embedding.weight.shape == (config.vocab_size, config.hidden_size)
        assert len(encoder.layers) == config.num_hidden_layers
        assert encoder.layers[0].attention.num_heads == config.num_attention_heads
        assert encoder.layers[0].ffn_in.out_features == config.intermediate_size
        assert model.exlm.config.states_per_mask == config.states_per_mask


def test_a_setting_can_be_changed_later(tmp_path):
    settings = hf.ExLMConfig()
    settings.hidden_size = 32
    assert hf.ExLMModel(settings).exlm.encoder.embedding.weight.shape[1] == 32
    settings.save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path, hidden_size=48, states_per_mask=3)
    assert (read.hidden_size, read.model.width, read.model.states_per_mask) == (48, 48, 3)
    hf.ExLMModel(settings).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError):
        hf.ExLMModel.from_pretrained(tmp_path, hidden_size=48)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": {"width": 64}, "hidden_size": 640}, "hidden_size 640 .*width, 64"),
        ({"architecture": {"vocab_size": 300}, "vocab_size": 500}, "vocab_size 500"),
        ({"special_ids": {"eos": 9}, "eos_token_id": 2}, "eos_token_id 2"),
        ({"mask_token_id": 7}, "mask_token_id 7 .*special_ids.mask, 5"),
        ({"state_per_mask": 8}, "did you mean states_per_mask"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_size": 641}, "641"),
        ({"objective": "clm"}, "objective"),
        ({"num_copies": 2}, "repeated-mlm"),
        ({"architecture": {"depth": 2}}, "depth"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(options, words):
    with pytest.raises(UserError, match=words) as refused:
        hf.ExLMConfig(**options)
    assert "\n" not in str(refused.value)


# ---- pipelines ----


def test_the_pipeline_of_features_cuts_what_is_too_long():
    own = train_byte_level_bpe(["the cat sat on the mat. a dog ran"] * 9, 300)
    tokenizer = hf.tokenizer_for(own, 58)
    model = make("Model", vocab_size=own.vocab_size)
    features = transformers.pipeline(
        "feature-extraction", model=model, tokenizer=tokenizer,
        tokenize_kwargs={"truncation": True},
    )  # fmt: skip
    assert len(features("the cat sat on the mat. " * 30)[0]) == 58
