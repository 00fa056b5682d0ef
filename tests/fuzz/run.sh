#!/bin/sh
# run.sh gguf|tokenizer FOLDER SECONDS [SEED]: fuzzes with the programs built in FOLDER. What it finds
# new stays in FOLDER/corpus-NAME and is where the next run begins; an input that fails is left in
# FOLDER.
# Exit status: 0 nothing found, 77 the programs are not there (no clang).
set -eu
name=$1
folder=$2
seconds=$3
seed=${4:-0} # 0: libFuzzer draws one
source=$(cd "$(dirname "$0")" && pwd)

if [ ! -x "$folder/fuzz_$name" ]; then
    echo "skipped: $folder/fuzz_$name is not built: no clang with libFuzzer"
    exit 77
fi
corpus=$folder/corpus-$name
mkdir -p "$corpus"
if [ "$name" = gguf ]; then
    "$folder/write_seeds" "$corpus"
    longest=16384
else
    cp "$source"/corpus/*.txt "$corpus"
    longest=2048
fi
cd "$folder"
exec "./fuzz_$name" -max_total_time="$seconds" -seed="$seed" -timeout=20 -rss_limit_mb=2048 -max_len="$longest" \
    -dict="$source/fuzz.dict" -print_final_stats=1 -verbosity=0 "$corpus"
