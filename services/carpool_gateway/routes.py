"""A table of routes, and how a path and a method are found in it. No I/O.

A path such as `/carpool/v1/models/{model}/infer` has names in braces where clients write something. Several
routes may have one path, with different methods. HEAD is possible wherever GET is, and OPTIONS everywhere.
A slash at the end of a path means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from carpool.keys import MODEL_NAME
from carpool_gateway.answers import HttpError
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler

NO_SCOPE: Final = ""  # of a route for which no key is needed
_PATHS_REMEMBERED: Final = 256  # of at most 32 KiB each


class Route(NamedTuple):
    """What is done for a method and a path.

    `name`: in metrics. `scope`: which the key must have, for the model if the path has one; NO_SCOPE: there
    may be no key. `handler_for`: called when the headers are complete; returns the handler, or raises
    HttpError or CarpoolError. `about`: a sentence for people.
    """

    method: str
    path: str
    name: str
    scope: str
    handler_for: Callable[[Exchange, Key], Handler]
    about: str


class Place(NamedTuple):
    """A path of the table: its routes by method, the methods that it has, and what stands in the braces."""

    routes: Mapping[str, Route]
    allowed: str
    parameters: Mapping[str, str]


class Router:
    """Finds the place of a path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_method = by_path.setdefault(route.path, {})
            assert route.method not in by_method, f"{route.method} {route.path} is there twice"
            by_method[route.method] = route
            if route.method == "GET":
                by_method["HEAD"] = route
        self._patterns = [(_segments(path), routes) for path, routes in by_path.items()]
        self.find = lru_cache(_PATHS_REMEMBERED)(self._find)

    def _find(self, path: str) -> Place:
        """The place of a path, whose characters may be written as %XX. Raises HttpError."""
        try:
            given = [unquote(segment, errors="strict") for segment in _segments(path)]
        except UnicodeDecodeError:
            raise HttpError(400, "the path is not UTF-8") from None
        for pattern, routes in self._patterns:
            if len(pattern) == len(given) and all(map(_is_like, pattern, given)):
                named = {name[1:-1]: one for name, one in zip(pattern, given, strict=True) if name[:1] == "{"}
                if "model" in named and not MODEL_NAME.fullmatch(named["model"]):
                    raise HttpError(404, no_such_name(named["model"]))
                return Place(routes, ", ".join(routes), named)
        raise HttpError(404, "there is nothing here; docs/http.md lists what there is")


def no_such_name(name: str) -> str:
    """That no model can have this name."""
    return (
        f"there is no model {name!r:.140}: a name has 1 to 128 characters: letters, digits, '.', '_', '-', "
        "starting with a letter or digit"
    )


def _segments(path: str) -> list[str]:
    return path.removesuffix("/").split("/")[1:]


def _is_like(pattern: str, segment: str) -> bool:
    return pattern == segment or (pattern[:1] == "{" and segment != "")
