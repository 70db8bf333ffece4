#!/bin/sh
# Trains `tiny` on three small Korean-English corpora, and scores a test set of each through the server:
#
#   sh benchmarks/quality/korean.sh DATA RUN [flags of `python -m training train`]
#
# DATA has ko_en_kosp2e/ (KSS and StyleKQC of kosp2e) and tatoeba/kor-eng.2023-02-20.txt.gz (manythings.org/anki).
# The same command continues a training that was stopped. RUN/quality.json has the scores.
set -eu
data=$1 run=$2
shift 2

python -m benchmarks.quality.korean "$data" "$run/corpus"
python -m training train tiny --out "$run" --resume --tsv "$run/corpus/train.tsv" --dev-tsv "$run/corpus/dev.tsv" "$@"
set --
for name in KSS StyleKQC Tatoeba; do set -- "$@" --test "$name" "$run/corpus/$name.ko" "$run/corpus/$name.en"; done
python -m benchmarks.quality "$run" --task Korean-English --out "$run/quality.json" "$@"
