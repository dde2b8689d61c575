"""Turns texts into capitals."""


def shout(batch: list[str]) -> list[str]:
    """Every text of the batch in capitals."""
    return [text.upper() for text in batch]
