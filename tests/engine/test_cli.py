"""The command line: what is wrong is one line and the right exit status; nothing heavy is imported on the way."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import radixcast
from radixcast.cli import main
from radixcast.node import is_loopback, listen, process_age, url_of
from radixcast.protocols.errors import StartupError


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and the one line on stderr of a command line that can't run."""
    status = main(words)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("radixcast: ")
    return status, err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["serve", "--version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"radixcast {radixcast.__version__}\n"
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["serve", "--help"]) == 0
    assert "--max-total-tokens" in capsys.readouterr().out
    assert main([]) == 2


def test_wrong_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "srve") == (2, "radixcast: unknown command 'srve'; did you mean serve?\n")
    status, line = fails(capsys, "serve", "--schedul-policy", "lpm")
    assert (status, line) == (2, "radixcast: unknown flag --schedul-policy; did you mean --schedule-policy?\n")
    assert fails(capsys, "serve", "--dtype", "float8")[0] == 2
    assert fails(capsys, "serve", "--page-size", "0")[0] == 2
    assert fails(capsys, "serve", "--config", "/nowhere.yaml")[0] == 2


def test_taken_port_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = fails(capsys, "serve", "--port", str(port), "--model-path", "/nowhere")
    assert status == 1
    assert f"port {port} on 127.0.0.1 is in use" in line


def test_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, line = fails(capsys, "serve", "--port", "0", "--model-path", str(tmp_path / "none.gguf"))
    assert status == 1
    assert "none.gguf" in line


SCRIPT = str(Path(sys.executable).parent / "radixcast")


@pytest.mark.parametrize("module", [["-m", "radixcast.launch_server"], ["-m", "radixcast", "serve"], [SCRIPT, "serve"]])
def test_all_three_spellings_are_the_same_command(module: list[str]) -> None:
    command = [sys.executable, "-P", *module] if module[0] == "-m" else module
    done = subprocess.run([*command, "--prot", "5"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "radixcast: unknown flag --prot; did you mean --port?\n"


def test_parent_imports_nothing_heavy() -> None:
    code = "import radixcast.launch_server, radixcast.serve, sys; print([m for m in sys.modules if '.' not in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "aiohttp", "tokenizers", "numba", "jinja2"} & set(eval_list(done.stdout))


def test_package_is_light_until_a_name_is_used() -> None:
    code = "import radixcast, sys; radixcast.__version__; print([m for m in sys.modules if '.' not in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "zmq", "numpy", "msgspec"} & set(eval_list(done.stdout))


def eval_list(text: str) -> list[str]:
    """The names in a printed list."""
    return [name.strip(" '\"") for name in text.strip().strip("[]").split(",")]


def test_public_names() -> None:
    for name in radixcast.__all__:
        assert getattr(radixcast, name) is not None
    assert set(radixcast.__all__) <= set(dir(radixcast))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        radixcast.nothing_like_it  # noqa: B018


def test_listen() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(StartupError, match="in use"):
            listen("127.0.0.1", port)
    with pytest.raises(StartupError, match="--host"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(StartupError, match="can't listen"):
        listen("203.0.113.7", 0)


def test_loopback() -> None:
    assert all(is_loopback(h) for h in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "gpu-box"))


def test_process_age() -> None:
    assert 0 < process_age() < 86400
