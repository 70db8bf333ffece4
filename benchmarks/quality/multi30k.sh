#!/bin/sh
# Trains a preset on Multi30k, and scores test2016 through the server:
#
#   sh benchmarks/quality/multi30k.sh DATA SOURCE TARGET PRESET RUN [flags of `python -m training train`]
#   sh benchmarks/quality/multi30k.sh multi30k/ en de tiny runs/multi30k-en-de
#
# DATA is data/task1 of github.com/multi30k/dataset, with lower-cased, normalised Moses tokens in tok/. The same
# command continues a training that was stopped. RUN/quality.json has the scores.
set -eu
data=$1 source=$2 target=$3 preset=$4 run=$5
shift 5
tokens() { echo "$data/tok/$1.lc.norm.tok.$2.gz"; }

python -m training train "$preset" --out "$run" --resume \
    --source "$(tokens train "$source")" --target "$(tokens train "$target")" \
    --dev-source "$(tokens val "$source")" --dev-target "$(tokens val "$target")" "$@"
python -m benchmarks.quality "$run" --task "Multi30k $source-$target" --out "$run/quality.json" \
    --tokens --test test2016 "$(tokens test_2016_flickr "$source")" "$(tokens test_2016_flickr "$target")"
