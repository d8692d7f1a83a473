"""ExLM in small: masked language models, states expansion and states alignment (ICML 2025).

The modules follow the data, left to right: config, autograd, durable, tokenization, corpora,
masking, expansion, rope, encoder, transition, emission, alignment, objectives, model, official,
decoding, batches, evaluation, checkpoint, optimizer_state, run_directory, training, estimate,
settings, console, measure, benchmarks, live, analysis, plotting, widgets; the commands
``pretrain``, ``fill`` and ``bench`` stand last. A module imports only from modules to its left,
and the package root imports nothing, so that the numerical core runs with torch, numpy and
safetensors alone.
"""

__version__ = "0.1.0"
