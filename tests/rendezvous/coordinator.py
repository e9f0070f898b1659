"""`podring coordinator` as a process of its own, for tests, and certificates for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cli.test_cli import command


class Coordinator:
    """A running one; `address` is host:port."""

    def __init__(self, *options: str, bind: str = "127.0.0.1:0") -> None:
        self._process = subprocess.Popen(
            [command(), "coordinator", "--bind", bind, "--silence", "1", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            raise AssertionError(line + self._process.stderr.read())
        self.address = line.removeprefix("listening on ").strip()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.address.rsplit(":", 1)[1])

    def connections(self) -> int:
        """Connections that are open to it."""
        count = 0
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError):
                for line in Path(f"/proc/{self._process.pid}/net/{name}").read_text().splitlines()[1:]:
                    local, state = line.split()[1], line.split()[3]
                    count += state == "01" and int(local.rsplit(":", 1)[1], 16) == self.port
        return count

    def said(self) -> str:
        """Ends it, and gives what it said on stderr."""
        self.kill()
        assert self._process.stderr is not None
        return self._process.stderr.read()

    def kill(self) -> None:
        """As by kill -9."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=10)

    def close(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def coordinator(*options: str, bind: str = "127.0.0.1:0") -> Iterator[Coordinator]:
    """One for the length of a with statement."""
    running = Coordinator(*options, bind=bind)
    try:
        yield running
    finally:
        running.close()


def certificates(folder: Path, authority: str) -> tuple[Path, Path, Path]:
    """A certificate for 127.0.0.1 and its key, and the authority that signed it."""
    folder = folder / authority
    folder.mkdir()
    ca, ca_key, cert, key, request = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "key.pem", "req.pem"))
    ext = folder / "ext"
    ext.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30, env={**os.environ})

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *new, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", f"/CN={authority}")
    openssl("req", *new, "-keyout", key, "-out", request, "-subj", "/CN=podring-test")
    signed: list[str | Path] = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", ext]
    openssl("x509", "-req", "-in", request, *signed, "-out", cert)
    return cert, key, ca
