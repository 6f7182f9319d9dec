"""TLS of a server that shows a certificate and, where it is told an authority, looks at those of its clients."""

from __future__ import annotations

import ssl

from kvstore.client_tls import load_identity
from kvstore.errors import TlsFileUnusable


def server_context(cert_file: str, key_file: str, ca_file: str = "", *, require: bool = False) -> ssl.SSLContext:
    """A context that shows `cert_file` with its `key_file`. With `ca_file` a client's certificate must be of that
    authority; with `require` no client comes without one, otherwise whoever serves looks whether it showed one. Reads
    PEM files, now. Raises TlsFileUnusable naming the argument."""
    for argument, path in (("cert_file", cert_file), ("key_file", key_file)):
        if not path:
            raise TlsFileUnusable(argument, "required to serve TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_identity(context, cert_file, key_file, ca_file)
    if ca_file:
        context.verify_mode = ssl.CERT_REQUIRED if require else ssl.CERT_OPTIONAL
    return context
