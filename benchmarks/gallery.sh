#!/bin/sh
# Trains a small model of every family on built-in data, serves all from one server, and draws where each looked:
#
#   sh benchmarks/gallery.sh [FOLDER]
#
# FOLDER, runs/gallery by default, gets runs/, bundles/ and the page gallery.md with its pictures. As many models
# are trained at once as there are cores. The same command continues what was stopped, and repeats nothing else.
# PYTHON is the interpreter, and FLAGS are added to every training.
set -eu

train() { # NAME PRESET STEPS [flags]: trains and exports a model, unless that is done
    name=$1 preset=$2 steps=$3
    shift 3
    run=$folder/runs/$name bundle=$folder/bundles/$name
    [ -f "$bundle/manifest.json" ] && return
    echo "$name: $steps steps" >&2
    # shellcheck disable=SC2086
    "$python" -m training train "$preset" --out "$run" --resume --max-steps "$steps" "$@" ${FLAGS:-} \
        >>"$run.log" 2>&1 &&
        "$python" -m export "$run" "$bundle" --precision fp32 --overwrite >>"$run.log" 2>&1 ||
        { echo "$name failed; its log is $run.log" >&2; exit 255; } # with which xargs starts no other
}

train_one() {
    quick="eval_interval_steps=250 warmup_steps=100 cooldown_share=0.5"
    small="d_model=128 d_hidden=192 vocab_size=2000 dropout=0.0 $quick"
    looking="eval_interval_steps=500 cooldown_share=0.5"
    # shellcheck disable=SC2086
    case $1 in
    captioners)
        train captioner-soft captioner 2500 --set $looking
        train captioner-hard captioner 500 --from "$folder/runs/captioner-soft" \
            --set attention=hard learning_rate_scale=0.2 warmup_steps=200 $looking
        ;;
    clip-captioner) train clip-captioner clip-captioner 1300 --set $looking ;;
    recurrent) train recurrent recurrent 500 --set $small ;;
    recurrent-dot) train recurrent-dot recurrent-dot 750 --set $small ;;
    recurrent-additive) train recurrent-additive recurrent-additive 500 --set $small ;;
    transformer) train transformer demo 500 --set $quick ;;
    memory-network) train memory-network memory-network 6000 ;;
    esac
}

python=${PYTHON:-python}
if [ "${1:-}" = --one ]; then
    folder=$3
    train_one "$2"
    exit
fi

folder=${1:-runs/gallery}
mkdir -p "$folder/runs" "$folder/gallery"
cores=$(nproc)
export OMP_NUM_THREADS=1
# The longest first.
printf '%s\n' captioners clip-captioner recurrent recurrent-dot recurrent-additive transformer memory-network |
    xargs -P "$cores" -I NAME sh "$0" --one NAME "$folder"
unset OMP_NUM_THREADS

port=${PORT:-50099} metrics_port=${METRICS_PORT:-50098}
"$python" -m server "$folder"/bundles/* --host 127.0.0.1 --port "$port" --metrics-port "$metrics_port" \
    --log-level warning &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
until "$python" -m client health --address "127.0.0.1:$port" >/dev/null 2>&1; do
    kill -0 $server || exit 1
    sleep 0.2
done

ask() { # COMMAND MODEL [flags]: prints an answer
    command=$1 model=$2
    shift 2
    "$python" -m client "$command" --address "127.0.0.1:$port" --model "$model" "$@"
}

translation() { # TITLE MODEL [flags]
    printf '\n### %s\n\n> ' "$1"
    shift
    ask translate "$@" "오늘은 금요일 입니다"
}

caption() { # TITLE MODEL FILE
    printf '\n### %s\n\n> ' "$1"
    ask caption "$2" "$folder/runs/$2/pictures/test/$3.png" --attention "$folder/gallery/$2.png"
    printf '\n![%s](gallery/%s.png)\n' "$1" "$2"
}

answer() { # NUMBER STORY QUESTION
    printf '%s\n' "$2" >"$folder/gallery/story-$1.txt"
    told=$(ask answer memory-network --story "$folder/gallery/story-$1.txt" --question "$3" \
        --attention "$folder/gallery/story-$1.png")
    rm "$folder/gallery/story-$1.txt"
    printf '\n> %s\n>\n> %s **%s**\n\n![%s](gallery/story-%s.png)\n' "$2" "$3" "$told" "$3" "$1"
}

{
    cat <<END
# A gallery of attention

A small model of every family, trained on data that this project makes, served by one process and asked
through gRPC. \`make gallery\` makes this page anew.

## One sentence, four models

> 오늘은 금요일 입니다
END
    translation "No attention" recurrent
    for pair in "Dot attention:recurrent-dot" "Additive attention:recurrent-additive" "The Transformer:transformer"; do
        title=${pair%:*} model=${pair#*:}
        translation "$title" "$model" --attention "$folder/gallery/$model.png"
        printf '\n![%s](gallery/%s.png)\n' "$title" "$model"
    done
    printf '\n## Pictures and a clip\n'
    caption "Soft attention" captioner-soft 00003
    caption "Hard attention" captioner-hard 00003
    caption "Attention over time" clip-captioner 00005
    printf '\n## Questions about stories\n'
    answer 1 "Sam walks into the kitchen. Sam picks up an apple. Sam walks into the bedroom. Sam drops the apple." \
        "Where is the apple?"
    answer 2 "Brian is a lion. Julius is a lion. Julius is white. Bernhard is green." "What color is Brian?"
} >"$folder/gallery.md.part"
mv "$folder/gallery.md.part" "$folder/gallery.md"
echo "$folder/gallery.md"
