"""transformers without a download: a small BERT saved locally, then ``from_pretrained``.

    python examples/transformers_local.py          # transformers as it is
    trims run examples/transformers_local.py       # its weights come from the cache; run it twice

The first run saves the model in the temp directory and keeps it there. Every run prints how long
``from_pretrained`` took and a checksum of the model's answer, which never changes.
"""

import hashlib
import os
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging

DIRECTORY = Path(tempfile.gettempdir()) / f"trims-example-bert-{os.getuid()}"


def main() -> None:
    """Load, answer, report."""
    logging.disable_progress_bar()
    if not DIRECTORY.exists():
        torch.manual_seed(0)
        config = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8)
        unfinished = DIRECTORY.with_suffix(f".{os.getpid()}")
        BertModel(config).save_pretrained(unfinished)
        unfinished.rename(DIRECTORY)

    start = time.perf_counter()
    model = BertModel.from_pretrained(DIRECTORY).eval()
    ready = time.perf_counter()
    with torch.no_grad():
        answer = model(torch.arange(32).unsqueeze(0)).pooler_output
    checksum = hashlib.sha256(answer.numpy().tobytes()).hexdigest()[:16]
    size_bytes = sum(file.stat().st_size for file in DIRECTORY.iterdir())

    print(f"model            {size_bytes / 1e6:8.0f} MB")
    print(f"from_pretrained  {(ready - start) * 1e3:8.1f} ms")
    print(f"answer           {checksum}")


if __name__ == "__main__":
    main()
