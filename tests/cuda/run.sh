#!/usr/bin/env bash
# The CUDA tests and the GPU figures, in under six minutes, on a machine with one card.
# Writes full results under $OUT (default: build/cuda) and a short table last.
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-build/cuda}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/build/cuda-path${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
# Passes and runtime are mapped into the package when installed; a tree of links does the same without installing.
rm -rf build/cuda-path && mkdir -p build/cuda-path/dtorch
ln -s "$PWD"/dtorch/* build/cuda-path/dtorch/
ln -s "$PWD/passes" "$PWD/runtime" build/cuda-path/dtorch/

echo "card: $("$python" -c 'import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none")')"
timeout 170 "$python" -m pytest tests/cuda -q -p no:cacheprovider >"$out/tests.txt" 2>&1
tests=$?
timeout 150 "$python" tests/cuda/figures.py --output "$out/figures.json" >"$out/figures.txt" 2>&1
figures=$?

echo
echo "| part | result |"
echo "|---|---|"
echo "| tests | $(tail -n 1 "$out/tests.txt") |"
grep '^|' "$out/figures.txt" || echo "| figures | exit status $figures: see $out/figures.txt |"
[ "$tests" -eq 0 ] || [ "$tests" -eq 5 ]
