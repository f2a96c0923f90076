"""SGLang's own server on the CPU, for rewards that ask one."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from asyncgrpo.host import reserved_port
from tests.runs import shared_memory


@contextmanager
def serving(model: Path, log_path: Path, *options: str) -> Iterator[str]:
    """The address of a server that runs `model`."""
    reserved = reserved_port()
    port = reserved.getsockname()[1]
    values = {
        "model-path": model, "port": port, "device": "cpu", "dtype": "float32", "attention-backend": "torch_native",
        "sampling-backend": "pytorch", "max-total-tokens": 4096, "max-running-requests": 16, "context-length": 1024,
    }  # fmt: skip
    arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--disable-overlap-schedule", *options]
    files = tempfile.TemporaryDirectory()  # of its sockets, which it leaves
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": files.name}
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _serves(address):
            assert server.poll() is None, log_path.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        shared: list[Path] = []
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(server.pid)
            shared = shared_memory([process, *process.children(recursive=True)])  # killed, they leave it
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()
        reserved.close()
        files.cleanup()
        for path in shared:
            path.unlink(missing_ok=True)


def _serves(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False
