# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random Qwen2, its tokenizer and chat data to a folder, without a download: python tiny_model.py tiny

    tiny/model        weights and tokenizer, for every --model or model_name_or_path
    tiny/sft          chats: {"messages": [...]}
    tiny/dpo          pairs: {"prompt": [...], "chosen": [...], "rejected": [...]}
    tiny/prompts      prompts: {"prompt": [...]}

Each data folder holds one train.jsonl. The model reads bytes; its chats are sums of two numbers.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

END, START, STOP = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EXAMPLES = 256


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and those of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=STOP, pad_token=END, chat_template=CHAT_TEMPLATE, model_max_length=128
    )


def model_config(tokens: PreTrainedTokenizerFast) -> Qwen2Config:
    """Two layers."""
    return Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )


def said(role: str, content: object) -> dict[str, str]:
    """A message of a chat."""
    return {"role": role, "content": str(content)}


def write(folder: Path, rows: Iterable[dict]) -> None:
    """A data set that `datasets.load_dataset(folder)` reads."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write all of it."""
    torch.manual_seed(0)
    tokens = tokenizer()
    model = AutoModelForCausalLM.from_config(model_config(tokens))
    for part in (tokens, model):
        part.save_pretrained(folder / "model")
    draw = random.Random(0)
    terms = [(draw.randrange(100), draw.randrange(100)) for _ in range(EXAMPLES)]
    questions = [said("user", f"{a} + {b}?") for a, b in terms]
    right = [said("assistant", f"{a} + {b} = {a + b}.") for a, b in terms]
    wrong = [said("assistant", f"I do not know {a}, nor {b}.") for a, b in terms]
    write(folder / "sft", ({"messages": [q, r]} for q, r in zip(questions, right, strict=True)))
    pairs = zip(questions, right, wrong, strict=True)
    write(folder / "dpo", ({"prompt": [q], "chosen": [r], "rejected": [w]} for q, r, w in pairs))
    write(folder / "prompts", ({"prompt": [q]} for q in questions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
