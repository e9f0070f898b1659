"""TorchTitan's own debug model with the one change that a CPU needs: FlexAttention has no backward there."""

from __future__ import annotations

import os

from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def cpu_debug() -> Trainer.Config:
    """`--module tests.titan.config --config cpu_debug`; tokenizer and data from TITAN_ASSETS."""
    config = llama3_debugmodel()
    assert config.model_spec is not None
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    assets = os.environ["TITAN_ASSETS"]
    config.hf_assets_path = f"{assets}/tokenizer"
    config.dataloader.dataset_path = f"{assets}/data"
    config.validator.freq = 1000
    return config
