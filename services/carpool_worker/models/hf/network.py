"""A causal language model of transformers: prefills prompts, and steps all texts together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from carpool_worker.models.hf.choosing import choose
from carpool_worker.models.hf.grouping import groups_of
from carpool_worker.models.hf.joined_cache import JoinedCache, Row, columns_free
from carpool_worker.models.hf.language_model import PREFIX, Dtype
from carpool_worker.models.hf.order import Draw, Sampling
from carpool_worker.models.hf.source import cannot_load, check_weights

PREFILL_TOKENS_MAX: Final = 8192  # that are padded together: their mask grows with the square of the longest
KEPT_LAYERS: Final = ("DynamicLayer", "DynamicSlidingWindowLayer")  # whose whole state is keys and values

# By which share of the spread of the numbers they may differ between a text alone and one that is padded.
ROUNDING_MAX: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_TRIED_LENGTHS: Final = (2, 7)


class Network:
    """The network of a folder, or of a name on the Hub, on one device. Raises ValueError and RuntimeError.

    `context`: tokens of a prompt and its text together. `ends`: tokens that end a text. `usual`: how the
    model samples where a request says nothing.
    """

    def __init__(
        self,
        source: str,
        device: str,
        *,
        dtype: Dtype = "auto",
        context: int | None = None,
        attention: str | None = None,
        revision: str | None = None,
        slots: int = 1,
    ) -> None:
        """`slots`: how many texts are generated together at most."""
        self._device = usable_device(device, source)
        self._source = source
        self._slots = slots
        disable_progress_bar()
        try:
            net, loading = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype_of(dtype, self._device),
                attn_implementation=attention,
                revision=revision,
                output_loading_info=True,
            )
        except Exception as error:  # it raises many kinds
            raise cannot_load(source, PREFIX, error) from error
        check_weights(source, PREFIX, loading["missing_keys"])
        self._net: Any = net.eval().to(self._device)
        _check_layers(self._net, source)
        self.context = self._context(context)
        self.vocabulary = int(self._net.get_input_embeddings().num_embeddings)
        self.ends = _ends(self._net)
        self.usual = _usual_sampling(self._net.generation_config)
        arguments = inspect.signature(self._net.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"  # its name since 5.24
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in arguments}
        self._joined = JoinedCache(slots)

    def prefill(self, texts: Sequence[Sequence[int]], draws: Sequence[Draw]) -> list[tuple[Row, int]]:
        """For each text a row, and its next token. Texts of similar lengths are padded and read together."""
        found: dict[int, tuple[Row, int]] = {}
        for group in groups_of([len(text) for text in texts], PREFILL_TOKENS_MAX):
            rows, logits = self._read([texts[index] for index in group])
            tokens = choose(logits, [draws[index] for index in group])
            found.update(zip(group, zip(rows, tokens, strict=True), strict=True))
        return [found[index] for index in range(len(texts))]

    def step(self, rows: Sequence[Row], tokens: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """The tokens after these, which are the next ones of the rows."""
        order, logits = self._go_on(rows, tokens)
        drawn = dict(zip(rows, draws, strict=True))
        chosen = dict(zip(order, choose(logits, [drawn[row] for row in order]), strict=True))
        self._joined.advance()
        return [chosen[row] for row in rows]

    def release(self, row: Row) -> None:
        """The row is not needed any more."""
        self._joined.release(row)

    @property
    def memory(self) -> Mapping[str, int]:
        """What may be kept of texts beside the weights, in bytes, for a log."""
        of_token, columns = self.bytes_per_token, self.context + columns_free(self.context)
        return {
            "cache_bytes_per_token": of_token,
            "cache_bytes_max": of_token * columns * self._slots,
        }

    @property
    def bytes_per_token(self) -> int:
        """What is kept of each token of a text, beside the weights. Found with a text of one token."""
        (row,), _ = self._read([[0]])
        parts = [part for layer in row.layers or () if layer is not None for part in layer]
        return sum(part.numel() * part.element_size() for part in parts)

    def check_padding(self) -> None:
        """Try whether texts that are padded come out as they do alone: some networks ignore the positions, or
        compute over the batch. Raises ValueError if not; in low precision it only logs a warning."""
        texts = [
            [(7 * index + length) % self.vocabulary for index in range(length)] for length in _TRIED_LENGTHS
        ]
        alone = [self._tried([text])[0] for text in texts]
        together = self._tried(texts)
        spread = float(torch.stack(alone).std())
        share = float((torch.stack(alone) - torch.stack(together)).abs().max()) / max(spread, 1e-9)
        dtype = self._net.dtype
        if share <= ROUNDING_MAX.get(dtype, 0.1):
            return
        reason = (
            f"the network computes other numbers for a text that is padded than for the same text alone, by "
            f"{share:.2g} of their spread"
        )
        if dtype == torch.float32:
            raise ValueError(
                f"{PREFIX}{self._source}: {reason}; serve it with --set max_batch_size=1, so that nothing is "
                "padded"
            )
        structlog.get_logger().warning(
            "texts may depend on those beside them", reason=reason, dtype=str(dtype), folder=self._source
        )

    def _tried(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The numbers after a prefill, and after a step, for each text."""
        rows, first = self._read(texts)
        order, second = self._go_on(rows, [0] * len(rows))
        places = [order.index(row) for row in rows]
        self._joined.advance()
        for row in rows:
            self.release(row)
        return [torch.stack([first[at], second[place]]).float() for at, place in enumerate(places)]

    def _read(self, texts: Sequence[Sequence[int]]) -> tuple[list[Row], torch.Tensor]:
        """Rows for these texts, padded on the left, and the numbers after each: (texts, vocabulary)."""
        longest = max(map(len, texts))
        padding = [longest - len(text) for text in texts]
        tokens = torch.tensor(
            [[0] * padded + [*text] for padded, text in zip(padding, texts, strict=True)], device=self._device
        )
        columns = torch.arange(longest, device=self._device)
        skipped = torch.tensor(padding, device=self._device)[:, None]
        mask = (columns >= skipped).long() if any(padding) else None
        cache = DynamicCache()
        logits = self._forward(tokens, mask, (columns - skipped).clamp(min=0), cache)
        rows = [
            Row([_part(layer, index, padded) for layer in cache.layers], longest - padded)
            for index, padded in enumerate(padding)
        ]
        return rows, logits

    def _go_on(self, rows: Sequence[Row], tokens: Sequence[int]) -> tuple[list[Row], torch.Tensor]:
        """The rows in the order of the batch, and the numbers after these tokens: (rows, vocabulary)."""
        last = dict(zip(rows, tokens, strict=True))
        order = self._joined.arrange(rows)
        sizes = [row.size for row in order]
        given = torch.tensor([[last[row] for row in order], sizes], device=self._device)
        width = self._joined.columns + 1
        mask = None
        if min(sizes) < width - 1:
            columns = torch.arange(width, device=self._device)
            mask = (columns >= width - 1 - given[1][:, None]).long()
        return order, self._forward(given[0][:, None], mask, given[1][:, None], self._joined.cache)

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """The numbers after the last token of each row."""
        optional = {"position_ids": positions, "logits_to_keep": 1}
        with torch.inference_mode():
            output = self._net(
                input_ids=tokens,
                attention_mask=mask,
                use_cache=True,
                **{self._cache_argument: cache},
                **{name: value for name, value in optional.items() if name in self._takes},
            )
            logits: torch.Tensor = output.logits[:, -1]
            return logits

    def _context(self, wanted: int | None) -> int:
        """How many tokens a prompt and its text have together at most. Raises ValueError."""
        config = self._net.config.get_text_config(decoder=True)
        declared = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", None)
        if declared is None and wanted is None:
            raise ValueError(
                f"{PREFIX}{self._source}: its config.json does not say how many tokens it takes; say it with "
                "--param context=N"
            )
        if wanted is not None and declared is not None and wanted > declared:
            raise ValueError(
                f"{PREFIX}{self._source}: the parameter context is {wanted:,}, and the model takes "
                f"{declared:,} tokens"
            )
        return int(wanted or declared or 0)


def usable_device(device: str, source: str) -> str:
    """The device, or the CPU, with a warning, if PyTorch finds no CUDA."""
    if device == "cpu" or torch.cuda.is_available():
        return device
    structlog.get_logger().warning(
        "running on the CPU",
        reason="the installed PyTorch has no CUDA, or could not start it",
        folder=source,
        device=device,
    )
    return "cpu"


def dtype_of(name: Dtype, device: str) -> Any:
    """What transformers takes for it."""
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device == "cpu" else "auto"


def _check_layers(net: Any, source: str) -> None:
    """Raise ValueError for a network with other states than keys and values, which could not be joined."""
    config = net.config.get_text_config(decoder=True)
    try:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    except Exception as error:  # a state that has no place in this class
        raise ValueError(f"{PREFIX}{source}: its states cannot be kept: {error}") from error
    if getattr(net, "_is_stateful", False) or kinds.difference((*KEPT_LAYERS, "DummyLayer")):
        what = "other states than keys and values"
    elif getattr(config, "attention_chunk_size", None):
        what = "attention in chunks"
    else:
        return
    raise ValueError(
        f"{PREFIX}{source}: the network has {what}, and its texts could not be generated together; write a "
        "class with predict that calls generate"
    )


def _part(layer: Any, index: int, padded: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if layer.keys is None:
        return None
    return layer.keys[index, :, padded:], layer.values[index, :, padded:]


def _ends(net: Any) -> frozenset[int]:
    """The tokens that end a text: one, several or none."""
    for config in (net.generation_config, net.config.get_text_config(decoder=True)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def _usual_sampling(config: Any) -> Sampling:
    """What the generation config of the model says."""
    if not getattr(config, "do_sample", None):
        return Sampling()
    found = (getattr(config, name, None) for name in ("temperature", "top_p", "top_k"))
    temperature, top_p, top_k = found
    return Sampling(1.0 if temperature is None else float(temperature), float(top_p or 1.0), int(top_k or 0))
