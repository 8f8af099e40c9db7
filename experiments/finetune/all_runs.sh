#!/usr/bin/env bash
# The runs of the sixth amendment of PLAN.md on one GPU: tuning, the choice by its rule, then all reported runs, in an
# order that keeps the GPU busy. Continues where it stopped.
#
#   experiments/finetune/all_runs.sh ISIC2018 APTOS BRAIN WEIGHTS OUT
#
# OUT/done lists the steps that ended, OUT/*.log what they printed. Results are in OUT/results, or in $RESULTS, whose
# cells are not trained again. SMOKE=1 trains tiny networks on synthetic images, to see that every step works.
set -u
isic=$1 aptos=$2 brain=$3 weights=$4 out=$5
export PYTHONPATH="${PYTHONPATH:-src}" PYTHONUNBUFFERED=1
mkdir -p "$out"
results=${RESULTS:-$out/results}
smoke=${SMOKE:+--smoke}
folds=${SMOKE:+0 1}
changes=()

cells() { # MODEL -> names of all folds, separated by commas
  local names=()
  for fold in ${folds:-0 1 2 3 4}; do names+=("$1-fold$fold-seed0"); done
  (IFS=,; echo "${names[*]}")
}

study() { # STEP ARGUMENTS: one sweep; runs and kept results of all sweeps are in one folder each
  local step=$1
  shift
  python3 experiments/finetune/finetune_study.py "$@" $smoke "${changes[@]}" --data isic="$isic" --data aptos="$aptos" \
    --data brain="$brain" --weights "$weights" --cache-dir "$out/cache" --out "$out" --results "$results" --no-tables > "$out/$step.log" 2>&1
  echo "$step $?" >> "$out/done"
}

with_tta() { # DATA MODEL PARALLEL: all folds, then their predictions with test-time augmentation
  study "$2" "$1" --only "$(cells "$1-$2")" --parallel "$3" --compile
  study "tta-$2" "$1" --tta --only "$(cells "$1-$2")"
}

study tune tune aptos-tune --only tune-second,aptos-tune --parallel 6 --compile
python3 experiments/finetune/finetune_study.py --screening second --results "$results" > "$out/adopted.log" 2>&1 || exit 1
changes=(--changes "$results/adopted.json")
echo "adopted 0" >> "$out/done"

with_tta isic lite4 5 &
with_tta isic lite0 3
study aptos aptos --only "$(cells aptos-lite0),$(cells aptos-lite2)" --parallel 3 --compile &
with_tta isic lite2 3
study brain brain --only brain-lite0-seed0
wait
python3 experiments/finetune/finetune_study.py --tables-only --results "$results" --out "$out" > "$out/tables.log" 2>&1
echo "tables $?" >> "$out/done"
