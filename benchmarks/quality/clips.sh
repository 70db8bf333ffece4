#!/bin/sh
# Trains the four captioners of Yao et al. 2015 on built-in clips, and scores them through the server:
#
#   sh benchmarks/quality/clips.sh RUNS [flags of `python -m training train`]
#
# The same command continues a training that was stopped. RUNS/quality.json has the scores.
set -eu
runs=$1
shift
train() {
    name=$1
    shift
    python -m training train clip-captioner --out "$runs/$name" --resume "$@"
}

train basic --set attention=mean is_local=false "$@"
train local --set attention=mean is_local=true "$@"
train global --set attention=soft is_local=false "$@"
train both --set attention=soft is_local=true "$@"
python -m benchmarks.quality.captions "$runs/basic" "$runs/local" "$runs/global" "$runs/both" --task clips \
    --out "$runs/quality.json"
