"""What the network of `writer` makes of whole texts, its loss, and the derivatives of that by its weights.

Nothing is cached here: `writer_network` is tested against it. In all comments b stands for texts, t for
positions, h for heads. A variable `change` holds derivatives of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from carpool_cli.demo.writer_network import (
    Floats,
    Network,
    Symbols,
    Weights,
    distance_bias,
    inverse_rms,
    softmax,
)


class _Layer(NamedTuple):
    """What the backward pass of a layer needs of the forward pass."""

    inverse_in: Floats  # b x t x 1
    normal_in: Floats  # b x t x width
    query: Floats  # b x h x t x width of a head, scaled
    key: Floats  # b x h x t x width of a head
    value: Floats  # b x h x t x width of a head
    share: Floats  # b x h x t x t: how much a position takes of each value
    attended: Floats  # b x t x width
    inverse_mid: Floats  # b x t x 1
    normal_mid: Floats  # b x t x width
    rectified: Floats  # b x t x hidden
    squared: Floats  # b x t x hidden


class Pass(NamedTuple):
    """A forward pass. The logits of the symbol after each position: texts x positions x symbols."""

    inputs: Floats
    layers: list[_Layer]
    inverse_out: Floats
    normal_out: Floats
    logits: Floats


def forward(network: Network, symbols: Symbols) -> Pass:
    """Compute whole texts at once, without a cache. `symbols`: texts x (recent - 1 + positions)."""
    weights = network.weights
    inputs = _inputs(symbols, weights.embedding.shape)
    x = _times(inputs, weights.embedding.reshape(-1, weights.embedding.shape[2]))
    bias = distance_bias(network, x.shape[1])
    layers = []
    for index in range(len(weights.attention_in)):
        x, layer = _forward(network, index, x, bias)
        layers.append(layer)
    inverse_out = inverse_rms(x)
    normal_out = x * inverse_out
    return Pass(inputs, layers, inverse_out, normal_out, _times(normal_out, weights.logits))


def _forward(network: Network, index: int, x: Floats, bias: Floats) -> tuple[Floats, _Layer]:
    """A layer's outputs, and what its backward pass needs."""
    weights = network.weights
    inverse_in = inverse_rms(x)
    normal_in = x * inverse_in
    query, key, value = _split(_times(normal_in, weights.attention_in[index]), network.heads)
    query = query * _scale(query)
    score = query @ key.swapaxes(2, 3)
    score += bias
    share = softmax(score)
    attended = (share @ value).swapaxes(1, 2).reshape(x.shape)
    x = x + _times(attended, weights.attention_out[index])
    inverse_mid = inverse_rms(x)
    normal_mid = x * inverse_mid
    rectified = np.maximum(_times(normal_mid, weights.hidden_in[index]), 0)
    squared = rectified * rectified
    after = x + _times(squared, weights.hidden_out[index])
    attention = (inverse_in, normal_in, query, key, value, share, attended)
    return after, _Layer(*attention, inverse_mid, normal_mid, rectified, squared)


def loss_and_gradient(network: Network, symbols: Symbols) -> tuple[float, Weights]:
    """The mean loss of predicting each symbol, in nats, and its derivatives by the weights.

    `symbols`: texts x (recent + positions). The first `recent` are not predicted.
    """
    weights = network.weights
    done = forward(network, symbols[:, :-1])
    wanted = symbols[:, network.recent :, None]
    change = softmax(done.logits)
    loss = -float(np.mean(np.log(np.take_along_axis(change, wanted, axis=2))))
    np.put_along_axis(change, wanted, np.take_along_axis(change, wanted, axis=2) - 1, axis=2)
    change /= np.float32(wanted.size)
    gradient = Weights(*(np.empty_like(array) for array in weights))
    gradient.logits[:] = _by_weight(done.normal_out, change)
    change = _through_norm(_times(change, weights.logits.T), done.normal_out, done.inverse_out)
    for index in reversed(range(len(done.layers))):
        change = _backward(network, index, done.layers[index], change, gradient)
    gradient.embedding[:] = _by_weight(done.inputs, change).reshape(gradient.embedding.shape)
    return loss, gradient


def _backward(network: Network, index: int, layer: _Layer, change: Floats, gradient: Weights) -> Floats:
    """From the derivatives by a layer's outputs, set those by its weights and return those by its inputs."""
    weights = network.weights
    gradient.hidden_out[index] = _by_weight(layer.squared, change)
    hidden = _times(change, weights.hidden_out[index].T)
    hidden *= 2
    hidden *= layer.rectified
    gradient.hidden_in[index] = _by_weight(layer.normal_mid, hidden)
    hidden = _times(hidden, weights.hidden_in[index].T)
    change = change + _through_norm(hidden, layer.normal_mid, layer.inverse_mid)

    gradient.attention_out[index] = _by_weight(layer.attended, change)
    attended = _times(change, weights.attention_out[index].T)
    projected = _through_attention(attended, layer, network.heads)
    gradient.attention_in[index] = _by_weight(layer.normal_in, projected)
    normal = _times(projected, weights.attention_in[index].T)
    return change + _through_norm(normal, layer.normal_in, layer.inverse_in)


def _through_attention(change: Floats, layer: _Layer, heads: int) -> Floats:
    """From the derivatives by what attention gives, those by queries, keys and values: b x t x 3 width."""
    by_head = _heads_first(change, heads)
    # The derivatives by a softmax's inputs are share * (d - sum(share * d)). That sum is this one.
    total = _heads_first(change * layer.attended, heads).sum(axis=3, keepdims=True)
    score = by_head @ layer.value.swapaxes(2, 3)
    score -= total
    score *= layer.share
    projected = np.empty_like(change, shape=(*change.shape[:2], 3 * change.shape[2]))
    query, key, value = _split(projected, heads)
    np.matmul(score, layer.key, out=query)
    query *= _scale(query)
    np.matmul(score.swapaxes(2, 3), layer.query, out=key)
    np.matmul(layer.share.swapaxes(2, 3), by_head, out=value)
    return projected


def _inputs(symbols: Symbols, shape: tuple[int, ...]) -> Floats:
    """For each position, a 1 for each recent symbol: the product with the embeddings is their sum."""
    recent, count, _ = shape
    positions = symbols.shape[1] - recent + 1
    inputs = np.zeros((len(symbols), positions, recent * count), np.float32)
    for age in range(recent):
        first = recent - 1 - age
        np.put_along_axis(inputs, symbols[:, first : first + positions, None] + age * count, 1, axis=2)
    return inputs


def _split(projected: Floats, heads: int) -> Floats:
    """Views of the queries, keys and values: 3 x b x h x t x width of a head."""
    by_head: Floats = projected.reshape(*projected.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
    return by_head


def _heads_first(x: Floats, heads: int) -> Floats:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _scale(query: Floats) -> np.float32:
    return np.float32(query.shape[-1] ** -0.5)


def _times(x: Floats, matrix: Floats) -> Floats:
    """The product, as one of two matrices: numpy computes one of more dimensions matrix by matrix."""
    product: Floats = (x.reshape(-1, len(matrix)) @ matrix).reshape(*x.shape[:-1], matrix.shape[1])
    return product


def _by_weight(inputs: Floats, change: Floats) -> Floats:
    """The derivatives by a matrix that multiplied `inputs`, from those by the product."""
    gradient: Floats = inputs.reshape(-1, inputs.shape[-1]).T @ change.reshape(-1, change.shape[-1])
    return gradient


def _through_norm(change: Floats, normal: Floats, inverse: Floats) -> Floats:
    """The derivatives by what was normalised."""
    before: Floats = inverse * (change - normal * np.mean(change * normal, axis=-1, keepdims=True))
    return before
