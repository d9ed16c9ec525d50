"""Stand-in for Open-Jev (see `jev/__init__.py`): a Qwen3.5 text model that reads one logit per candidate."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer

from .api import candidate_prompts


class DecisionModel(nn.Module):
    """The text half of an image-text model, and a linear head on each prompt's last token."""

    def __init__(
        self, model_id: str, revision: str, device: str = "cuda:0", lora_rank: int = 8, max_length: int = 384
    ) -> None:
        super().__init__()
        self.model_id = model_id
        self.revision = revision
        self.device_name = device
        self.lora_rank = lora_rank
        self.max_length = max_length
        self.last_input_tokens = 0
        self.tokenizer = AutoTokenizer.from_pretrained(model_id, revision=revision)
        self.tokenizer.padding_side = "right"
        full = AutoModelForImageTextToText.from_pretrained(
            model_id,
            revision=revision,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            device_map={"": device},
        )
        self.backbone = full.model.language_model
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, device=device, dtype=torch.float32)
        yes, no = (self.tokenizer.encode(word, add_special_tokens=False) for word in ("Yes", "No"))
        if len(yes) != 1 or len(no) != 1:
            raise ValueError("the tokenizer must have Yes and No as single tokens")
        with torch.no_grad():
            rows = full.lm_head.weight[[yes[0], no[0]]].float()
            self.head.weight.copy_(rows[:1] - rows[1:])
            self.head.bias.zero_()

    @classmethod
    def load(cls, path: str | Path, device: str) -> "DecisionModel":
        """The model of a checkpoint package: base, adapter and head."""
        path = Path(path)
        meta = json.loads((path / "model.json").read_text("utf-8"))
        model = cls(
            meta["model_id"],
            meta["revision"],
            device=device,
            lora_rank=meta["lora_rank"],
            max_length=meta["max_length"],
        )
        model.backbone = PeftModel.from_pretrained(model.backbone, path / "adapter")
        model.head.load_state_dict(torch.load(path / "head.pt", map_location=device, weights_only=True))
        return model.eval()

    def forward(self, records: list[dict]) -> list[torch.Tensor]:
        """Logits per record, float32: [options] for a choice or score, [0, logit] for a noul.

        ValueError when a prompt is longer than `max_length`.
        """
        prompts = [candidate_prompts(record) for record in records]
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            for group in prompts
            for prompt in group
        ]
        batch = self.tokenizer(texts, padding=True, return_tensors="pt")
        lengths = batch["attention_mask"].sum(dim=1)
        longest = int(lengths.max())
        if longest > self.max_length:
            raise ValueError(
                f"Input length {longest} exceeds max_length={self.max_length}; no silent truncation"
            )
        self.last_input_tokens = int(lengths.sum())

        device = self.head.weight.device
        hidden = self.backbone(
            input_ids=batch["input_ids"].to(device),
            attention_mask=batch["attention_mask"].to(device),
            use_cache=False,
        ).last_hidden_state  # [prompts, longest, hidden]
        last = hidden[torch.arange(len(texts), device=device), (lengths - 1).to(device)]
        logits = self.head(last.to(self.head.weight.dtype)).squeeze(-1)
        rows = logits.split([len(group) for group in prompts])
        return [
            torch.stack([row.new_zeros(()), row[0]]) if record["kind"] == "noul" else row
            for record, row in zip(records, rows, strict=True)
        ]
