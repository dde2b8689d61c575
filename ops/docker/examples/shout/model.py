"""Text in, the same text out, louder."""


def shout(batch: list[str]) -> list[str]:
    """The whole of a batch in capitals."""
    return [text.upper() for text in batch]
