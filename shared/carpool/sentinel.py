"""Redis Sentinel: URLs that name sentinels instead of a server, and which server is the primary.

    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DATABASE][?OPTIONS]

With `rediss+sentinel` the sentinels and the server are connected to with TLS. USER, PASSWORD and OPTIONS are
for the server, but for `sentinel_username` and `sentinel_password`; options of TLS are for all. The sentinels
are asked in this order before each connection, so a connection that is opened after a failover leads to the
new primary. No I/O: the caller asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, quote, urlencode

from carpool.address import bracketed
from carpool.redis_url import parse, split

SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
_OWN_OPTIONS: Final = ("sentinel_username", "sentinel_password", "db")  # `db` is in the path

# A sentinel's reply to a command; LookupError, which says why, if there is none.
Ask = Callable[[str, tuple[str, ...]], Any]


class Sentinels(NamedTuple):
    """What such a URL says. `urls` are those of the sentinels; `scheme`, `credentials`, `path` and `query`
    are the parts of the server's URL."""

    urls: list[str]
    service: str
    scheme: str
    credentials: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> Self | None:
        """Those that a URL names; None if it names a server. Raises ValueError, without the URL."""
        if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            return None
        checked, parts = parse(url), split(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
        for_server = urlencode([option for option in options if option[0] not in _OWN_OPTIONS])
        for_all = urlencode([option for option in options if option[0].startswith("ssl_")])
        user, password = (quote(text, safe="") for text in (checked.sentinel_user, checked.sentinel_password))
        login = f"{user}:{password}@" if user or password else ""
        servers = [f"{bracketed(host)}:{port}" for host, port in checked.addresses]
        urls = [f"{checked.scheme}://{login}{server}?{for_all}" for server in servers]
        path = f"/{checked.database}"
        return cls(urls, checked.service, checked.scheme, parts.credentials, path, for_server)

    def server_url(self, ask: Ask) -> str:
        """The URL of the primary. Raises LookupError, which says what each sentinel answered."""
        reasons: list[str] = []
        for url in self.urls:
            try:
                address = ask(url, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service))
            except LookupError as error:
                reasons.append(str(error))
                continue
            if address:
                host, port = (part.decode() for part in address)
                return f"{self.scheme}://{self.credentials}{bracketed(host)}:{port}{self.path}?{self.query}"
            reasons.append(f"a sentinel does not know the service {self.service!r}")
        raise LookupError(f"no sentinel names a primary: {'; '.join(reasons)}")
