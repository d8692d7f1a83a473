"""The picture of the introduction: one sentence on its way through a small ExLM.

The model is trained for it, in seconds, when the book is built and nothing it depends on has stayed
the same. The picture lands in ``book/_generated``, as SVG for the pages and as PDF for print.
"""

import hashlib
import io
from pathlib import Path

from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
TRAINING = (
    "--recipe toy-pairs --objective exlm --model.boundary paper --train.steps 120 "
    "--train.warmup_steps 20 --data.num_sentences 16384"
)
SENTENCE = "the old baker felt happy this morning so his sister smiled"


def pipeline_row():
    """``SENTENCE`` through an ExLM trained on the spot, for ``draw_pipeline``.

    Returns:
        The row, and bits per sentence: the model's on held-out sentences, and the floor of MLM.
    """
    import torch
    from pipeline_drawing import Pipeline

    from exlm_mini.alignment import dag_log_likelihood
    from exlm_mini.config.options import parse
    from exlm_mini.data.toy_grammars import grammar, slots_of
    from exlm_mini.model.expansion import expand_masks
    from exlm_mini.reading.decoding import read_states, top_tokens
    from exlm_mini.training.live import Scale, train_live

    torch.set_num_threads(1)
    config = parse(TRAINING.split()).config
    run = train_live(config, Scale("cpu", torch.device("cpu")))
    model, special = run.model, run.tokenizer.special_ids
    token_ids_BN = torch.tensor([[special.bos, *run.tokenizer.encode(SENTENCE), special.eos]])
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, list(slots_of(config))] = True
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special.mask)
    expanded, graph = expand_masks(
        masked_ids_BN, is_masked_BN, token_ids_BN, config.model.states_per_mask,
        config.model.boundary, special,
    )  # fmt: skip
    with torch.no_grad():
        scores = model(masked_ids_BN, is_masked_BN, token_ids_BN)
    M, L = scores.log_emission_BML.shape[1:]
    log_emission_BML = scores.log_emission_BML.masked_fill(~scores.is_scored_BM.unsqueeze(2), 0)
    # f[i, u] is the likelihood of the first i targets in the graph that ends in state u.
    i_X, u_X = (index.flatten() for index in torch.meshgrid(
        torch.arange(M), torch.arange(L), indexing="ij"
    ))  # fmt: skip
    log_f_X = dag_log_likelihood(
        log_emission_BML.expand(M * L, M, L), scores.log_transition_BLL.expand(M * L, L, L),
        i_X + 1, u_X + 1,
    )  # fmt: skip
    reading = read_states(model, masked_ids_BN)
    best_ids_LC, best_LC = top_tokens(reading.states.log_token_LV, 1, special)
    token = run.tokenizer.token
    row = Pipeline(
        tokens=[token(i) for i in token_ids_BN[0].tolist()],
        is_masked=is_masked_BN[0].tolist(),
        positions=list(
            zip(expanded.position_BT[0].tolist(), expanded.clone_BT[0].tolist(), strict=True)
        ),
        state_places=graph.place_BL[0].tolist(),
        state_labels=reading.states.labels,
        state_owners=graph.owner_BL[0].tolist(),
        top_words=[
            (token(i), p)
            for i, p in zip(best_ids_LC[:, 0].tolist(), best_LC[:, 0].tolist(), strict=True)
        ],
        transition_LL=scores.log_transition_BLL[0].exp().numpy(),
        targets=[token(i) for i in graph.target_ids_BM[0].tolist()],
        forward_ML=log_f_X.view(M, L).exp().numpy(),
    )
    language = grammar(config.data.grammar)
    floor_bits = language.marginal_entropy_bits(language.mask())
    return row, run.outcome.evaluation.bits_per_row, floor_bits


def fingerprint() -> str:
    """Of all that decides what the picture shows."""
    digest = hashlib.sha256()
    files = [*(ROOT / "exlm_mini").rglob("*.py"), *(ROOT / "exlm_mini").rglob("*.yaml")]
    for path in sorted([*files, Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_pipeline(app) -> None:
    """Draw the pipeline into ``book/_generated``, unless what is there was drawn by this code."""
    folder = Path(app.srcdir) / "book" / "_generated"
    stamp, mark = folder / "pipeline.sha256", fingerprint()
    targets = [folder / "pipeline.svg", folder / "pipeline.pdf"]
    if stamp.exists() and stamp.read_text() == mark and all(path.exists() for path in targets):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from pipeline_drawing import draw_pipeline

    from exlm_mini.data.files import write_atomically
    from exlm_mini.plot.figures import use_book_style

    logging.getLogger(__name__).info("training the small model of the pipeline picture")
    use_book_style()
    plt.rcParams.update({"svg.hashsalt": "pipeline", "figure.constrained_layout.use": False})
    figure = plt.figure(figsize=(7.6, 8.2))
    draw_pipeline(figure.add_axes((0, 0, 1, 1)), *pipeline_row())
    folder.mkdir(exist_ok=True)
    for path in targets:
        drawing = io.BytesIO()
        date = "Date" if path.suffix == ".svg" else "CreationDate"
        figure.savefig(drawing, format=path.suffix[1:], metadata={date: None})
        # Another build may be reading: it meets the old file or the new one, never half.
        write_atomically(path, drawing.getvalue())
    plt.close(figure)
    stamp.write_text(mark)
