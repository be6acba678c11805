"""Certificates of an authority that only the tests trust, made by `openssl`."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority(Certificate):
    """Signs the others' certificates, which are in its folder."""

    @property
    def trusting(self) -> ssl.SSLContext:
        """A client that trusts it."""
        return ssl.create_default_context(cafile=str(self.certificate))

    def signed(self, name: str) -> Certificate:
        """A certificate of this machine, for servers and clients."""
        made = _files(self.certificate.parent, name)
        _openssl(made, name, "-CA", self.certificate, "-CAkey", self.key)
        return made

    def asking(self, server: Certificate) -> ssl.SSLContext:
        """A server that serves only clients which have a certificate of the authority's."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.certificate))
        context.load_cert_chain(server.certificate, server.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def authority(folder: Path) -> Authority:
    """A new one."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on the PATH")
    files = _files(folder, "authority")
    _openssl(files, "authority")
    return Authority(files.certificate, files.key)


def _files(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.pem", folder / f"{name}.key")


def _openssl(files: Certificate, name: str, *options: str | Path) -> None:
    about = [
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1,DNS:localhost",
        "-days",
        "2",
    ]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", files.key]
    command = ["openssl", "req", "-x509", *key, "-out", files.certificate, *about, *options]
    subprocess.run(command, check=True, capture_output=True)
