#!/usr/bin/env bash
# The reported runs of PLAN.md on one GPU, in an order that keeps it busy, with the changes that the tuning runs adopted.
# Continues where it stopped.
#
#   experiments/finetune/all_runs.sh ISIC2018 APTOS BRAIN WEIGHTS OUT
#
# OUT/done lists the steps that ended, OUT/*.log what they printed. Results are in OUT/results, or in $RESULTS, whose
# cells are not trained again; views (--tta) need the weights of a run, so they are predicted after its training only.
# SMOKE=1 trains tiny networks on synthetic images, to see that every step works.
set -u
isic=$1 aptos=$2 brain=$3 weights=$4 out=$5
export PYTHONPATH="${PYTHONPATH:-src}" PYTHONUNBUFFERED=1
mkdir -p "$out"
results=${RESULTS:-$out/results}
changes=${CHANGES:-results/finetune/second_screening/adopted.json}
smoke=${SMOKE:+--smoke}
folds=${SMOKE:+0 1}

cells() { # MODEL -> names of all folds, separated by commas
  local names=()
  for fold in ${folds:-0 1 2 3 4}; do names+=("$1-fold$fold-seed0"); done
  (IFS=,; echo "${names[*]}")
}

study() { # STEP ARGUMENTS: one sweep; runs and kept results of all sweeps are in one folder each
  local step=$1
  shift
  python3 experiments/finetune/finetune_study.py "$@" $smoke --changes "$changes" --data isic="$isic" \
    --data aptos="$aptos" --data brain="$brain" --weights "$weights" --cache-dir "$out/cache" --out "$out" \
    --results "$results" --no-tables > "$out/$step.log" 2>&1
  echo "$step $?" >> "$out/done"
}

with_tta() { # DATA MODEL PARALLEL: all folds, then their predictions with test-time augmentation
  study "$2" "$1" --only "$(cells "$1-$2")" --parallel "$3" --compile
  study "tta-$2" "$1" --tta --only "$(cells "$1-$2")"
}

with_tta isic lite4 5 &
with_tta isic lite0 3
study aptos aptos --only "$(cells aptos-lite0),$(cells aptos-lite2)" --parallel 3 --compile &
with_tta isic lite2 3
study brain brain --only brain-lite0-seed0
wait
python3 experiments/finetune/finetune_study.py --tables-only --results "$results" --out "$out" > "$out/tables.log" 2>&1
echo "tables $?" >> "$out/done"
