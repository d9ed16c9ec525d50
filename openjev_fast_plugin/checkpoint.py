"""Random-weight checkpoints in Open-Jev's layout, for tests, the demo and benchmarks.

`make_checkpoint("tiny", OUT)` writes a base model (`OUT/base/`) and a checkpoint package on it
(`OUT/package/checkpoint/`), so that any Open-Jev starts with `--checkpoint OUT/package/checkpoint`.
Nothing is downloaded: the tokenizer is trained here on text made here, the weights are drawn from a
seed. The answers mean nothing, but every part of the model takes part in them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3_5Config

Progress = Callable[[str], None]

MAX_LENGTH = 4096
TEMPERATURE = 1.25
LORA_RANK = 8
LORA_ALPHA = 16
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj")
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Profile:
    """The shapes of one text model; every fourth layer is full attention, the others Gated DeltaNet."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_head_dim: int
    vocab: int = 8192


PROFILES = {
    "tiny": Profile(64, 4, 128, 4, 2, 32, 16, 2, 4, 32, vocab=4096),
    "small": Profile(1024, 8, 3072, 8, 2, 128, 32, 8, 16, 64),
    "2b": Profile(2048, 24, 6144, 8, 2, 256, 64, 16, 16, 128),
    "9b": Profile(4096, 32, 12288, 16, 4, 256, 64, 16, 32, 128),
    "27b": Profile(5120, 64, 17408, 24, 4, 256, 64, 16, 48, 128),
}


def make_checkpoint(
    profile: str, out: str | os.PathLike[str], *, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Write `out/base/` and `out/package/checkpoint/`; the same seed gives the same bytes.

    profile: a name in `PROFILES`
    out: a folder that does not exist yet or is empty; it appears whole or not at all
    seed: of the weights; the tokenizer depends on the profile's vocabulary size only
    progress: called with one line of text as the work goes on

    Returns the path to give to `--checkpoint`; the package names its base by absolute path, so the folder
    works where it was written. ValueError for an unknown profile, FileExistsError when
    `out` already holds something.
    """
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    target = Path(out).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} already exists and is not an empty folder")
    say = progress if progress is not None else lambda message: None
    shapes = PROFILES[profile]

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        scratch.chmod(0o755)
        base = scratch / "base"
        base.mkdir()
        say(f"training a tokenizer of {shapes.vocab} tokens")
        tokenizer = train_tokenizer(shapes.vocab)
        tokenizer.save_pretrained(base)
        config = model_config(shapes, tokenizer)
        config.save_pretrained(base)
        _write_base_weights(base, config, seed, say)

        package = scratch / "package" / "checkpoint"
        package.mkdir(parents=True)
        say("writing the checkpoint package")
        _write_adapter(package / "adapter", config, str(target / "base"), seed)
        _write_head(package / "head.pt", shapes.hidden, seed)
        _write_json(package / "temperature.json", {"temperature": TEMPERATURE})
        _write_json(
            package / "model.json",
            {
                "model_id": str(target / "base"),
                "revision": f"random-{profile}-seed-{seed}",
                "max_length": MAX_LENGTH,
                "lora_rank": LORA_RANK,
                "method": "random-weights",
            },
        )
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    checkpoint = target / "package" / "checkpoint"
    say(f"wrote {checkpoint}")
    return checkpoint


def text_settings(shapes: Profile) -> dict[str, Any]:
    """Keyword arguments of `Qwen3_5TextConfig` that `shapes` decides."""
    half = shapes.rotary_dim // 2
    return {
        "vocab_size": shapes.vocab,
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.mlp,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "linear_num_key_heads": shapes.linear_key_heads,
        "linear_num_value_heads": shapes.linear_value_heads,
        "linear_key_head_dim": shapes.linear_head_dim,
        "linear_value_head_dim": shapes.linear_head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": shapes.rotary_dim / shapes.head_dim,
            "mrope_section": [(half + 2 - stream) // 3 for stream in range(3)],
            "mrope_interleaved": True,
        },
    }


def model_config(shapes: Profile, tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Config:
    """The image-text config around `shapes`: the smallest vision tower, token ids from `tokenizer`."""
    from transformers import Qwen3_5Config

    ids = tokenizer.get_vocab()
    text = {
        **text_settings(shapes),
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "dtype": "bfloat16",
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "out_hidden_size": shapes.hidden,
        "dtype": "bfloat16",
    }
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        architectures=["Qwen3_5ForConditionalGeneration"],
        dtype="bfloat16",
    )


# Weights


def _rng(seed: int, name: str) -> np.random.Generator:
    """One generator per tensor, so that its values depend on nothing but the seed and its name."""
    import numpy as np

    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values for one parameter: bfloat16 [*shape].

    Matrices keep the scale of what they multiply (standard deviation 1/sqrt(fan in)); norm and conv
    weights are spread around their neutral value; `A_log` and `dt_bias` run from heads that forget
    within a token to heads that remember thousands.
    """
    import numpy as np
    import torch

    rng = _rng(seed, name)
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(".A_log"):
        values = np.linspace(log(0.05), log(8.0), shape[0], dtype=np.float32) + 0.2 * noise
    elif name.endswith(".dt_bias"):
        values = np.linspace(-5.0, 1.0, shape[0], dtype=np.float32) + 0.2 * noise
    elif name.endswith(".conv1d.weight"):
        values = 0.5 * noise
    elif name.endswith(".embed_tokens.weight"):
        values = 0.5 * noise
    elif len(shape) > 1:
        values = noise * np.float32(prod(shape[1:]) ** -0.5)
    elif name.endswith(".bias"):
        values = 0.1 * noise
    elif name.endswith((".q_norm.weight", ".k_norm.weight")):
        values = 0.5 + 0.2 * noise  # above the neutral 0: attention that prefers some rows
    elif name.endswith(".linear_attn.norm.weight") or ".visual." in name:
        values = 1.0 + 0.2 * noise
    else:
        values = 0.2 * noise
    return torch.from_numpy(values).to(torch.bfloat16)


def _empty_model(config: Qwen3_5Config) -> Any:
    """The whole image-text model without storage, for its names and shapes."""
    import torch
    from transformers import Qwen3_5ForConditionalGeneration

    with torch.device("meta"):
        return Qwen3_5ForConditionalGeneration(config)


def _write_base_weights(base: Path, config: Qwen3_5Config, seed: int, say: Progress) -> None:
    """Draw and write the safetensors of the whole image-text model, one shard in memory at a time."""
    from safetensors.torch import save_file

    parameters = {name: tuple(tensor.shape) for name, tensor in _empty_model(config).named_parameters()}
    sizes = {name: 2 * prod(shape) for name, shape in parameters.items()}
    total = sum(sizes.values())
    say(f"writing {total / 2e6:.1f} M parameters, {total / 1e6:.0f} MB")

    shards: list[list[str]] = [[]]
    for name in parameters:
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + sizes[name] > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)

    weight_map = {}
    drawn = reported = 0
    for index, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = _draw(name, parameters[name], seed)
            weight_map[name] = file
            drawn += sizes[name]
            if drawn - reported >= 64 << 20:
                say(f"drew {drawn / 1e6:.0f} of {total / 1e6:.0f} MB")
                reported = drawn
        save_file(tensors, base / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index_file = base / "model.safetensors.index.json"
        _write_json(index_file, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_adapter(folder: Path, config: Qwen3_5Config, base: str, seed: int) -> None:
    """A PEFT LoRA on the text model, with a B that is not zero: about a quarter of each base matrix."""
    import numpy as np
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    lora = LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=list(LORA_TARGETS),
        base_model_name_or_path=base,
        inference_mode=True,
    )
    lora.save_pretrained(str(folder))
    adapter_config = folder / "adapter_config.json"
    written = json.loads(adapter_config.read_text("utf-8"))
    written["target_modules"] = sorted(LORA_TARGETS)  # PEFT keeps a set: its order differs between runs
    _write_json(adapter_config, written)

    tensors = {}
    for name, module in _empty_model(config).model.language_model.named_modules():
        if name.rpartition(".")[2] not in LORA_TARGETS or not isinstance(module, torch.nn.Linear):
            continue
        for part, shape, scale in (
            ("lora_A", (LORA_RANK, module.in_features), module.in_features**-0.5),
            ("lora_B", (module.out_features, LORA_RANK), 0.05),
        ):
            key = f"base_model.model.{name}.{part}.weight"
            noise = _rng(seed, key).standard_normal(shape, dtype=np.float32)
            tensors[key] = torch.from_numpy(noise * np.float32(scale))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _write_head(file: Path, hidden: int, seed: int) -> None:
    """The state dict of `nn.Linear(hidden, 1)` in float32, for logits of order one."""
    import numpy as np
    import torch

    noise = _rng(seed, "head").standard_normal((1, hidden), dtype=np.float32)
    weight = torch.from_numpy(noise * np.float32(2 * hidden**-0.5))
    torch.save({"weight": weight, "bias": torch.full((1,), 0.1)}, file)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


# Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Added like the special ones, but kept when text is decoded without special tokens.
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ADDED_TOKENS = SPECIAL_TOKENS + PLAIN_TOKENS

# Split as Qwen3.5 does: words with their marks, single digits, runs of punctuation, line ends.
PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + text(message.content) | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- else -%}
    {{- '<think>\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def train_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab` tokens, the added ones included; "Yes" and "No" are single."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as split
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = split.Sequence(
        [
            split.Split(Regex(PRETOKENIZE), behavior="isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(ADDED_TOKENS),
        initial_alphabet=split.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


# Most frequent first: the corpus draws them with falling weight.
_WORDS = """
the of and to a in is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said what
up its about into than them can only other new some could time these two may then do first any my now such
like our over man me even most made after also did many before must through back years where much your way
well down should because each just those people how too little state good very make world still own see men
work long get here between both life being under never day same another know while last might us great old
year off come since against go came right used take three please customer order refund invoice ticket
account payment delivery support billing urgent angry request context question answer proposed correct yes
reply message email phone call team agent service product price charge charged twice money bank card address
broken damaged late missing wrong cancel return replace exchange warranty shipping package parcel tracking
number status update password login error problem issue help need want tell ask wait week month today
tomorrow yesterday hour minute morning evening happy calm annoyed frustrated furious polite rude clear
unclear simple complex high low medium level score choice option route department sales technical legal
finance human manager review approve reject confirm check verify send receive open close start stop begin
end change keep lose find give show write read speak hear feel think believe understand remember forget
decide choose compare measure count sort build test run walk drive fly travel arrive leave stay live move
house room door window table chair kitchen garden street city town country river mountain sea island forest
tree flower animal dog cat horse bird fish food bread water milk coffee tea sugar salt fruit apple orange
green blue red white black yellow brown large small short tall wide narrow deep heavy light fast slow early
easy hard strong weak young rich poor cold warm hot dry wet clean dirty full empty quiet loud safe dangerous
important possible likely certain true false reason result cause effect fact idea story book page line word
letter sentence language name place part side point case group company market office school student teacher
doctor nurse police court law rule contract clause agreement tenant landlord rent lease insurance claim
policy premium tax budget report data record file table field value key list string object array index
system server client network machine computer software code function method class module version release
feature bug crash memory disk speed power energy engine battery screen button device sensor camera image
video sound music film game sport player match win lost science research study theory model sample method
patient treatment symptom medicine dose risk benefit weather rain snow wind storm summer winter spring
autumn north south east west left january february march april june july august september october november
december monday tuesday wednesday thursday friday saturday sunday first second third half quarter hundred
thousand million percent total average minimum maximum already ago yet soon later often always never
sometimes again almost enough quite rather perhaps maybe really nobody somebody everybody nothing something
anything everything nowhere anywhere everywhere myself yourself himself itself ourselves themselves
otherwise however although though unless until whether either neither both several few less least worse
worst best better next previous following above below behind beside inside outside around across along
toward against within without among during except instead once whenever wherever whoever whose whom shall
cannot didn doesn isn wasn won couldn wouldn shouldn haven hasn aren weren hello hi dear thanks thank
regards sincerely sorry welcome sure okay fine great bad terrible awful excellent perfect nice lovely
ordered arrived received refused shipped delivered returned paid sent called waited promised expected
replied opened closed used told asked said took gave got made came went left bought sold met felt thought
knew began cracked scratched leaking dented torn faulty defective promising written photo photos picture
receipt proof dispute complaint chargeback warranty voucher discount coupon subscription plan trial renewal
upgrade downgrade user assistant system conversation chat history transcript summary note notes ticket
priority severity category label topic tag intent sentiment mood tone emotion calmly routing review handled
escalated resolved pending machine tank coffee water kettle laptop headset keyboard charger cable shoes
jacket dress shirt bag watch ring
"""
_SUFFIXES = ("",) * 6 + ("s", "s", "ed", "ing", "er", "ly", "able", "ment", "ness", "less", "ful", "ation")
_PREFIXES = ("",) * 8 + ("un", "re", "over", "pre")
_OTHER_SCRIPTS = (
    "Die Rechnung für März wurde doppelt abgebucht, bitte prüfen Sie das.",
    "Le colis est arrivé abîmé ; je voudrais être remboursé rapidement.",
    "El pedido número 4471 todavía no ha llegado, ¿qué pasó?",
    "Il cliente è molto arrabbiato perché il pacco è già in ritardo.",
    "Заказ пришёл не полностью, верните, пожалуйста, деньги.",
    "お客様の返金をお願いします。 订单还没有到，请退款。 환불을 요청합니다. 🙂 🚚",
)


def _corpus() -> Iterator[str]:
    """Text for the tokenizer, always the same: notes, decision prompts, JSON, and other scripts."""
    rng = random.Random(20260929)
    words = _WORDS.split()
    weights = [1 / (rank + 12) for rank in range(len(words))]

    def sentence() -> str:
        drawn = rng.choices(words, weights, k=rng.randint(5, 14))
        for place in range(len(drawn)):
            if rng.random() < 0.4:
                drawn[place] = rng.choice(_PREFIXES) + rng.choice(words) + rng.choice(_SUFFIXES)
        return " ".join(drawn).capitalize() + rng.choice((".", ".", ".", "!", "?"))

    for _ in range(4000):
        state, question, option = sentence(), sentence(), " ".join(rng.choices(words, k=3))
        yield f"Context:\n{state} {sentence()}\n\nQuestion: {question}\n"
        yield f"Proposed answer: {option}\nIs this proposed answer correct? Answer Yes or No.\nYes\nNo\n"
        yield "Is the answer to this question yes? Answer Yes or No.\n"
        yield f"Yes means: {option}\nNo means: {state}\n"
        order = {"id": rng.randint(1, 99999), rng.choice(words): rng.choice(words), "ok": rng.random() < 0.5}
        yield f"user\n{sentence()}\nassistant\n\n"
        yield f"{state}\n\n{option.capitalize()}"
        yield json.dumps({"order": order, "items": rng.choices(words, k=2)}, sort_keys=True)
        yield "\n".join(f"- {word.capitalize()}: {rng.randint(0, 100)}%" for word in rng.choices(words, k=3))
        yield rng.choice(_OTHER_SCRIPTS)
