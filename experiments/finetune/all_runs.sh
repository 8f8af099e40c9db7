#!/usr/bin/env bash
# All reported runs of PLAN.md on one GPU, in an order that keeps it busy: networks that need no compiling train while
# larger ones compile. Continues where it stopped.
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

cells() { # MODEL FOLDS -> names separated by commas
  local names=()
  for fold in $2; do names+=("$1-fold$fold-seed0"); done
  (IFS=,; echo "${names[*]}")
}

study() { # STEP ARGUMENTS: one sweep; runs and kept results of all sweeps are in one folder each
  local step=$1
  shift
  python3 experiments/finetune/finetune_study.py "$@" $smoke --data isic="$isic" --data aptos="$aptos" \
    --data brain="$brain" --weights "$weights" --cache-dir "$out/cache" --out "$out" --results "$results" --no-tables > "$out/$step.log" 2>&1
  echo "$step $?" >> "$out/done"
}

all=${folds:-0 1 2 3 4} rest=${folds:+1}
rest=${rest:-1 2 3 4}
study lite4-first isic --only "$(cells isic-lite4 0)" --compile & # fills the cache of the compiler for the others
study lite0 isic --only "$(cells isic-lite0 "$all")" --parallel 4
study aptos aptos --only "$(cells aptos-lite0 "$all"),$(cells aptos-lite2 "$all")" --parallel 4 &
small=$!
study lite4 isic --only "$(cells isic-lite4 "$rest")" --parallel 4 --compile &
large=$!
wait "$small"
study lite2 isic --only "$(cells isic-lite2 "$all")" --parallel 3 --compile &
medium=$!
study brain brain --only brain-lite0-seed0
wait "$medium" "$large"
for model in lite0 lite2 lite4; do
  study "tta-$model" isic --tta --only "$(cells "isic-$model" "$all")" &
done
wait
python3 experiments/finetune/finetune_study.py --tables-only --results "$results" --out "$out" > "$out/tables.log" 2>&1
echo "tables $?" >> "$out/done"
