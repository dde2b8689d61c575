"""Whether the gateway can read what a model returns that speaks OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from carpool.errors import OK, InternalError
from carpool.messages.results import Result
from carpool.spoken import CHAT, COMPLETIONS, EMBEDDINGS, Spoken
from carpool.wire.bodies import decode_body
from carpool_cli.check.bodies import Bodies
from carpool_cli.local.example import example


def sentences(spoken: Spoken, bodies: Bodies, results: Sequence[Result]) -> Iterator[str]:
    """A sentence for each body whose result clients of that API would not get; and what bodies are like, if
    one fails that is no map. Nothing of a model that speaks nothing of it."""
    if not spoken.speaks:
        return
    try:
        from carpool_gateway.openai.embeddings import read_embedding  # noqa: PLC0415 (an optional dependency)
        from carpool_gateway.openai.pieces import Written, extras_of  # noqa: PLC0415
    except ModuleNotFoundError:
        yield "For OpenAI's API, results are not looked at: pip install 'PATH[gateway]'"
        return
    for index, (body, result) in enumerate(zip(bodies.encoded, results, strict=True)):
        value = decode_body(bodies.content_type, body)
        if result.status != OK:
            if not isinstance(value, dict):
                yield f"A client of OpenAI's API sends a body such as {example('', (), spoken).json}"
                return
            continue
        is_embedding = spoken.speaks == (EMBEDDINGS,) or (isinstance(value, dict) and "input" in value)
        interface = CHAT if isinstance(value, dict) and "messages" in value else COMPLETIONS
        extras = extras_of(interface, spoken.understands)
        read = read_embedding if is_embedding else Written(extras).add
        try:
            read(result.content_type, result.body or b"")
        except InternalError as error:
            yield f"{bodies.label(index)}: a client of OpenAI's API would get an error: {error.detail}"
