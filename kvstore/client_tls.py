"""TLS of a client that is told which authority to trust and, where it must, who it is itself."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvstore.errors import TlsFileUnusable


def client_context(ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """A context that verifies servers, by `ca_file` or else by the system's authorities, and shows them a certificate
    where there is a `cert_file` with its `key_file`. Reads PEM files, now. Raises TlsFileUnusable naming the argument.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_identity(context, cert_file, key_file, ca_file)
    if not ca_file:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


def load_identity(context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str) -> None:
    """What a context shows, and whom it believes; "" is none. Raises TlsFileUnusable naming the argument."""
    if bool(cert_file) != bool(key_file):
        missing, given = ("key_file", "cert_file") if cert_file else ("cert_file", "key_file")
        raise TlsFileUnusable(missing, f"required beside {given}")
    for argument, path in (("ca_file", ca_file), ("cert_file", cert_file), ("key_file", key_file)):
        _check_readable(argument, path)
    if ca_file:
        try:
            context.load_verify_locations(ca_file)
        except ssl.SSLError as error:
            raise TlsFileUnusable("ca_file", f"{ca_file} has no certificates in PEM form: {_words(error)}") from error
    if cert_file:
        try:
            # The password keeps OpenSSL from asking for one on the terminal: an encrypted key is refused.
            context.load_cert_chain(cert_file, key_file, password="")
        except ssl.SSLError as error:
            problem = f"{cert_file} and {key_file} are no certificate with its unencrypted key: {_words(error)}"
            raise TlsFileUnusable("cert_file", problem) from error


def _check_readable(argument: str, path: str) -> None:
    if not path:
        return
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise TlsFileUnusable(argument, f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TlsFileUnusable(argument, f"{path!r}: {error}") from error


def _words(error: ssl.SSLError) -> str:
    return error.reason or str(error)
