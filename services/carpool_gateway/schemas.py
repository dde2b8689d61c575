"""The shapes of the JSON documents that the gateway takes and returns, as types of which schemas are made.

The documents themselves are made elsewhere. Tests compare what the gateway returns with these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Scalar = str | int | float | bool


class Error(msgspec.Struct):
    """Why a request failed: a sentence, its status, and the correlation ID if it has one."""

    error: str
    status: str
    correlation_id: str | None = None


class OpenAIErrorDetail(msgspec.Struct):
    """A sentence, a kind, the parameter that is wrong, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """Why a request of OpenAI's API failed."""

    error: OpenAIErrorDetail


class Models(msgspec.Struct):
    """The names of the registered models."""

    models: list[str]


class Scale(msgspec.Struct):
    """How many workers a model needs now, how many processes these have together, and why."""

    model: str
    wanted: int
    processes: int
    reason: str


class Accepted(msgspec.Struct):
    """A request whose result comes later, under the path `location`."""

    status: Literal["ACCEPTED"]
    correlation_id: str
    location: str


class Health(msgspec.Struct):
    """Whether the gateway works, and whether it can serve."""

    live: bool
    ready: bool


class ServerMetadata(msgspec.Struct):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(msgspec.Struct):
    """A tensor; the first size is the batch, and -1 may be any."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(msgspec.Struct):
    """A tensor without its batch."""

    name: str
    data_type: str
    format: str
    dims: list[int]
    optional: bool = False


class ModelConfig(msgspec.Struct):
    """The settings of a model, in Triton's words."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    model_transaction_policy: dict[str, bool]
    dynamic_batching: dict[str, Any] | None = None
    sequence_batching: dict[str, Any] | None = None


class ModelReady(msgspec.Struct):
    """That a model can be used."""

    name: str
    ready: Literal[True]


class InputTensor(msgspec.Struct):
    """A tensor of a request; its data are here, or follow the JSON document."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Scalar] = {}
    data: list[Any] | None = None


class RequestedOutput(msgspec.Struct):
    """An output that is wanted."""

    name: str
    parameters: dict[str, Scalar] = {}


class InferRequest(msgspec.Struct):
    """Tensors whose first size is the batch."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: dict[str, Scalar] = {}
    outputs: list[RequestedOutput] = []


class OutputTensor(msgspec.Struct):
    """A tensor of a response; its data are here, or follow the JSON document."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Scalar] = {}
    data: list[Any] | None = None


class InferResponse(msgspec.Struct):
    """The outputs of all rows, joined."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str = ""


class GenerateRequest(msgspec.Struct):
    """Inputs and parameters of a model by their names, beside these: one of `text_input`, a text, and `body`,
    any value, if the model declares no inputs."""

    id: str = ""
    text_input: str | None = None
    body: Any = None
    parameters: dict[str, Any] = {}


class GenerateResponse(msgspec.Struct):
    """Outputs of a model by their names, beside these: `text_output` if it declares none."""

    model_name: str
    model_version: str
    id: str = ""
    text_output: str | None = None


class Duration(msgspec.Struct):
    """How often something was done, and the nanoseconds that it took together."""

    count: int
    ns: int


class InferenceStatistics(msgspec.Struct):
    """Requests, and how long they took."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class ResponseStatistics(msgspec.Struct):
    """Chunks of streams."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


class BatchStatistics(msgspec.Struct):
    """Batches of one size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(msgspec.Struct):
    """What became of the requests of a model."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    response_stats: dict[str, ResponseStatistics]
    batch_stats: list[BatchStatistics]
    memory_usage: list[Any]


class Statistics(msgspec.Struct):
    """Those of models."""

    model_stats: list[ModelStatistics]


class IndexRequest(msgspec.Struct):
    """Which models are wanted: all, or those that are ready."""

    ready: bool = False


class IndexEntry(msgspec.Struct):
    """A version of a model, its state, and why it is not ready."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE", "UNKNOWN"]
    reason: str


class LoadRequest(msgspec.Struct):
    """Optional: `config` is a model's configuration in Triton's words, as a text of JSON. Without
    `parameters`, all members are parameters of the model."""

    parameters: dict[str, str] = {}


class UnloadRequest(msgspec.Struct):
    """Optional: `unload_dependents`."""

    parameters: dict[str, bool] = {}


class OpenAIModel(msgspec.Struct):
    """A model that speaks OpenAI's API; `created`: when this gateway was started."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    speaks: list[Literal["completions", "chat", "embeddings"]]


class OpenAIModels(msgspec.Struct):
    """All of these."""

    object: Literal["list"]
    data: list[OpenAIModel]


class StreamOptions(msgspec.Struct):
    """Of a stream: whether its last event tells the usage."""

    include_usage: bool = False


class CompletionRequest(msgspec.Struct):
    """A prompt, or several, of text or token IDs."""

    model: str
    prompt: str | list[Any]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Message(msgspec.Struct):
    """A message of a conversation. Parts are `{"type": "text", "text": ...}`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ChatRequest(msgspec.Struct):
    """A conversation."""

    model: str
    messages: list[Message]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokenUsage(msgspec.Struct):
    """Numbers of tokens, if the model tells them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct):
    """What was written for one prompt. `logprobs`: as the model tells them."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(msgspec.Struct):
    """What was written for each prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None


class ChatChoice(msgspec.Struct):
    """The next message. `logprobs`: as the model tells them."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct):
    """The next message of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage | None


class EmbeddingRequest(msgspec.Struct):
    """An input, or several, of text or token IDs."""

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embedding(msgspec.Struct):
    """The vector of an input: numbers, or these as FP32 in little-endian order, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Numbers of tokens, if the model tells them."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """The vectors of all inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage | None
