"""``train.precision auto``: what it comes to, and that it is asked for once per machine."""

import dataclasses

import pytest
import torch

from exlm_mini.config import ModelConfig, RunConfig, TrainConfig
from exlm_mini.training import precision
from exlm_mini.training.precision import LEAST_GAIN, WIDTHS, cpu_gain, with_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def asked(width: int, name: str = "auto") -> RunConfig:
    model = ModelConfig(width=width, num_heads=1)
    return RunConfig(model=model, train=TrainConfig(precision=name))


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """An empty cache, and a list: the gains to be measured, taken from its end."""
    gains = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "_measured_gain", lambda *asked: gains.pop())
    return gains


def chosen(config: RunConfig, device: torch.device) -> str:
    found = with_precision(config, device)
    assert dataclasses.replace(found, train=config.train) == config
    return found.train.precision


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")]
)
def test_auto_is_bf16_on_a_gpu_that_has_it(timed, monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen(asked(8), GPU) == name


@pytest.mark.parametrize(("gain", "name"), [(LEAST_GAIN, "bf16"), (0.99 * LEAST_GAIN, "fp32")])
def test_auto_is_the_faster_on_a_cpu(timed, gain, name):
    timed.append(gain)
    assert chosen(asked(WIDTHS[0]), CPU) == name
    assert not timed


def test_a_narrow_model_is_float32_without_being_timed(timed):
    assert chosen(asked(WIDTHS[0] - 8), CPU) == "fp32"


def test_a_width_and_a_number_of_threads_are_timed_once(timed):
    timed += [1.25, 1.5, 2.0]
    for _ in range(2):
        assert cpu_gain(192, 1) == 2.0
        assert cpu_gain(384, 1) == 1.5
        assert cpu_gain(192, 2) == 1.25


def test_a_model_stands_with_the_widest_that_is_not_wider(monkeypatch):
    timed = []
    monkeypatch.setattr(precision, "cpu_gain", lambda width, threads: timed.append(width) or 2)
    for width in (192, 380, 384, 2**30):
        assert chosen(asked(width), CPU) == "bf16"
    assert timed == [192, 192, 384, 768]
    assert chosen(asked(512, "fp32"), CPU) == "fp32"


@pytest.mark.parametrize("content", [b"", b'"fast"'])
def test_a_damaged_cache_is_measured_again(timed, content, tmp_path):
    timed += [1.5, 2.0]
    assert cpu_gain(192, 1) == 2.0
    (file,) = (tmp_path / "cache" / "exlm_mini").iterdir()
    file.write_bytes(content)
    assert [cpu_gain(192, 1) for _ in range(2)] == [1.5, 1.5]


def test_where_bf16_is_emulated_little_of_it_is_timed(monkeypatch):
    """A layer of 768 would take minutes."""
    clock, calls = [0.0], []

    class Slow(precision.EncoderLayer):
        def forward(self, x_BTD, *others):
            calls.append(x_BTD.shape[0] * x_BTD.shape[1])
            clock[0] += 10.0 if torch.is_autocast_enabled("cpu") else 1.0
            return x_BTD

    monkeypatch.setattr(precision, "EncoderLayer", Slow)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: clock[0])
    assert precision._measured_gain(64, 1) == 0.1
    assert max(calls) <= 32 and len(calls) == 4
    monkeypatch.setattr(precision, "HOPELESS", 0.1)
    assert precision._measured_gain(64, 1) == 0.1
    assert max(calls) == 8 * 128


def test_the_measurement_leaves_random_numbers_and_threads_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert 0 < precision._measured_gain(64, threads + 1) < float("inf")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
