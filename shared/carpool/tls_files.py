"""The TLS files that a URL of Redis names, tried out, so that a process says at its start what is wrong.

Without that, each connection would fail with OpenSSL's few words, for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from carpool.redis_url import parse

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def check_tls_files(url: str, names: Mapping[str, str] = {}) -> None:
    """Raises ValueError if a TLS file that the URL names cannot be used: a sentence that names the option, or
    what `names` calls it, and the file."""
    tls = parse(url).tls
    files = {option: str(tls[option]) for option in _TLS_FILES if option in tls}
    if not files:
        return
    called = {option: names.get(option, f"the option {option}") for option in _TLS_FILES}
    for option, path in files.items():
        try:
            os.scandir(path).close() if option == "ssl_ca_path" else Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{called[option]} is {path}, which cannot be read: {error.strerror}") from None
    _load_tls_files(files, str(tls.get("ssl_password", "")), called)


def _load_tls_files(files: Mapping[str, str], password: str, called: Mapping[str, str]) -> None:
    import ssl  # noqa: PLC0415 (20 ms, and most URLs name no files)

    certificates, certificate, key = map(files.get, ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def has_certificate(path: str) -> bool:
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            return False
        return True

    no_certificate = "has no certificate in PEM form (BEGIN CERTIFICATE)"
    if certificates is not None and not has_certificate(certificates):
        raise ValueError(f"{called['ssl_ca_certs']} is {certificates}, which {no_certificate}")
    if certificate is None:
        if key is not None:
            raise ValueError(
                f"{called['ssl_keyfile']} is the key of a certificate that is not given: "
                f"name it with {called['ssl_certfile']}"
            )
        return
    try:
        context.load_cert_chain(certificate, key, password)  # without one OpenSSL would ask the terminal
    except ssl.SSLError as error:
        if not has_certificate(certificate):
            raise ValueError(f"{called['ssl_certfile']} is {certificate}, which {no_certificate}") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{called['ssl_keyfile']} is {key}, which has not the key of the certificate in {certificate}"
            ) from None
        no_key = "has no private key in PEM form (BEGIN PRIVATE KEY)"
        if key is None:
            raise ValueError(
                f"{called['ssl_certfile']} is {certificate}, which {no_key}: name the file that has it with "
                f"{called['ssl_keyfile']}"
            ) from None
        raise ValueError(
            f"{called['ssl_keyfile']} is {key}, which {no_key}, or ssl_password is not its password"
        ) from None
