"""A tokenizer and a data set for TorchTitan, which ships neither: both from Python's own documentation."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARY = 2048
"""The debug model's."""


def make(directory: Path) -> None:
    """Writes directory/tokenizer and directory/data; the same files every time."""
    from tokenizers import ByteLevelBPETokenizer

    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(topics, vocab_size=VOCABULARY, special_tokens=[BEGIN, END], show_progress=False)
    for name in ("tokenizer", "data"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True, "add_eos_token": True}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "data" / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in topics))
