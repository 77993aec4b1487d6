"""The configuration of `deploy/haproxy` with the ports of a test, and a certificate for it."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

CONFIG = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"


def write_front_config(folder: Path, port: int, server_port: int, changes: Mapping[str, str]) -> Path:
    """The configuration for a proxy on `port` before a server on `server_port`, with parts of its text changed."""
    write_certificate(folder / "specray.pem")
    places = {
        "/etc/haproxy/specray.pem": str(folder / "specray.pem"),
        "bind :443": f"bind 127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{server_port}",
    }
    text = CONFIG.read_text()
    for old, new in (dict(changes) | places).items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "haproxy.cfg").write_text(text)
    return folder / "haproxy.cfg"


def write_certificate(path: Path) -> None:
    """A self-signed certificate for localhost and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    path.write_bytes(
        certificate.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
