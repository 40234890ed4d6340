"""The parts of the vLLM engine that run without vLLM: weight files, replay results, sampling arguments."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.engine.vllm import core as vllm_core
from sortedrl.engine.vllm import weights as vllm_weights
from sortedrl.engine.vllm.abort_flag import AbortFlag, StepAborter
from sortedrl.engine.vllm.engine import needed_kv_bytes
from sortedrl.engine.vllm.process import VllmSettings
from sortedrl.engine.vllm.request import ReplayTurn, VllmRequest
from sortedrl.engine.vllm.request import RequestState as State
from sortedrl.engine.vllm.runner_choice import CPU_PLAN, RunnerPlan
from sortedrl.engine.vllm.sampling_args import SamplingArgs
from sortedrl.engine.vllm.segments import note_segments
from sortedrl.engine.vllm.weights import WeightFolder
from sortedrl.errors import ConfigError, EngineError
from sortedrl.records import FinishReason, Mode
from sortedrl.run.builders.parts import build_engine
from sortedrl.run.doctor import examine
from tests.support.tiny_models import add_noise, tiny_model


def entry(**logprobs: float) -> dict[int, SimpleNamespace]:
    return {int(token.strip("t")): SimpleNamespace(logprob=value) for token, value in logprobs.items()}


def make_output(
    tokens: list[int], *, logprob: float = -0.5, reason: str | None = None, prompt: list | None = None
) -> SimpleNamespace:
    """One of vLLM's outputs, with the attributes that a VllmRequest reads."""
    logprobs = [{token: SimpleNamespace(logprob=logprob)} for token in tokens]
    answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(outputs=[answer], prompt_logprobs=prompt, num_cached_tokens=0)


def make_request(cached: tuple[int, ...] = (), mode: Mode = Mode.FRESH, budget: int = 4, **changes) -> VllmRequest:
    request = Request(sample=1, attempt=0, prompt=[8, 9], budget=budget, seed=3, sampling=Sampling(), mode=mode)
    request.cached = cached
    for name, value in changes.items():
        setattr(request, name, value)
    return VllmRequest.begin(Attempt.begin(request))


# Weights


def test_a_tied_head_is_written_once_and_updates_reach_the_file() -> None:
    model = tiny_model()  # its head is tied to the embedding
    folder = WeightFolder(model, torch.float32)
    names = set(load_file(folder.weights))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    add_noise(model, 0.1, seed=1)
    folder.write(model)
    written = load_file(folder.weights)
    assert set(written) == names
    assert torch.equal(written["model.embed_tokens.weight"], model.lm_head.weight)
    folder.close()
    assert not folder.path.exists()


def test_weights_are_written_in_the_engines_type() -> None:
    model = tiny_model("qwen3")
    folder = WeightFolder(model, torch.bfloat16)
    written = load_file(folder.weights)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert torch.equal(written["lm_head.weight"], model.lm_head.weight.to(torch.bfloat16))
    with pytest.raises(EngineError, match="publish the model that the engine was created with"):
        folder.write(tiny_model("gpt-neox"))
    folder.close()


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "SHARED_MEMORY", tmp_path)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    orphan = tmp_path / f"sortedrl-vllm-{int(gone.stdout)}-x"
    others = [tmp_path / f"sortedrl-vllm-{os.getpid()}-y", tmp_path / "something-else"]
    for folder in (orphan, *others):
        folder.mkdir()
    left = SharedMemory(create=True, size=4096)  # what vLLM's processes could not remove when they were killed too
    left.close()
    note_segments(orphan, {left.name})
    mine = WeightFolder(tiny_model(), torch.float32)
    assert not orphan.exists()
    with pytest.raises(FileNotFoundError):
        SharedMemory(left.name)
    assert all(folder.exists() for folder in others)
    assert mine.path.parent == tmp_path
    mine.close()


# Sampling arguments for the worker


def test_sampling_args_survive_the_way_to_the_worker() -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    sampling_args = SamplingArgs(seed=(1 << 63) - 1, num_cached=5, sampling=sampling, tolerance=0.1)
    assert SamplingArgs.from_extra_args(sampling_args.to_extra_args()) == sampling_args
    assert SamplingArgs.from_extra_args({"other": 1}) is None
    assert SamplingArgs.from_extra_args(None) is None


def test_params_are_what_the_request_asks_for() -> None:
    resumed = make_request((4, 5, 6), Mode.RESUME, budget=10, sampling=Sampling(temperature=0.6, stop_tokens=(1, 2)))
    params = resumed.sampling_params(dict, "delta")
    assert (params["max_tokens"], params["temperature"], params["stop_token_ids"]) == (7, 0.6, [1, 2])
    assert (params["prompt_logprobs"], params["logprobs"], params["ignore_eos"]) == (None, 0, True)
    assert SamplingArgs.from_extra_args(params["extra_args"]) == SamplingArgs(
        seed=3, num_cached=3, sampling=Sampling(temperature=0.6)
    )
    assert make_request((4, 5), Mode.REPLAY).sampling_params(dict, "delta")["prompt_logprobs"] == 1


# Outputs of vLLM


def test_a_replay_keeps_tokens_up_to_the_first_rejected_one() -> None:
    kept = ReplayTurn.read([4, 5], [entry(t4=-1.0), entry(t5=-2.0)], [False] * 2)
    assert (kept.accepted, kept.logprobs, kept.drawn) == (2, [-1.0, -2.0], None)
    positions = [entry(t4=-1.0), entry(t5=-2.0, t7=-0.5), entry(t6=-0.1)]
    cut = ReplayTurn.read([4, 5, 6], positions, [False] * 3)
    assert (cut.accepted, cut.logprobs, cut.drawn) == (1, [-1.0], (7, -0.5))
    fed = ReplayTurn.read([4, 5, 6], positions, [False, True, False])
    assert (fed.accepted, fed.logprobs, fed.drawn) == (3, [-1.0, 0.0, -0.1], None)


def test_a_request_ends_as_vllm_says() -> None:
    plain = make_request()
    assert plain.apply_output(make_output([3, 2]), 1.0) is State.RUNNING
    assert plain.apply_output(make_output([3, 3], reason="length"), 2.0) is State.FINISHED
    assert (plain.attempt.tokens, plain.attempt.ending) == ([3, 2, 3, 3], FinishReason.LENGTH)
    assert (plain.attempt.last_delivery_s, plain.clock) == (1.0, 2.0)
    stopped = make_request()
    assert stopped.apply_output(make_output([3], reason="abort"), 1.0) is State.STOPPED
    assert make_request().apply_output(make_output([3], logprob=float("nan")), 1.0) is State.NON_FINITE
    assert make_request().apply_output(make_output([], reason="error"), 1.0) is State.FAILED


def test_a_stop_string_ends_a_request_that_vllm_still_decodes() -> None:
    request = Request(sample=1, attempt=0, prompt=[8], budget=9, seed=3, sampling=Sampling(stop_strings=("bc",)))
    stopped = VllmRequest.begin(Attempt.begin(request, lambda tokens: "".join("abcde"[token] for token in tokens)))
    assert stopped.apply_output(make_output([2, 1]), 1.0) is State.RUNNING
    assert (
        stopped.apply_output(make_output([2, 4]), 2.0) is State.FINISHED
    )  # two at once: the second is not part of the answer
    assert (stopped.attempt.tokens, stopped.attempt.ending, stopped.num_decoded) == ([2, 1, 2], FinishReason.STOP, 1)
    assert stopped.is_open


def test_an_aborted_step_writes_nothing() -> None:
    stopped = make_request()
    assert stopped.apply_output(make_output([3]), 1.0) is State.RUNNING
    stopped.is_stopped = True
    assert stopped.apply_output(make_output([0], logprob=float("nan")), 2.0) is State.RUNNING
    assert stopped.apply_output(make_output([0], logprob=float("nan"), reason="stop"), 3.0) is State.STOPPED
    assert (stopped.attempt.tokens, stopped.num_decoded) == ([3], 0)


class Runner:
    """As much of vLLM's model runner as a StepAborter uses."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.model.compute_logits = lambda hidden_td: torch.ones(len(hidden_td), 7)
        sizes = {"get_hidden_size": lambda: 4, "get_vocab_size": lambda: 7}
        self.model_config = SimpleNamespace(dtype=torch.float32, **sizes)
        self.num_layers = 0

    def _model_forward(self, positions: torch.Tensor) -> torch.Tensor:
        hidden_td = torch.ones(len(positions), 4)
        for layer in self.model.layers:
            hidden_td = layer(hidden_td)
            self.num_layers += 1
        return hidden_td


def test_a_raised_flag_ends_the_forward_pass_before_the_next_layer(tmp_path: Path) -> None:
    mine, theirs = AbortFlag(tmp_path / "abort"), AbortFlag(tmp_path / "abort")
    runner = Runner()
    aborter = StepAborter(runner, theirs)
    whole = runner._model_forward(positions=torch.arange(2))
    assert (runner.num_layers, aborter.is_aborted) == (3, False)
    assert runner.model.compute_logits(whole).tolist() == [[1.0] * 7] * 2
    runner.model.layers[0].register_forward_hook(lambda *_: raised.enter_context(mine.raised()))
    with ExitStack() as raised:
        broken = runner._model_forward(positions=torch.arange(2))
    assert (runner.num_layers, aborter.is_aborted) == (4, True)
    assert broken.shape == whole.shape
    assert runner.model.compute_logits(broken).tolist() == [[0.0] * 7] * 2
    assert not theirs.is_raised


def test_a_replay_continues_after_the_tokens_that_it_keeps() -> None:
    prompt = [None, entry(t9=0.0)]
    whole = make_request((4, 5), Mode.REPLAY)
    assert whole.apply_output(make_output([6], prompt=[*prompt, entry(t4=-1.0), entry(t5=-2.0)]), 1.0) is State.RUNNING
    assert (whole.attempt.tokens, whole.attempt.verified, whole.num_decoded) == ([4, 5, 6], 2, 1)
    again = make_request((4, 5), Mode.REPLAY)
    assert (
        again.apply_output(make_output([6], prompt=[*prompt, entry(t4=-1.0, t3=-0.2), entry(t5=-2.0)]), 1.0)
        is State.RESUBMIT
    )
    assert (again.attempt.tokens, again.attempt.verified, again.is_open) == ([3], 0, True)
    # A complete answer: the token that vLLM draws after it is not part of it.
    done = make_request((4, 5), Mode.REPLAY, budget=2)
    assert not done.is_complete
    assert (
        done.apply_output(make_output([6], reason="length", prompt=[*prompt, entry(t4=-1.0), entry(t5=-2.0)]), 1.0)
        is State.FINISHED
    )
    assert done.attempt.tokens == [4, 5]


@pytest.mark.parametrize("prompt", [None, [None], [None, entry(t9=0.0), entry(t4=-1.0)]])
def test_a_replay_that_is_stopped_before_its_verification_keeps_its_cached_tokens(prompt: list | None) -> None:
    """The output of an aborted request has the prompt's log-probs up to where vLLM has read it: at first [None]."""
    stopped = make_request((4, 5), Mode.REPLAY)
    stopped.is_stopped = True
    # The step was aborted: its token is no answer, whatever its log-prob.
    assert stopped.apply_output(make_output([6], prompt=prompt), 1.0) is State.RUNNING
    assert stopped.apply_output(make_output([], reason="abort", prompt=prompt), 2.0) is State.STOPPED
    assert (stopped.attempt.tokens, stopped.num_decoded, stopped.replay) == ([4, 5], 0, None)
    assert stopped.attempt.deliver(version=3, clock=2.0, decode_s=2.0) is None
    # A complete answer asks for one token more, so an aborted step ends its request.
    done = make_request((4, 5), Mode.REPLAY, budget=2)
    done.is_stopped = True
    assert done.apply_output(make_output([0], reason="length", prompt=prompt), 1.0) is State.STOPPED
    assert make_request((4, 5), Mode.REPLAY).apply_output(make_output([], reason="error"), 1.0) is State.FAILED
    with pytest.raises(AssertionError, match="not verified"):
        make_request((4, 5), Mode.REPLAY).apply_output(make_output([6], reason="length", prompt=prompt), 1.0)


# Missing or unsuitable parts


def pretend_installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def look_up(name: str) -> str:
        if name not in vllm_core.DISTRIBUTIONS:
            return real(name)
        if version is None or name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", look_up)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"needs the extra vllm: pip install 'sortedrl\[vllm\]'"),
        ("0.31.9", r"vLLM 0\.31\.9 is installed.*supports 0\.32"),
    ],
)
def test_a_missing_or_unsupported_vllm_is_named(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, version)
    config = SortedConfig(engine={"kind": "vllm"})
    with pytest.raises(EngineError, match=message):
        build_engine(config, tiny_model(), config.knobs)


def test_replay_in_bfloat16_is_refused_with_the_alternatives() -> None:
    config = SortedConfig(engine={"kind": "vllm", "dtype": "bfloat16"}, schedule={"strategy": "sorted-replay"})
    with pytest.raises(ConfigError, match=r"engine\.dtype = float32, or .* sorted-partial .* engine\.replay_tolerance"):
        build_engine(config, tiny_model(), config.knobs)


def test_memory_for_all_slots_is_counted_in_blocks() -> None:
    # Two layers, four heads of 8: 512 bytes a token. Three answers of 40 take two blocks of 32 each; one is spare.
    assert needed_kv_bytes(Geometry.of(tiny_model()), 3, 40, torch.float32) == 7 * 32 * 512
    assert SortedConfig(engine={"kv_gb": 0.5}).engine.kv_gb == 0.5
    with pytest.raises(ConfigError, match=r"engine\.kv_gb"):
        SortedConfig(engine={"kv_gb": 0})


def test_workers_on_cpus_divide_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(9), raising=False)

    def threads(workers: int, plan: RunnerPlan = CPU_PLAN) -> str | None:
        sizes = {"slots": 1, "max_length": 8, "kv_bytes": 1, "block_size": 32, "dtype": "float32"}
        settings = VllmSettings(folder=tmp_path, plan=plan, tensor_parallel=workers, **sizes)
        return settings.environment.get("OMP_NUM_THREADS")

    assert [threads(workers) for workers in (1, 2, 4, 16)] == [None, "4", "2", "1"]
    assert threads(2, replace(CPU_PLAN, device="cuda")) is None


def test_processes_on_gpus_are_not_copies_of_this_one(tmp_path: Path) -> None:
    """It may have used CUDA, by a look for GPUs."""
    sizes = {"slots": 1, "max_length": 8, "kv_bytes": 1, "block_size": 32, "dtype": "float32"}
    plan = replace(CPU_PLAN, device="cuda")
    environment = VllmSettings(folder=tmp_path, plan=plan, **sizes).environment
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_workers_of_a_split_engine_are_processes_of_one_machine_or_actors_of_several(tmp_path: Path) -> None:
    """vLLM's own choice in a Ray actor is its Ray executor, which refuses a bundle of more than one GPU."""

    def executor(workers: int, device: str = "cuda", **changes: Any) -> str | None:
        sizes = {"slots": 1, "max_length": 8, "kv_bytes": 1, "block_size": 32, "dtype": "float32"}
        plan = replace(CPU_PLAN, device=device)
        settings = VllmSettings(folder=tmp_path, plan=plan, tensor_parallel=workers, **sizes, **changes)
        return vllm_core.engine_arguments(settings).get("distributed_executor_backend")

    assert [executor(workers) for workers in (1, 2)] == [None, "mp"]
    assert executor(2, is_spread=True) == "ray"
    assert str(executor(2, "cpu")).endswith("PatientExecutor")


def test_doctor_reports_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def report() -> tuple[bool, str]:
        (found,) = (finding for finding in examine() if finding.name == "engine vllm")
        return found.is_fine, found.text

    pretend_installed(monkeypatch, None)
    assert report()[0]
    assert "needs the extra vllm" in report()[1]
    pretend_installed(monkeypatch, "0.32.4")
    assert report()[0]
    assert "vLLM 0.32.4" in report()[1]
    pretend_installed(monkeypatch, "1.0.0")
    assert not report()[0]
    path = tmp_path / "run.toml"
    path.write_text('[engine]\nkind = "vllm"\n', encoding="utf-8")
    (found,) = (finding for finding in examine(path) if finding.name == "model")
    assert not found.is_fine
    assert "this release supports 0.32" in found.text
