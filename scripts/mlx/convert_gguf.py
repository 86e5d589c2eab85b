"""Turns a GGUF file of the Llama architecture into a model folder for the MLX engine.

MLX's own GGUF reader unpacks Q4_0, Q4_1 and Q8_0 blocks into affine-packed arrays with groups of 32
and reads F16 and F32 as they are, so nothing is rounded but, with a 16-bit --dtype, the scales.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32  # of every GGUF block type that MLX reads packed
SPECIAL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

NAMES = [
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.attn_output\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.attn_([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
]

# How text is cut before its pieces are looked up, by the name that the file gives to it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(name):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("llama-bpe", "llama3"):
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    sys.exit(f"the tokenizer's way of cutting text, {name!r}, is not supported")


class Metadata:
    def __init__(self, values):
        self.values = values

    def has(self, key):
        return key in self.values

    def get(self, key, default=None):
        value = self.values.get(key, default)
        return value.item() if hasattr(value, "item") and value.size == 1 else value

    def need(self, key):
        if key not in self.values:
            sys.exit(f"the file does not say {key}")
        return self.get(key)


def renamed(name):
    for pattern, replacement in NAMES:
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    sys.exit(f"unknown tensor {name}")


def unpermuted(array, heads):
    """Query and key rows are stored interleaved for llama.cpp's rotation; undone by rows."""
    rows = array.shape[0]
    split = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def read_tensors(weights, heads, kv_heads, dtype):
    tensors = {}
    for name, array in weights.items():
        if name.startswith("rope_freqs"):
            continue
        new = renamed(name)
        if ".q_proj." in new:
            array = unpermuted(array, heads)
        if ".k_proj." in new:
            array = unpermuted(array, kv_heads)
        tensors[new] = array if array.dtype == mx.uint32 else array.astype(dtype)
    return tensors


def quantization(tensors):
    """What config.json says of the packing: the commonest one, and by name whatever differs."""
    layers = sorted(name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    if not layers:
        return None
    bits = {}
    for layer in layers:
        words, groups = (tensors[f"{layer}.{part}"].shape[-1] for part in ("weight", "scales"))
        bits[layer] = words * 32 // (groups * GROUP_SIZE)
    common = max(set(bits.values()), key=list(bits.values()).count)
    entry = lambda n: {"group_size": GROUP_SIZE, "bits": n, "mode": "affine"}
    plain = sorted(
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith("_proj.weight") or name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    others = {layer: entry(bits[layer]) for layer in layers if bits[layer] != common}
    others |= {layer: False for layer in plain if layer not in bits}
    return entry(common) | others


def config(meta, tensors, dtype_name):
    hidden = meta.need("llama.embedding_length")
    heads = meta.need("llama.attention.head_count")
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        sys.exit("a rotation of a part of each head is not supported")
    if meta.get("llama.rope.scaling.type", "none") != "none":
        sys.exit("scaled rotations are not supported")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype_name,
        "hidden_size": hidden,
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
        "max_position_embeddings": meta.need("llama.context_length"),
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "rms_norm_eps": round(meta.need("llama.attention.layer_norm_rms_epsilon"), 10),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    packing = quantization(tensors)
    if packing:
        values |= {"quantization": packing, "quantization_config": packing}
    return values


def tokenizer(meta):
    kind = meta.need("tokenizer.ggml.model")
    if kind != "gpt2":
        sys.exit(f"tokenizers of the kind {kind!r} are not supported (gpt2 is)")
    tokens = meta.need("tokenizer.ggml.tokens")
    types = meta.need("tokenizer.ggml.token_type").tolist()
    merges = [tuple(merge.split(" ", 1)) for merge in meta.need("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizer(meta.get("tokenizer.ggml.pre", "gpt-2"))
    result.decoder = decoders.ByteLevel()
    by_type = lambda *wanted: [t for t, kind in zip(tokens, types) if kind in wanted]
    result.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in by_type(SPECIAL)])
    result.add_tokens([AddedToken(t, normalized=False) for t in by_type(USER_DEFINED)])
    if result.get_vocab_size() != len(tokens):
        sys.exit("the tokenizer's entries are not distinct")
    return result, tokens


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source, folder, dtype_name):
    weights, values = mx.load(str(source), return_metadata=True)
    meta = Metadata(values)
    architecture = meta.need("general.architecture")
    if architecture != "llama":
        sys.exit(f"the architecture {architecture!r} is not supported (llama is)")
    if "rope_freqs.weight" in weights:
        sys.exit("scaled rotations are not supported")
    heads = meta.need("llama.attention.head_count")
    kv_heads = meta.get("llama.attention.head_count_kv", heads)
    tensors = read_tensors(weights, heads, kv_heads, getattr(mx, dtype_name))
    words, tokens = tokenizer(meta)

    text = lambda key: tokens[meta.get(key)] if meta.has(key) else None
    template = meta.get("tokenizer.chat_template")
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(sorted(tensors.items())), metadata={"format": "mlx"}
    )
    write_json(folder / "config.json", config(meta, tensors, dtype_name))
    write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    words.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta.need("llama.context_length"),
        "bos_token": text("tokenizer.ggml.bos_token_id"),
        "eos_token": text("tokenizer.ggml.eos_token_id"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return len(tensors), sum(array.nbytes for array in tensors.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float16", choices=["float32", "float16", "bfloat16"])
    arguments = parser.parse_args()
    if not arguments.gguf.is_file():
        sys.exit(f"{arguments.gguf} is not a file")
    if arguments.folder.exists():
        sys.exit(f"{arguments.folder} exists already")
    arguments.folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed at the end: a folder is whole or not there.
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=arguments.folder.parent))
    try:
        count, size = convert(arguments.gguf, work, arguments.dtype)
        os.chmod(work, 0o755)
        work.rename(arguments.folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{arguments.folder}: {count} tensors, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
