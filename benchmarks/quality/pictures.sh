#!/bin/sh
# Trains the captioners of "Show, Attend and Tell" on built-in pictures, and scores them through the server:
#
#   sh benchmarks/quality/pictures.sh RUNS [flags of `python -m training train`]
#
# The same command continues a training that was stopped. RUNS/quality.json has the scores.
set -eu
runs=$1
shift

python -m training train captioner --out "$runs/soft" --resume "$@"
# Sampled places teach little as long as they are random, so hard attention starts from soft.
python -m training train captioner --out "$runs/hard" --resume --from "$runs/soft" --max-steps 1500 \
    --set attention=hard learning_rate_scale=0.2 warmup_steps=200 cooldown_share=0.5 "$@"
python -m benchmarks.quality.captions "$runs/soft" "$runs/hard" --out "$runs/quality.json"
