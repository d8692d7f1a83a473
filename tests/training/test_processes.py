"""One process or several behind one interface; compiled layers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from refusals import told
from torch import nn
from workers import DROPLESS, changed, losses, make_trainer

from exlm_mini import pretrain
from exlm_mini.config import TrainConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import recipe_names
from exlm_mini.training import processes
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.processes import (
    Engine,
    check_spread,
    choose_device,
    is_in_bf16,
    start_engine,
)

CPU = torch.device("cpu")
LAUNCHED = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
}  # fmt: skip


# ---- which processes there are ----


def test_without_a_launcher_there_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # some machines set it for all programs
    engine = start_engine(TrainConfig(device="cpu"))
    assert (type(engine), engine.rank, engine.world_size) == (Engine, 0, 1)
    assert (engine.is_main, engine.device) == (True, CPU)


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [
        ("cuda:1", 2, ["cuda:1 is one GPU", "use cuda or auto"]),
        ("auto", 1, ["more processes than GPUs (1); use --nproc-per-node 1"]),
        ("tpu", 0, ["known: auto, cpu, cuda"]),
    ],
)
def test_processes_take_one_gpu_each(device, num_gpus, words, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    told(lambda: start_engine(TrainConfig(device=device)), *words)


def test_processes_keep_to_the_micro_batches_of_the_settings():
    told(
        lambda: check_spread(changed(batch_size=6, micro_batch_size=None), 4),
        "--nproc-per-node 3",
    )
    tokens = changed(batch_size=32, micro_batch_size=None, batch_tokens=60)
    check_spread(tokens, 1)
    told(lambda: check_spread(tokens, 2), "needs train.micro_batch_tokens, such as 30")


@pytest.mark.parametrize(
    ("generation", "is_half"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_gpus_since_ampere_work_in_bf16(generation, is_half, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    assert is_in_bf16("auto", torch.device("cuda")) is is_half


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_told(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    told(lambda: choose_device(name), name)


# ---- batches of any shape on a GPU ----


def test_attention_on_a_gpu_needs_no_plan_for_a_new_shape(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert processes.choose_device("cpu") == CPU
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert processes.choose_device("cuda") == torch.device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_how_a_gpus_memory_is_taken_is_set_where_it_was_not(name, monkeypatch):
    for either in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(either, "the user's")  # so that monkeypatch restores it
        if either != name:
            monkeypatch.delenv(either)
    assert pretrain.main(["--recipe", "unknown"]) == 2
    ours = None if name == "PYTORCH_CUDA_ALLOC_CONF" else "expandable_segments:True"
    expected = "the user's" if name == "PYTORCH_ALLOC_CONF" else ours
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


# ---- compiled layers ----


@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_layer_is_compiled_where_asked_for(is_compiled, packs, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    trainer = make_trainer(changed(compile=is_compiled), packs, tmp_path)
    assert compiled == (list(trainer.model.encoder.layers) if is_compiled else [])


@pytest.mark.slow
def test_compiled_layers_learn_the_same(packs, tmp_path):
    config = changed(DROPLESS, steps=1, micro_batch_size=None)
    runs = {
        is_compiled: make_trainer(
            changed(config, compile=is_compiled), packs, tmp_path / str(is_compiled)
        )
        for is_compiled in (False, True)
    }
    assert losses(runs[True]) == pytest.approx(losses(runs[False]), rel=1e-5)
    plain, compiled = (
        load_checkpoint(run.output / "checkpoints/step-000001") for run in runs.values()
    )
    for name, moment in plain.tensors["optimizer"].items():
        torch.testing.assert_close(
            compiled.tensors["optimizer"][name], moment, rtol=1e-3, atol=1e-6
        )
    assert runs[True].evaluation.bits == pytest.approx(runs[False].evaluation.bits, rel=1e-5)


# ---- SLURM ----

SBATCH = Path(__file__).resolve().parents[2] / "book" / "slurm" / "pretrain.sbatch"


def test_the_slurm_example_is_a_script_that_names_real_settings():
    text = SBATCH.read_text()
    result = subprocess.run(["bash", "-n", SBATCH], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    values = dict(re.findall(r"^(recipe|output)=(\S+)", text, re.M))
    words = (
        text.replace("\\\n", " ").partition("-m exlm_mini.pretrain")[2].split("&")[0].split()
    )
    words = [values.get(word.strip('"$'), word) for word in words]
    request = parse(words)
    assert request.config.recipe in recipe_names()
    assert request.options.output == Path(values["output"])
    # There is a process for each GPU of the job, and the batch divides among them.
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert options["ntasks-per-node"] == "1"
    (per_node,) = re.findall(r"--nproc-per-node (\d+)", text)
    assert per_node == options["gpus-per-node"]
    assert options["signal"].startswith("B:TERM@")
    check_spread(request.config, int(options["nodes"]) * int(per_node))


def test_a_restarted_process_reads_nothing_of_an_earlier_start(monkeypatch):
    kept, met = torch.distributed.HashStore(), []  # torchrun's store outlives its processes
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url: iter([(kept, 0, 1)]))
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, store, **options: met.append(store),
    )
    for start in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        processes._connect(CPU)
    first, second, its_mate = met
    first.set("address", "of a process that was killed")
    assert not second.check(["address"])
    second.set("address", "of its successor")
    assert its_mate.get("address") == b"of its successor"
