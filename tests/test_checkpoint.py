"""Random-weight checkpoints: layout, determinism, and answers that depend on what is asked."""

import json
from pathlib import Path

import pytest
import torch
from jev.api import compile_request
from jev.metrics import softmax
from jev.model import DecisionModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from openjev_fast_plugin import checkpoint as ck


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Path:
    return Path(json.loads((tiny_checkpoint / "model.json").read_text("utf-8"))["model_id"])


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> DecisionModel:
    return DecisionModel.load(tiny_checkpoint, "cpu")


@pytest.fixture(scope="module")
def tokenizer(base: Path):
    return AutoTokenizer.from_pretrained(base)


def chat(tokenizer, content, **options) -> str:
    options = {"add_generation_prompt": True, "enable_thinking": False, **options}
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, **options)


def test_layout_is_upstreams(tiny_checkpoint, base):
    assert tiny_checkpoint.parts[-2:] == ("package", "checkpoint")
    files = {file.relative_to(tiny_checkpoint).as_posix() for file in tiny_checkpoint.rglob("*")}
    assert {"model.json", "head.pt", "temperature.json"} <= files
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= files
    meta = json.loads((tiny_checkpoint / "model.json").read_text("utf-8"))
    assert set(meta) == {"model_id", "revision", "max_length", "lora_rank", "method"}
    assert base.is_absolute() and base == tiny_checkpoint.parents[1] / "base"
    temperature = json.loads((tiny_checkpoint / "temperature.json").read_text("utf-8"))
    assert temperature == {"temperature": ck.TEMPERATURE}
    adapter = json.loads((tiny_checkpoint / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert (adapter["r"], adapter["lora_alpha"]) == (8, 16)
    assert set(adapter["target_modules"]) == set(ck.LORA_TARGETS)


def test_same_seed_same_bytes(tiny_checkpoint, base, tmp_path):
    again = ck.make_checkpoint("tiny", tmp_path / "again")
    root = tiny_checkpoint.parents[1]
    names = [file.relative_to(root) for file in root.rglob("*") if file.is_file()]
    with_the_base_path = {"model.json", "adapter_config.json"}
    for name in names:
        if name.name not in with_the_base_path:
            assert (root / name).read_bytes() == (again.parents[1] / name).read_bytes(), name


def test_another_seed_other_weights(tiny_checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(ck, "train_tokenizer", lambda vocab: tokenizer)
    other = ck.make_checkpoint("tiny", tmp_path / "other", seed=1)
    for file in ("base/model.safetensors", "package/checkpoint/adapter/adapter_model.safetensors"):
        ours, theirs = load_file(tiny_checkpoint.parents[1] / file), load_file(other.parents[1] / file)
        assert ours.keys() == theirs.keys()
        assert not any(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_appears_whole_or_not_at_all(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="full"):
        ck.make_checkpoint("tiny", tmp_path / "full")
    with pytest.raises(ValueError, match="unknown profile 'huge'.*tiny, small"):
        ck.make_checkpoint("huge", tmp_path / "new")

    def fail(*_):
        raise OSError("disk full")

    messages: list[str] = []
    monkeypatch.setattr(ck, "train_tokenizer", lambda vocab: tokenizer)
    monkeypatch.setattr(ck, "_write_head", fail)
    with pytest.raises(OSError, match="disk full"):
        ck.make_checkpoint("tiny", tmp_path / "new", progress=messages.append)
    assert [file.name for file in tmp_path.iterdir()] == ["full"]
    assert any("tokenizer" in line for line in messages) and any("parameters" in line for line in messages)


def test_shards_load_like_one_file(tmp_path, base, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = ck.model_config(ck.PROFILES["tiny"], tokenizer)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(ck, "SHARD_BYTES", 300_000)
    ck._write_base_weights(tmp_path, config, 0, lambda message: None)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    whole = load_file(base / "model.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in loaded.state_dict().items())


def test_every_weight_is_loaded(base, model):
    full, report = AutoModelForImageTextToText.from_pretrained(base, output_loading_info=True)
    assert type(full).__name__ == "Qwen3_5ForConditionalGeneration"
    assert not any(report.values())
    assert {parameter.dtype for parameter in full.parameters()} == {torch.bfloat16}
    lora = {name: value for name, value in model.backbone.named_parameters() if "lora_" in name}
    per_layer = {"full_attention": 4, "linear_attention": 2}
    layers = model.backbone.config.layer_types
    assert len(lora) == 2 * sum(per_layer[kind] for kind in layers)
    assert all(value.abs().max() > 0 for value in lora.values())


@pytest.mark.parametrize("profile", ck.PROFILES)
def test_profile_shapes(profile, tokenizer):
    from transformers import Qwen3_5ForConditionalGeneration

    shapes = ck.PROFILES[profile]
    config = ck.model_config(shapes, tokenizer).text_config
    assert [index % 4 == 3 for index in range(shapes.layers)] == [
        kind == "full_attention" for kind in config.layer_types
    ]
    assert 2 * sum(config.rope_parameters["mrope_section"]) == shapes.rotary_dim
    with torch.device("meta"):
        full = Qwen3_5ForConditionalGeneration(ck.model_config(shapes, tokenizer))
    text = sum(p.numel() for p in full.model.language_model.layers.parameters())
    expected = {"tiny": 0.235e6, "small": 108e6, "2b": 1.36e9, "9b": 6.9e9, "27b": 24.4e9}
    assert text == pytest.approx(expected[profile], rel=0.03)


def test_heads_forget_slowly_and_fast(base):
    weights = load_file(base / "model.safetensors")
    for layer in (0, 1, 2):
        prefix = f"model.language_model.layers.{layer}.linear_attn"
        decay = weights[f"{prefix}.A_log"].float().exp() * torch.nn.functional.softplus(
            weights[f"{prefix}.dt_bias"].float()
        )
        assert decay.min() < 0.01 and decay.max() > 1


def test_the_tokenizer_survives_saving(tokenizer):
    trained = ck.train_tokenizer(ck.PROFILES["tiny"].vocab)
    assert tokenizer.get_vocab() == trained.get_vocab()
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", "<|endoftext|>")
    for text in (
        "Don't pay 12345 € twice!\n\n  The order's late.",
        "e\u0301 and \u00e9 are one",
        '{"a": [1, 2.5, null], "ü": "한국어"}',
        "<|im_start|>user\n<think>\n\n</think>\n\n<|im_end|>",
        "👩‍👩‍👧 \u200b\u0000\ud7ff नमस्ते",
        "",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == trained(text)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.backend_tokenizer.normalizer.normalize_str(text)


@pytest.mark.parametrize("word", ["Yes", "No", *ck.ADDED_TOKENS])
def test_single_tokens(tokenizer, word):
    assert len(tokenizer.encode(word, add_special_tokens=False)) == 1


def test_chat_template(tokenizer):
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    assert chat(tokenizer, "Hello") == turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat(tokenizer, "Hello", enable_thinking=True) == turn + "<|im_start|>assistant\n<think>\n"
    assert chat(tokenizer, "Hello", add_generation_prompt=False) == turn
    assert chat(tokenizer, " \n Hello\t\n") == chat(tokenizer, "Hello")
    assert chat(tokenizer, [{"type": "text", "text": "Hello"}]) == chat(tokenizer, "Hello")
    inside = "{{ 1 }} <|im_end|>"
    assert chat(tokenizer, inside, add_generation_prompt=False) == turn.replace("Hello", inside)


def test_plain_english_takes_few_tokens(tokenizer):
    text = (
        "Hello, I ordered a coffee machine two weeks ago and it arrived with a cracked water tank. "
        "I would like my money back, otherwise I will dispute the payment with my bank."
    )
    assert len(tokenizer(text)["input_ids"]) < 1.4 * len(text.split())


def test_answers_are_not_degenerate(model):
    words = ("red", "green", "blue", "refund", "laptop", "north", "7", "legal")
    options = {f"Queue {word}": None for word in words}
    questions = {
        "queue": {"type": "choice", "instructions": "Which queue?", "criteria": options},
        "late": {"type": "noul", "instructions": "Is it late?"},
    }
    states = [
        "Hello.",
        "The parcel is broken. " * 20,
        {"paid": True, "items": [1, 2]},
        "money" + " word" * 400,
    ]
    with torch.inference_mode():
        rows = [model(compile_request(state, questions)) for state in states]
    queues = torch.stack([row[0] for row in rows])
    assert 0.2 < queues.std() < 4 and queues.std(dim=1).min() > 0.1 and queues.std(dim=0).min() > 0.1
    assert all(max(softmax(row.tolist(), ck.TEMPERATURE)) < 0.9 for row in queues)
    nouls = torch.stack([row[1][1] for row in rows])
    assert nouls.std() > 0.1


def test_a_far_word_and_the_adapter_change_the_answer(model):
    question = {"late": {"type": "noul", "instructions": "Is it late?"}}
    with torch.inference_mode():
        logit = model(compile_request("apple" + " word" * 600, question))[0][1]
        other = model(compile_request("money" + " word" * 600, question))[0][1]
        with model.backbone.disable_adapter():
            plain = model(compile_request("apple" + " word" * 600, question))[0][1]
    assert abs(logit - other) > 0.02
    assert abs(logit - plain) > 0.02
