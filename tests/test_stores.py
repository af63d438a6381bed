"""Models on this machine: other tools' stores, our own, and how to delete ours."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from h2o_stream.errors import H2OStreamError, ModelNotFoundError
from h2o_stream.models import other_tools as stores
from h2o_stream.models import packed_cache as packed_models
from h2o_stream.models.find import find
from h2o_stream.models.other_tools import ollama_file, stored_models
from h2o_stream.models.packed_cache import cached_bytes, cached_folders, forget
from tests.commands import invoke

HEX = "0123456789abcdef" * 4
MODEL_LAYER = "application/vnd.ollama.image.model"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def ollama(folder: Path, name: str = "registry.ollama.ai/library/llama3/8b", digest: str = f"sha256:{HEX}") -> Path:
    """Create an ollama store with one model; returns its manifest."""
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/json", "digest": "?"}, {"mediaType": MODEL_LAYER, "digest": digest}]
    manifest.write_text(json.dumps({"layers": layers}))
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / f"sha256-{HEX}").write_bytes(b"GGUF" + bytes(96))
    return manifest


def packed(home: Path, key: str, model: str, source: str = "there") -> Path:
    """A folder in the format that the loader writes."""
    folder = home / "cache" / "h2o-stream" / "packed" / key
    folder.mkdir(parents=True)
    (folder / "packed.json").write_text(json.dumps({"model": model, "quantize": "int4", "source": source}))
    (folder / "weights.safetensors").write_bytes(bytes(1000))
    return folder


class TestOllama:
    @pytest.mark.parametrize("named", [True, False])
    def test_it_is_listed_and_found(self, home: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
        folder = home / "elsewhere" if named else home / ".ollama" / "models"
        if named:
            monkeypatch.setenv("OLLAMA_MODELS", str(folder))
        ollama(folder)
        assert [(model.name, model.nbytes) for model in stored_models()] == [("ollama:llama3:8b", 100)]
        assert ollama_file("ollama:llama3:8b") == folder / "blobs" / f"sha256-{HEX}"

    @pytest.mark.parametrize(("manifest", "name"), [
        ("registry.ollama.ai/library/llama3/latest", "ollama:llama3"),
        ("registry.ollama.ai/someone/llama3/latest", "ollama:someone/llama3"),
        ("hf.co/some-one/Llama.3-GGUF/Q4_K_M", "ollama:hf.co/some-one/Llama.3-GGUF:Q4_K_M"),
    ])  # fmt: skip
    def test_names(self, home: Path, manifest: str, name: str) -> None:
        ollama(home / ".ollama" / "models", manifest)
        assert ollama_file(name)
        (model,) = stored_models()
        assert ollama_file(model.name) == ollama_file(name)
        assert model.name.removesuffix(":latest") == name

    def test_unknown_names_list_the_known_ones(self, home: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="it has none"):
            ollama_file("ollama:llama3")
        ollama(home / ".ollama" / "models")
        with pytest.raises(ModelNotFoundError, match=r"no model 'llama3' .*\(ollama:llama3:8b\)"):
            find("ollama:llama3", True, print)
        assert ollama_file("org/name:file.gguf") is None

    @pytest.mark.parametrize("name", ["", ":", "a/b/c/d/e", "..", "../..", "a:../../secret", "/etc:x", "a//b", ".:."])
    def test_no_name_escapes_the_folder(self, home: Path, name: str) -> None:
        folder = home / ".ollama" / "models"
        ollama(folder)
        ollama(home, "secret").rename(folder / "manifests" / "secret")
        with pytest.raises(ModelNotFoundError):
            ollama_file(f"ollama:{name}")

    @pytest.mark.parametrize("text", [
        "", "{", "[]", "null", '{"layers": 3}', '{"layers": [3, {}]}', "[" * 100_000, '{"layers": [{"mediaType": []}]}',
        *(
            json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": digest}]})
            for digest in (None, "sha256:../../../secret", f"sha256:{HEX.upper()}", f"sha256:{'0' * 64}", [HEX])
        ),
    ])  # fmt: skip
    def test_damaged_manifests_are_left_out(self, home: Path, text: str) -> None:
        folder = home / ".ollama" / "models"
        ollama(folder).write_text(text)
        (home / "secret").write_bytes(b"GGUF")
        assert stored_models() == []

    def test_a_blob_that_is_missing_or_not_gguf(self, home: Path) -> None:
        folder = home / ".ollama" / "models"
        ollama(folder)
        blob = folder / "blobs" / f"sha256-{HEX}"
        blob.write_bytes(b"PK..")
        assert stored_models() == []
        blob.unlink()
        assert stored_models() == []

    def test_find_takes_a_gguf_file_of_any_name(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ollama(home / ".ollama" / "models")
        blob = str(home / ".ollama" / "models" / "blobs" / f"sha256-{HEX}")
        assert find("ollama:llama3:8b", True, print) == blob
        assert find(blob, True, print) == blob


def test_lm_studio(home: Path) -> None:
    for folder, name in ((".lmstudio", "a/b/m-Q4_K_M.gguf"), (".cache/lm-studio", "old.gguf"), (".lmstudio", "no.txt")):
        path = home / folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    for name in ("mmproj-m-f16.gguf", "m-00002-of-00003.gguf"):
        (home / ".lmstudio" / "models" / "a" / "b" / name).write_bytes(b"GGUF")
    (home / ".lmstudio" / "models" / "empty.gguf").touch()
    names = [model.name for model in stored_models()]
    assert names == [str(home / ".lmstudio/models/a/b/m-Q4_K_M.gguf"), str(home / ".cache/lm-studio/models/old.gguf")]


class TestHub:
    def snapshot(self, home: Path, repo: str, files: dict[str, int], kind: str = "models") -> None:
        folder = home / "hub" / f"{kind}--{repo.replace('/', '--')}"
        for path in ("refs", "blobs", "snapshots/abc"):
            (folder / path).mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        for number, (name, nbytes) in enumerate(files.items()):
            (folder / "blobs" / str(number)).write_bytes(bytes(nbytes))
            link = folder / "snapshots" / "abc" / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(folder / "blobs" / str(number))

    def test_what_can_be_loaded_is_listed(self, home: Path) -> None:
        self.snapshot(home, "org/one", {"config.json": 5, "a.safetensors": 10, "b.safetensors": 20})
        self.snapshot(home, "org/two", {"q/m.Q4_0.gguf": 30, "mmproj-m.gguf": 3, "README.md": 1})
        self.snapshot(home, "org/tokenizer", {"config.json": 5, "tokenizer.json": 10})
        self.snapshot(home, "org/adapter", {"adapter_model.safetensors": 5})
        self.snapshot(home, "org/data", {"config.json": 5, "a.safetensors": 10}, "datasets")
        assert [(model.name, model.nbytes) for model in stored_models()] == [
            ("org/one", 30),
            ("org/two:q/m.Q4_0.gguf", 30),
        ]

    def test_a_damaged_cache(self, home: Path) -> None:
        self.snapshot(home, "org/one", {"config.json": 5, "a.safetensors": 10})
        (home / "hub" / "models--org--one" / "refs" / "main").write_text("gone")
        (home / "hub" / "models--nonsense").mkdir()
        (home / "hub" / "file").touch()
        assert stored_models() == []

    def test_no_cache_at_all(self, home: Path) -> None:
        (home / "hub").touch()
        assert stored_models() == []


class TestKept:
    def test_what_there_is(self, home: Path) -> None:
        assert cached_folders() == []
        packed(home, "m-1", "org/m")
        packed(home, ".m-2.partial", "org/m")
        (packed(home, "broken", "x") / "packed.json").write_text("{")
        listed = [(folder.names[0], folder.content) for folder in cached_folders()]
        assert listed == [("broken", "packed, damaged"), ("org/m", "packed, int4")]
        assert cached_bytes() > 2 * 1000

    def test_forgetting_removes_every_folder_of_the_name_and_no_other(self, home: Path) -> None:
        gone = [packed(home, "m-1", "org/m"), packed(home, "m-2", "org/m")]
        stays = packed(home, "m-3", "org/m2")
        store = ollama(home / ".ollama" / "models")
        removed = forget("org/m")
        assert [folder.path for folder in removed] == gone
        assert all(folder.nbytes > 1000 for folder in removed)
        assert not any(path.exists() for path in gone)
        assert stays.exists()
        assert store.exists()
        assert not list(stays.parent.glob(".*")), "nothing is left of them"
        with pytest.raises(ModelNotFoundError, match="nothing is cached for 'org/m'; --forget takes one of org/m2"):
            forget("org/m")

    def test_files_go_by_several_names(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(home)
        for name in ("./f.gguf", "f.gguf", str(home / "f.gguf"), "f-1"):
            packed(home, "f-1", "./f.gguf", str(home / "f.gguf"))
            assert len(forget(name)) == 1

    def test_what_is_being_written_stays(self, home: Path) -> None:
        folder = packed(home, "m-1", "org/m")
        with FileLock(folder.parent / "m-1.lock"), pytest.raises(H2OStreamError, match="another program is writing"):
            forget("org/m")
        assert (folder / "packed.json").exists()

    def test_a_cache_that_cannot_be_changed(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        packed(home, "m-1", "org/m")

        def refuse(*_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(packed_models.Path, "rename", refuse)
        with pytest.raises(H2OStreamError, match="cannot be removed: Read-only file system"):
            forget("org/m")


class TestCommand:
    def test_models_and_forget(self, home: Path) -> None:
        ollama(home / ".ollama" / "models")
        packed(home, "m-1", "org/\x1b[2Jm\nx")
        done = invoke("h2o-chat", "--models")
        assert done.exit_code == 0
        assert "smollm2-135m" in done.stdout
        assert "ollama:llama3:8b" in done.stdout
        assert "org/[2Jm x" in done.stdout
        assert "\x1b" not in done.stdout
        assert "h2o_stream keeps 1.0 KiB in" in done.stderr
        done = invoke("h2o-chat", "--forget", "nothing")
        assert done.exit_code == 1
        assert len(done.stderr.splitlines()) == 1
        assert "nothing is cached for 'nothing'; --forget takes one of org/" in done.stderr
        done = invoke("h2o-chat", "--forget", "m-1")
        assert done.exit_code == 0
        assert "removed" in done.stderr
        assert cached_folders() == []


def test_names_of_strangers_stay_in_their_line(home: Path) -> None:
    path = home / ".lmstudio" / "models" / "a\nb.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert str(stores.stored_models()[0].name) == str(path)
    assert any(line.rstrip().endswith("LM Studio") for line in invoke("h2o-chat", "--models").stdout.splitlines())
