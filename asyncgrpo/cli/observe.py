"""`--observe`: Prometheus, and Grafana if it is installed, for the lifetime of one run.

    RUN/observe/    configuration, rules, data and logs of both; the next start continues with the same data
    RUN/observe.json    {"prometheus": URL, "grafana": URL} while they run

Both listen on loopback and know only this run. They end with it, so they cannot alert that the run ended. For that, run
your own Prometheus with `ops/prometheus/prometheus.yml`.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from asyncgrpo.metrics import targets_path, token_beside

FILE = "observe.json"
READY_S = 20.0
"""Deadline for Prometheus to start."""
NOT_HERE = (
    "--observe: prometheus is not on PATH, so the run continues without it; "
    "install it with `apt install prometheus` or your package manager"
)
KEEP = ("--storage.tsdb.retention.time=30d", "--storage.tsdb.retention.size=4GB")

# The kernel kills the program that this execs when the driver ends.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def shipped_ops() -> Path:
    """Return `asyncgrpo/ops` of an installed wheel, or `ops` of the checkout."""
    package = Path(__file__).parent.parent
    return next(found for found in (package / "ops", package.parent / "ops") if found.is_dir())


@contextlib.contextmanager
def observed(run_dir: Path, report: Callable[[str], None], *, with_token: bool) -> Iterator[None]:
    """Have Prometheus scrape the run while the block runs. If it cannot start, pass the reason to `report`.

    Args:
        with_token: the processes of the run require the token in its folder.
    """
    run_dir = run_dir.absolute()
    with contextlib.ExitStack() as started:
        addresses = _start(run_dir, report, started, with_token=with_token)
        if addresses:
            file = run_dir / FILE
            file.write_text(json.dumps(addresses) + "\n", encoding="utf-8")
            started.callback(file.unlink, missing_ok=True)
            report(", ".join(f"{name.capitalize()} is at {url}" for name, url in addresses.items()))
        yield


def _start(
    run_dir: Path, report: Callable[[str], None], started: contextlib.ExitStack, *, with_token: bool
) -> dict[str, str]:
    """Start the installed programs. Returns the URL of each."""
    program = shutil.which("prometheus")
    if program is None:
        report(NOT_HERE)
        return {}
    folder = run_dir / "observe"
    folder.mkdir(0o700, exist_ok=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    config = write_configuration(folder, run_dir, with_token=with_token)
    command = [program, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    log = folder / "prometheus.log"
    process = started.enter_context(_tied([*command, f"--storage.tsdb.path={folder / 'tsdb'}", *KEEP], log))
    if not _is_ready(process, f"{url}/-/ready"):
        report(f"--observe: Prometheus does not start, so the run continues without it; see {log}")
        return {}
    grafana = shutil.which("grafana") or shutil.which("grafana-server")
    if grafana is None:
        return {"prometheus": url}
    port = _free_port()
    environment = provision(folder / "grafana", url, port)
    started.enter_context(_tied(grafana_command(Path(grafana)), folder / "grafana.log", environment))
    return {"prometheus": url, "grafana": f"http://127.0.0.1:{port}"}


def write_configuration(folder: Path, run_dir: Path, *, with_token: bool) -> Path:
    """Write the configuration of `ops/prometheus` for this run. Returns its file."""
    ours = shipped_ops() / "prometheus"
    for rules in ("alerts.yml", "recording.yml"):
        shutil.copy(ours / rules, folder)
    targets = targets_path(run_dir)
    text = (ours / ("nodes.yml" if with_token else "prometheus.yml")).read_text(encoding="utf-8")
    if with_token:
        token_beside(run_dir)
    text = text.replace("../../runs/prometheus/*.json", _in_quotes(targets))
    text = text.replace("../../runs/prometheus/token", f'"{_in_quotes(targets.with_name("token"))}"')
    config = folder / "prometheus.yml"
    config.write_text(text, encoding="utf-8")
    return config


def provision(folder: Path, prometheus: str, port: int) -> dict[str, str]:
    """Write the data source and the boards for Grafana. Returns its environment variables."""
    shipped = shipped_ops() / "grafana"
    boards = shipped / "boards"
    for name, old, new in (
        ("datasources/prometheus.yaml", "http://127.0.0.1:9090", prometheus),
        ("dashboards/boards.yaml", "/etc/grafana/boards", f'"{_in_quotes(boards)}"'),
    ):
        file = folder / "provisioning" / name
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        file.write_text((shipped / "provisioning" / name).read_text(encoding="utf-8").replace(old, new), "utf-8")
    return {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_SECURITY_ADMIN_PASSWORD": secrets.token_urlsafe(),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(boards / "overview.json"),
    }


def grafana_command(program: Path) -> list[str]:
    """Return the command that starts Grafana. Its files are beside the program or where Debian's package has them."""
    command = [str(program), *(["server"] if program.name == "grafana" else [])]
    for home in (program.resolve().parent.parent, Path("/usr/share/grafana")):
        if (home / "conf" / "defaults.ini").is_file():
            return [*command, "--homepath", str(home)]
    return command


@contextlib.contextmanager
def _tied(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program while the block runs. Ctrl-C does not reach it, so it observes the run until it has drained."""
    tied = [sys.executable, "-c", _TIED, str(os.getpid()), *command]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            tied,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _in_quotes(path: Path) -> str:
    """Escape a path for double quotes in YAML."""
    return json.dumps(str(path), ensure_ascii=False)[1:-1]
