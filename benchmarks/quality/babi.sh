#!/bin/sh
# Trains memory networks on the 20 tasks of bAbI, and asks the best one all test questions through the server:
#
#   sh benchmarks/quality/babi.sh DATA PART RUNS [flags of `python -m training train`]
#   sh benchmarks/quality/babi.sh babi/ en-10k runs/babi-10k
#
# DATA has the folders en (1,000 training questions a task) and en-10k of bAbI v1.2, also gzipped. SEEDS="0 1 2"
# are the runs to choose from. The same command continues a training that was stopped. RUNS/quality.json has
# the errors.
set -eu
data=$1 part=$2 runs=$3
shift 3
if [ "$part" = en-10k ]; then
    # A wider model. The learning rate is highest, 0.002, at the end of the warm-up.
    set -- --max-steps 60000 --set d_model=200 num_linear_steps=4500 learning_rate_scale=2.53 "$@"
fi

python -m benchmarks.quality.babi "$data" "$part" --corpus "$runs"
for seed in ${SEEDS:-0 1 2}; do
    python -m training train memory-network-babi --out "$runs/seed-$seed" --resume --seed "$seed" \
        --tsv "$runs/train.tsv" --dev-tsv "$runs/dev.tsv" "$@"
done
python -m benchmarks.quality.babi "$data" "$part" --runs "$runs"/seed-* --out "$runs/quality.json"
