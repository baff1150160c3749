#!/usr/bin/env python3
"""The converter of llama.cpp for the tiny Qwen3 of the tests: it writes a true GGUF file, in float32."""

import argparse
import json
import sys
from pathlib import Path

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--outtype", choices=["bf16"], required=True)
parser.add_argument("--outfile", required=True)
arguments = parser.parse_args()
config = json.loads((arguments.folder / "config.json").read_text())
if config["model_type"] != "qwen3":
    sys.exit(f"ERROR:hf-to-gguf:Model {config['architectures'][0]} is not supported")
import numpy as np  # noqa: E402 - what is refused needs neither
from gguf import GGUFWriter  # noqa: E402

writer = GGUFWriter(arguments.outfile, "qwen3")
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_value_length(config["head_dim"])
writer.add_vocab_size(config["vocab_size"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
for file in sorted(arguments.folder.glob("*.safetensors")):
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for key, entry in json.loads(data[8:start]).items():
        if key != "__metadata__":
            name = key
            for old, new in NAMES.items():
                name = name.replace(f"{old}.", f"{new}.")
            assert entry["dtype"] == "BF16"
            first, last = entry["data_offsets"]
            halves = np.frombuffer(data[start + first : start + last], np.uint16).astype(np.uint32)
            writer.add_tensor(name, (halves << 16).view(np.float32).reshape(entry["shape"]))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
