"""An S3 server on loopback, for tests of inputs in object storage."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGES = Path(sys.executable).parents[1] / "object-store"
needs_object_store = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="moto and s3fs are not installed. To run this test: make object-store"
)
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
Upload = Callable[[Path, str], str]


@contextmanager
def s3_server() -> Iterator[Upload]:
    """Start a server with an empty bucket; yield a function that uploads a file and returns its address."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    assert server.stdout and server.stdin
    with pytest.MonkeyPatch.context() as patch:
        try:
            port = int(server.stdout.readline())
            patch.setattr(sys, "path", [*sys.path, str(PACKAGES)])
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            import fsspec

            fsspec.filesystem("s3").clear_instance_cache()
            fsspec.filesystem("s3").mkdir("logs")

            def upload(file: Path, name: str) -> str:
                fsspec.filesystem("s3").pipe_file(f"logs/{name}", file.read_bytes())
                return f"s3://logs/{name}"

            yield upload
        finally:
            server.kill()
            server.wait()
