"""An encoder of transformers: vectors of texts, pooled from those of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from carpool.wire.tensors import Array
from carpool_worker.models.hf.grouping import groups_of
from carpool_worker.models.hf.language_model import Dtype
from carpool_worker.models.hf.network import dtype_of, usable_device
from carpool_worker.models.hf.pooling import Pooling, read_pooling
from carpool_worker.models.hf.source import cannot_load, check_weights
from carpool_worker.models.hf.tokenizer import Tokenizer

TOKENS_MAX: Final = 16_384  # that are computed together, padding included
_FILES: Final = ("*.json", "*.txt", "*.model", "*.safetensors")
_OTHER_FILES: Final = ("onnx/*", "openvino/*")


class Encoder:
    """The network and the tokenizer of a folder, or of a name on the Hub. Raises ValueError and RuntimeError.

    `tokens_max`: of a text, with the special ones. `width`: numbers of a vector.
    """

    def __init__(
        self, source: str, prefix: str, device: str, *, dtype: Dtype = "auto", revision: str | None = None
    ) -> None:
        self._device = usable_device(device, source)
        disable_progress_bar()
        try:
            folder = _folder(source, revision)
        except Exception as error:  # it raises many kinds
            raise cannot_load(source, prefix, error) from error
        self.pooling = read_pooling(folder)
        of_network = folder / self.pooling.network
        self._tokenizer = Tokenizer(str(of_network), prefix)
        try:
            net, loading = AutoModel.from_pretrained(
                of_network, dtype=dtype_of(dtype, self._device), output_loading_info=True
            )
        except Exception as error:
            raise cannot_load(source, prefix, error) from error
        check_weights(source, prefix, loading["missing_keys"], unused="pooler.")
        self._net: Any = net.eval().to(self._device)
        self.width = int(net.config.hidden_size)
        limits = (
            self.pooling.tokens_max,
            self._tokenizer.tokens_max,
            getattr(net.config, "max_position_embeddings", None),
        )
        self.tokens_max = min((limit for limit in limits if limit), default=TOKENS_MAX)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, as the network takes them."""
        text = self.pooling.prompt + text
        return self._tokenizer.encode(text.lower() if self.pooling.lowers else text, adds_special=True)

    def encode(self, texts: Sequence[Sequence[int]]) -> Array:
        """The vectors of texts, given as tokens: FP32 (texts, width)."""
        vectors = np.empty((len(texts), self.width), np.float32)
        for group in groups_of([len(text) for text in texts], TOKENS_MAX):
            vectors[group] = self._encode_together([texts[index] for index in group])
        return vectors

    def _encode_together(self, texts: Sequence[Sequence[int]]) -> Any:
        longest = max(map(len, texts))
        padded = torch.tensor([[*text] + [0] * (longest - len(text)) for text in texts], device=self._device)
        lengths = torch.tensor([len(text) for text in texts], device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        with torch.inference_mode():
            hidden = self._net(input_ids=padded, attention_mask=mask).last_hidden_state.float()
            vectors = pooled(hidden, mask, self.pooling)
            return vectors.cpu().numpy()


def pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Vectors (texts, width) of those of tokens (texts, tokens, width). `mask`: 0 for padding, else 1."""
    counted = mask[:, :, None].to(hidden.dtype)
    if pooling.mode == "cls":
        vectors = hidden[:, 0]
    elif pooling.mode == "lasttoken":
        vectors = hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    elif pooling.mode == "max":
        vectors = hidden.masked_fill(counted == 0, float("-inf")).amax(1)
    else:
        count = counted.sum(1)
        vectors = (hidden * counted).sum(1) / (count if pooling.mode == "mean" else count.sqrt())
    return torch.nn.functional.normalize(vectors, dim=-1) if pooling.normalizes else vectors


def _folder(source: str, revision: str | None) -> Path:
    """The folder; that of the download, of a name on the Hub."""
    if Path(source).is_dir():
        return Path(source)
    return Path(
        snapshot_download(source, revision=revision, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES)
    )
