"""Checks of the vLLM engine on real GPUs; `gpu_acceptance.py` runs each as a command of its own.

    python -m tools.gpu_checks device|graphs|probe|speed|tensor-parallel|nccl [--model smollm2-135m]

Each prints one JSON object with its figures and ends with exit code 1 if a promise is broken. The functions that judge
take plain values, so that tests judge values of machines that they do not have. None of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.replay_probe import ReplayEvidence, probe_replay
from sortedrl.engine.vllm.worker_report import WorkerReport

NUM_REQUESTS, NUM_TOKENS, MAX_LENGTH = 64, 128, 256
PROBE_TOKENS, PROBE_LENGTH = 4096, 640  # eight answers, prompts of up to 64 included: 8 * 576 >= 4096
NCCL_S = 120.0
LEAST_SPEED = 0.8  # of stock vLLM's tokens/s: the engine reads every token's log-prob in this process


class BrokenPromise(Exception):
    """What is wrong on this machine."""


# ---- judgements, on plain values -------------------------------------------------------------------------------------


def judge_device(reports: Sequence[WorkerReport], weight_bytes: int) -> dict[str, Any]:
    """The model must be in the memory of a GPU."""
    for report in reports:
        if not report.device.startswith(("cuda", "xpu")):
            raise BrokenPromise(f"a worker computes on {report.device}")
        if report.allocated_bytes * len(reports) < weight_bytes:
            raise BrokenPromise(
                f"{report.allocated_bytes / 2**30:.2f} GiB are allocated on {report.device}, less than its share of "
                f"{weight_bytes / 2**30:.2f} GiB of weights"
            )
    return {"devices": [r.device for r in reports], "gib": [round(r.allocated_bytes / 2**30, 2) for r in reports]}


def judge_graphs(reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """Decoding must be stock vLLM's: V2, graphs, asynchronous scheduling."""
    for report in reports:
        if not report.is_v2:
            raise BrokenPromise("vLLM runs its V1 model runner")
        if report.graph_mode == "NONE":
            raise BrokenPromise("there are no CUDA graphs")
        if not report.is_async:
            raise BrokenPromise("scheduling is not asynchronous")
        if report.noise_fault is not None:
            raise BrokenPromise(report.noise_fault)
    return {"graphs": reports[0].graph_mode, "attention": list(reports[0].attention_backends)}


def judge_probe(reports: Sequence[WorkerReport], evidence: ReplayEvidence) -> dict[str, Any]:
    if not all(report.is_batch_invariant for report in reports):
        raise BrokenPromise("vLLM does not compute independently of the batch")
    if not evidence.is_exact:
        raise BrokenPromise(f"replay in {reports[0].dtype} is not exact: {evidence}")
    if evidence.num_tokens < PROBE_TOKENS:
        raise BrokenPromise(f"{evidence.num_tokens} tokens were verified, and not {PROBE_TOKENS}")
    return {"replay": str(evidence), "dtype": reports[0].dtype}


def judge_speed(ours: float, stock: float) -> dict[str, Any]:
    """Tokens per second of this engine and of stock vLLM, on the same requests."""
    if ours < LEAST_SPEED * stock:
        raise BrokenPromise(f"{ours:,.0f} tokens/s, and stock vLLM has {stock:,.0f}")
    return {"tokens_per_s": round(ours), "stock_tokens_per_s": round(stock), "share": round(ours / stock, 3)}


def judge_same(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]], what: str) -> dict[str, Any]:
    """Answers must be equal, token for token."""
    different = sum(list(a) != list(b) for a, b in zip(one, other, strict=True))
    if different:
        raise BrokenPromise(f"{different} of {len(one)} answers differ {what}")
    return {"answers": len(one), "different": different}


# ---- what they are judged on -----------------------------------------------------------------------------------------


def load(name: str) -> Any:
    from sortedrl.run.builders.parts import named_model_path
    from sortedrl.run.checkpoint_folder import load_model

    return load_model(named_model_path(name))[0]


def make_engine(model: Any, **changes: Any) -> Any:
    import torch

    from sortedrl.engine.vllm.engine import VllmEngine

    settings = {"slots": NUM_REQUESTS, "max_length": MAX_LENGTH, "dtype": torch.bfloat16} | changes
    return VllmEngine(model, **settings)


def make_requests(vocab: int) -> list[Request]:
    import random

    rng = random.Random(0)
    return [
        Request(
            sample=index,
            attempt=0,
            prompt=[rng.randrange(vocab) for _ in range(64)],
            budget=NUM_TOKENS,
            seed=rng.randrange(1 << 63),
            sampling=Sampling(),
        )
        for index in range(NUM_REQUESTS)
    ]


def decode(engine: Any, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Answers and tokens per second; the first round warms up."""
    from sortedrl.testing import Caller

    Caller(engine).serve(requests)
    began = time.perf_counter()
    answers = Caller(engine).serve(requests)
    seconds = time.perf_counter() - began
    tokens = [answers[request.sample].tokens for request in requests]
    return tokens, sum(map(len, tokens)) / seconds


def decode_stock(folder: str, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """The same by vLLM alone."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(folder, dtype="bfloat16", max_model_len=MAX_LENGTH, max_num_seqs=NUM_REQUESTS, skip_tokenizer_init=True)
    prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    params = [
        SamplingParams(seed=r.seed, max_tokens=r.budget, ignore_eos=True, logprobs=0, detokenize=False)
        for r in requests
    ]
    llm.generate(prompts, params, use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds


def check_device(name: str) -> dict[str, Any]:
    model = load(name)
    engine = make_engine(model)
    try:
        return judge_device(engine.workers, sum(p.numel() for p in model.parameters()) * 2)
    finally:
        engine.close()


def check_graphs(name: str) -> dict[str, Any]:
    engine = make_engine(load(name))
    try:
        return judge_graphs(engine.workers)
    finally:
        engine.close()


def check_probe(name: str) -> dict[str, Any]:
    from sortedrl.engine.vllm.runner_choice import RunnerWishes

    model = load(name)
    engine = make_engine(model, max_length=PROBE_LENGTH, wishes=RunnerWishes(batch_invariant="on"))
    try:
        evidence = probe_replay(engine, vocab=model.config.vocab_size, max_length=PROBE_LENGTH, num_tokens=PROBE_TOKENS)
        return judge_probe(engine.workers, evidence)
    finally:
        engine.close()


def check_speed(name: str) -> dict[str, Any]:
    import tempfile

    import torch

    model = load(name).to(torch.bfloat16)
    requests = make_requests(model.config.vocab_size)
    engine = make_engine(model)
    try:
        _, ours = decode(engine, requests)
    finally:
        engine.close()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _, stock = decode_stock(folder, requests)
    return judge_speed(ours, stock)


def make_even_model() -> Any:
    """A Llama with random weights whose attention heads can be divided by two, unlike the nine of SmolLM2-135M."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=64)).eval()


def check_tensor_parallel(_: str) -> dict[str, Any]:
    """The same answers on one GPU and on two. In float32: sums over two GPUs round otherwise, too little to matter."""
    import torch

    model = make_even_model()
    requests = make_requests(model.config.vocab_size)
    answers, devices = [], 0
    for width in (1, 2):
        engine = make_engine(model, tensor_parallel=width, dtype=torch.float32)
        try:
            answers.append(decode(engine, requests)[0])
            devices = len(engine.workers)
        finally:
            engine.close()
    return {**judge_same(*answers, what="between one GPU and two"), "workers": devices}


def check_nccl(_: str) -> dict[str, Any]:
    """Two ranks add up a tensor of 256 MiB over NCCL."""
    figures = run_ranks(_reduce_on_rank, NCCL_S)
    if any(figure["sum"] != 3.0 for figure in figures):
        raise BrokenPromise(f"NCCL added 1 and 2 to {[figure['sum'] for figure in figures]}")
    return {"gb_per_s": round(max(figure["gb_per_s"] for figure in figures), 1)}


def run_ranks(target: Callable[[int, Any], None], limit_s: float) -> list[dict[str, Any]]:
    """What two processes put into their queue. They are ended in any case: one that hangs would never be joined."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    figures = context.Queue()
    ranks = [context.Process(target=target, args=(rank, figures), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit_s
    try:
        return [figures.get(timeout=max(0.0, deadline - time.monotonic())) for _ in ranks]
    except queue.Empty:
        raise BrokenPromise(f"two ranks did not meet within {limit_s:g} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _reduce_on_rank(rank: int, figures: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    tensor = torch.full((64 << 20,), rank + 1.0, device="cuda")
    dist.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    figures.put({"sum": tensor[0].item(), "gb_per_s": tensor.numel() * 4 / seconds / 1e9})
    dist.destroy_process_group()


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "device": check_device,
    "graphs": check_graphs,
    "probe": check_probe,
    "speed": check_speed,
    "tensor-parallel": check_tensor_parallel,
    "nccl": check_nccl,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--model", default="smollm2-135m", help="as model.path in a configuration")
    options = parser.parse_args()
    try:
        print(json.dumps(CHECKS[options.check](options.model)))
    except BrokenPromise as broken:
        print(json.dumps({"broken": str(broken)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
