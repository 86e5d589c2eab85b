"""Writes small model folders with random weights, and what mlx-lm computes from them.

Beside each folder's own files stands `expected.json`: a prompt, the logits after each of its tokens,
and the tokens that follow greedily. All in float32 on the CPU.
"""

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 320
PROMPT_TOKENS = 40
GREEDY_TOKENS = 24

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name, family, what differs from the common configuration, how it is packed, stored type, shards.
CASES = [
    ("llama-tied", "llama", {}, None, "float32", 1),
    ("llama-untied-4bit", "llama", {"tie_word_embeddings": False}, (4, 64, {}), "float16", 2),
    ("llama-scaled", "llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}, None, "bfloat16", 1),
    ("llama-biased", "llama", {"attention_bias": True, "mlp_bias": True}, (8, 128, {}), "float32", 1),
    ("llama-linear", "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, (2, 32, {}), "float32", 1),
    ("qwen2-tied-4bit", "qwen2", {}, (4, 32, {"model.embed_tokens": (8, 64)}), "bfloat16", 1),
    ("qwen2-untied", "qwen2", {"tie_word_embeddings": False}, None, "float16", 3),
    ("qwen2-untied-3bit", "qwen2", {"tie_word_embeddings": False}, (3, 64, {"lm_head": False}), "float16", 1),
    ("qwen3-tied-6bit", "qwen3", {"head_dim": 64}, (6, 64, {}), "bfloat16", 1),
    ("qwen3-untied", "qwen3", {"tie_word_embeddings": False, "head_dim": 64}, None, "bfloat16", 1),
]
PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "Die Hauptstadt von Österreich heißt",
    "Count from one to twenty: one, two,",
    "List three facts about the moon.",
]
# Of each prompt, plain and as a chat.
REAL_TOKENS = 64


def configuration(family, changes):
    return {
        "model_type": family,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    } | ({"head_dim": 32} if family == "qwen3" else {}) | changes


def build(config):
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))

    def random(path, array):
        if array.ndim == 1 and path.endswith("weight"):
            return 1 + 0.1 * mx.random.normal(array.shape)
        # Larger than a trained model's, so that an error shows.
        return mx.random.normal(array.shape) * (2.0 / array.shape[-1]) ** 0.5

    model.update(tree_map_with_path(random, model.parameters()))
    return model


def pack(model, packing, config):
    bits, group_size, overrides = packing
    entry = lambda bits, group_size: {"bits": bits, "group_size": group_size}

    def chosen(path, module):
        if not hasattr(module, "to_quantized"):
            return False
        own = overrides.get(path, True)
        return entry(*own) if isinstance(own, tuple) else own

    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=chosen)
    named = {path: entry(*own) if own else False for path, own in overrides.items()}
    config["quantization"] = entry(bits, group_size) | named


def save_weights(folder, weights, shards):
    names = sorted(weights)
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        return
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        where |= {name: file for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def save_tokenizer(folder):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    words.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def follow(model, prompt, count, ends=()):
    """Tokens that follow greedily, one a pass."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)[:, -1]
    tokens = []
    while len(tokens) < count:
        token = mx.argmax(logits, axis=-1).item()
        if token in ends:
            break
        tokens.append(token)
        logits = model(mx.array([[token]]), cache=cache)[:, -1]
    return tokens


def float32(model):
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def write_case(root, index, name, family, changes, packing, stored, shards):
    mx.random.seed(1000 + index)
    folder = root / name
    folder.mkdir()
    config = configuration(family, changes)
    model = build(config)
    if packing:
        pack(model, packing, config)
    model.set_dtype(getattr(mx, stored))
    mx.eval(model.parameters())
    save_weights(folder, dict(tree_flatten(model.parameters())), shards)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)

    # Read back by mlx-lm's own loader: the folder is as others would find it.
    model = float32(load_model(folder)[0])
    prompt = np.random.default_rng(index).integers(0, 256, PROMPT_TOKENS).tolist()
    logits = model(mx.array([prompt]))[0]
    expected = {
        "prompt": prompt,
        "logits": [[round(x, 7) for x in row] for row in logits.tolist()],
        "greedy": follow(model, prompt, GREEDY_TOKENS),
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    print(f"{name}: logits up to {mx.abs(logits).max().item():.1f}")


def write_real(folder):
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # Unpacked, which the reference computes several times faster and to the same numbers.
    model = dequantize_model(float32(load_model(folder)[0]))
    mx.eval(model.parameters())
    template = (folder / "chat_template.jinja").read_text()
    rows = []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        chat = words.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        for prompt_text in (text, chat):
            prompt = words.encode(prompt_text, add_special_tokens=False)
            greedy = follow(model, prompt, REAL_TOKENS, ends=(2,))
            rows.append({
                "text": prompt_text,
                "prompt": prompt,
                "greedy": greedy,
                "answer": words.decode(greedy),
            })
            print(f"{prompt_text[:40]!r}: {rows[-1]['answer'][:60]!r}")
    (folder / "expected.json").write_text(json.dumps(rows))


def main():
    mx.set_default_device(mx.cpu)
    root = Path(sys.argv[1])
    for index, case in enumerate(CASES):
        write_case(root, index, *case)
    write_real(root / "smollm2")


if __name__ == "__main__":
    main()
