"""Writes tiny checkpoints in Hugging Face layout, with random weights that depend on names only.

A layout is the shape of each tensor by its name in the checkpoint. For families that the
transformers library knows, its model class gives the layout in which they are published; for the
others `layouts.py` spells it out.
"""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Layout = Mapping[str, tuple[int, ...]]

VOCAB = 320
_GAIN = 1.6  # large enough for distinct tokens, small enough for FP32 differences to stay small
_NEAR_ONE = re.compile(r"(norm\w*|scale|scalar)(\.weight)?$")
# A configuration class that transformers does not know travels with the checkpoint, as it does in
# the family's own repository.
_CONFIGURATION = '''"""Configuration of a tiny {model_type}."""

from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "{model_type}"
'''


def write(
    folder: Path,
    config: dict[str, Any],
    layout: Layout,
    own_class: bool = False,
    pack: Callable[[str, Any], dict[str, Any]] | None = None,
) -> Path:
    """Write config.json and model.safetensors; the same arguments give the same bytes.

    `own_class` adds a configuration class, for a model type that nobody registered. `pack` gives the
    tensors that the file holds in place of one in FP32.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if own_class:
        text = _CONFIGURATION.format(model_type=config["model_type"])
        (folder / "configuration_tiny.py").write_text(text)
        config = {**config, "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}
    tensors = {}
    for name, shape in layout.items():
        values = _random(name, shape)
        tensors.update({name: values} if pack is None else pack(name, values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_transformers(
    folder: Path,
    model_class: str,
    config_class: str,
    settings: dict[str, Any],
    extra: dict[str, Any],
    renamed: tuple[str, str] | None = None,
    unpublished: str = "",
) -> Path:
    """The checkpoint that transformers saves for these settings, with our weights in it.

    `extra` entries go into config.json only, where upstream reads more than the class knows;
    `renamed` replaces a part of tensor names, and names that match `unpublished` are left out.
    """
    import transformers
    from safetensors import safe_open

    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        published = json.loads((Path(saved) / "config.json").read_text())
        with safe_open(Path(saved) / "model.safetensors", framework="pt") as file:
            layout = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    if unpublished:
        layout = {name: shape for name, shape in layout.items() if not re.search(unpublished, name)}
    if renamed is not None:
        layout = {name.replace(*renamed): shape for name, shape in layout.items()}
    return write(folder, {**published, "dtype": "float32", **extra}, layout)


def _random(name: str, shape: tuple[int, ...]) -> Any:
    """Values by the role that the name tells: norms near 1, biases near 0, matrices by fan-in."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) <= 1:
        offset = 1.0 if _NEAR_ONE.search(name) else 0.0
        return offset + 0.1 * noise
    if "embed" in name:
        return noise
    return _GAIN * noise / shape[-1] ** 0.5
