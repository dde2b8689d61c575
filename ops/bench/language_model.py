"""A language model of transformers: through Carpool with `hf:`, and with `generate` in one process.

    .venv/bin/python ops/bench/language_model.py [--requests N] [--slots N] [--rounds N]

A network of random weights (Llama's, 8 layers of 256, 6 million numbers, float32) on one thread of the CPU.
All requests come at once: prompts of 8 to 64 tokens, texts of 8 to 128, which nothing ends before. For each
way: tokens that were asked for, per second, and the time to the first token of a request, from when all came.
Needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from service_processes import start, stop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker.models.hf.network import Network
from carpool_worker.models.hf.order import Draw, Sampling

NAME: Final = "tiny"
WARM_UP: Final = 2  # requests
# Threads of a matrix product wait for each other, and longer if other processes want the same cores.
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
START_S_MAX: Final = 120
GREEDY: Final = Draw(Sampling())


class Ask(NamedTuple):
    """A request: the tokens of its prompt, and how many it wants."""

    prompt: list[int]
    tokens: int


class Measured(NamedTuple):
    """When all was done, and when each request had its first token; seconds after all came."""

    ended_s: float
    first_s: Sequence[float]


def write_model(folder: Path) -> int:
    """A network of random weights that never ends a text. Returns how many tokens it has."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    vocabulary = int(tokenizer.get_vocab_size())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=704, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return vocabulary


def asks(count: int, vocabulary: int) -> list[Ask]:
    """The same for each way."""
    random = np.random.default_rng(1)
    return [
        Ask(
            random.integers(0, vocabulary, int(random.integers(8, 65))).tolist(), int(random.integers(8, 129))
        )
        for _ in range(count)
    ]


# --- ways --------------------------------------------------------------------------------------------------


def with_generate(net: Any, wanted: Sequence[Ask], size: int) -> Measured:
    """The loop of transformers, in batches of a fixed size: each lasts as long as its longest text."""
    first_s: list[float] = []
    began_s = time.monotonic()
    for at in range(0, len(wanted), size):
        batch = wanted[at : at + size]
        longest = max(len(ask.prompt) for ask in batch)
        padding = [longest - len(ask.prompt) for ask in batch]
        tokens = [[0] * padded + ask.prompt for padded, ask in zip(padding, batch, strict=True)]
        mask = [[0] * padded + [1] * (longest - padded) for padded in padding]
        calls: list[float] = []

        def see(_tokens: Any, logits: Any, calls: list[float] = calls) -> Any:
            calls.append(time.monotonic() - began_s)
            return logits

        with torch.inference_mode():
            net.generate(
                torch.tensor(tokens),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(ask.tokens for ask in batch),
                do_sample=False,
                pad_token_id=0,
                logits_processor=[see],
            )
        first_s += [calls[0]] * len(batch)
    return Measured(time.monotonic() - began_s, first_s)


def in_one_process(network: Network, wanted: Sequence[Ask], slots: int) -> Measured:
    """Carpool's network and cache, with nothing around it."""
    first_s: list[float] = []
    waiting = list(reversed(wanted))
    running: dict[Any, list[int]] = {}  # its last token, and how many are left
    began_s = time.monotonic()
    while waiting or running:
        new = [waiting.pop() for _ in range(min(len(waiting), slots - len(running)))]
        if new:
            prefilled = network.prefill([ask.prompt for ask in new], [GREEDY] * len(new))
            first_s += [time.monotonic() - began_s] * len(new)
            running.update(
                {row: [token, ask.tokens - 1] for ask, (row, token) in zip(new, prefilled, strict=True)}
            )
        for row in [row for row, (_, left) in running.items() if not left]:
            network.release(row)
            del running[row]
        if running:
            tokens = network.step(
                list(running), [last for last, _ in running.values()], [GREEDY] * len(running)
            )
            for state, token in zip(running.values(), tokens, strict=True):
                state[:] = [token, state[1] - 1]
    return Measured(time.monotonic() - began_s, first_s)


async def through_carpool(client: AsyncClient, wanted: Sequence[Ask]) -> Measured:
    """Streams of a worker with one process, read by a producer on this machine."""
    first_s: list[float] = []
    began_s = time.monotonic()

    async def read(ask: Ask) -> None:
        body = {"prompt": ask.prompt, "max_tokens": ask.tokens, "temperature": 0}
        stream = client.stream(NAME, body, timeout=600)
        pieces: list[Any] = []
        async for piece in stream:
            if not pieces:
                first_s.append(time.monotonic() - began_s)
            pieces.append(piece)
        assert pieces[-1]["completion_tokens"] == ask.tokens

    await asyncio.gather(*map(read, wanted))
    return Measured(time.monotonic() - began_s, first_s)


def measure(folder: Path, wanted: Sequence[Ask], slots: int, rounds: int) -> Mapping[str, list[Measured]]:
    """All ways, one after the other in each round."""
    network = Network(str(folder), "cpu")
    with EmbeddedRedis(append_only=False) as redis, tempfile.TemporaryFile() as log, ExitStack() as stack:
        services: list[subprocess.Popen[bytes]] = []
        stack.callback(stop, services)
        services.append(start(redis.url, log, "carpool_batcher"))
        flags = ("--set", f"max_batch_size={slots}")
        services.append(start(redis.url, log, "carpool_worker", f"{NAME}=hf:{folder}", *flags))
        runner = stack.enter_context(asyncio.Runner())
        client = AsyncClient(redis.url)
        stack.callback(lambda: runner.run(client.close()))
        runner.run(client.wait_ready(NAME, START_S_MAX))
        ways: dict[str, Callable[[Sequence[Ask]], Measured]] = {
            "`generate`, one after the other": lambda asks: with_generate(network._net, asks, 1),
            f"`generate`, batches of {slots}": lambda asks: with_generate(network._net, asks, slots),
            f"the network of `hf:` in one process, {slots} slots": lambda asks: in_one_process(
                network, asks, slots
            ),
            f"Carpool, {slots} slots": lambda asks: runner.run(through_carpool(client, asks)),
        }
        for way in ways.values():
            way(wanted[:WARM_UP])
        found: dict[str, list[Measured]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(way(wanted))
        return found


def main() -> None:
    """Measure, and print a table."""
    if not ONE_THREAD.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})  # noqa: S606
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        wanted = asks(options.requests, write_model(Path(folder) / NAME))
        found = measure(Path(folder) / NAME, wanted, options.slots, options.rounds)
    tokens = sum(ask.tokens for ask in wanted)
    load = os.getloadavg()[0]
    print(
        f"{options.requests} requests, {tokens:,} tokens; {options.rounds} rounds, medians; load {load:.1f}\n"
    )
    print("| | tokens/s | first token, p50 | p99 |\n|---|---:|---:|---:|")
    for name, rounds in found.items():
        rate = tokens / statistics.median(one.ended_s for one in rounds)
        p50, p99 = (
            statistics.median(float(np.percentile(one.first_s, percent)) for one in rounds)
            for percent in (50, 99)
        )
        print(f"| {name} | {rate:,.0f} | {p50:.2f} s | {p99:.2f} s |")


if __name__ == "__main__":
    main()
