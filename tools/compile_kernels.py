# pyright: reportMissingImports=false
"""Compiles the project's Triton kernel for NVIDIA GPUs on a machine without one, down to machine code.

    .venv-vllm-v2/bin/python tools/compile_kernels.py

Triton's interpreter accepts more than its compiler, so running a kernel in the interpreter does not show that it
compiles. Prints a line for each device generation and type of logits. It shows nothing about speed, or about results.
"""

from __future__ import annotations

import os
import sys
import warnings

import triton
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = {80: "Ampere", 90: "Hopper", 100: "Blackwell"}
WARP = 32
SIGNATURE = {
    "tokens_ptr": "*i32",
    "logprobs_ptr": "*fp32",
    "logits_stride": "i32",
    "temperatures_ptr": "*fp32",
    "seeds_ptr": "*i64",
    "positions_ptr": "*i64",
    "cached_ptr": "*i64",
    "tolerances_ptr": "*fp32",
    "vocab": "i32",
    "IS_SHAPED": "constexpr",
    "BLOCK": "constexpr",
}


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return True


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("the interpreter is in the place of the compiler: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    # vLLM's CPU build imports Triton only if it finds a backend of this name.
    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_NoDriver)
    from sortedrl.engine.vllm import verify_kernel

    del triton.backends.backends["cpu"]
    for logits in ("*bf16", "*fp16", "*fp32"):
        for capability, name in CAPABILITIES.items():
            for is_shaped in (False, True):
                constants = {"IS_SHAPED": is_shaped, "BLOCK": verify_kernel.BLOCK}
                source = ASTSource(verify_kernel._verify_kernel, SIGNATURE | {"logits_ptr": logits}, constants)
                made = triton.compile(source, target=GPUTarget("cuda", capability, WARP))
                if "cubin" not in made.asm:
                    print(f"{name}, logits {logits}: no machine code", file=sys.stderr)
                    return 1
            print(f"compiled for {name} (sm_{capability}), logits {logits}, {len(made.asm['cubin']):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
