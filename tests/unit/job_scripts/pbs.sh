#!/bin/bash -l
#PBS -N recmill-run-s-5
#PBS -l select=2:mem=100gb
#PBS -j oe
#PBS -r y
jobs='/data/Run'"'"'s 5%/jobs'
python=/env/bin/python
id="${PBS_JOBID%%.*}"
started=$(date +%s)
cd "$jobs" || {
    echo "recmill: resource error: $jobs is not visible on $(hostname). Choose a --run on a shared disk." >&2
    exit 5
}
exec >> "$jobs/$id.out" 2>&1
export RECMILL_ERRORS="$jobs/$id.errors"
rm -rf "$RECMILL_ERRORS" "$id.end.json" && mkdir "$RECMILL_ERRORS"  # those of a start before a requeue
export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_PORT=$(( 20000 + ${id//[^0-9]/} % 20000 ))
export RECMILL_WORLD_SIZE=8
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-8589934592}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-17179869184}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}"
mpirun -n 8 --map-by ppr:4:node:PE=8 -x GOMP_SPINCOUNT -x MALLOC_MMAP_THRESHOLD_ -x MALLOC_TRIM_THRESHOLD_ -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS -x RECMILL_ERRORS -x RECMILL_WORLD_SIZE /env/bin/python -P -m recmill train '/data/Run'"'"'s 5%/jobs/config.toml' --run-dir '/data/Run'"'"'s 5%' --init-from '/data/$(old)' &
child=$!
trap 'kill -USR1 "$child"' TERM USR1 USR2
while true; do
    wait "$child"; code=$?  # returns early when a signal is trapped
    kill -0 "$child" 2>/dev/null || break
done
wait "$child"; ended=$?  # it may have ended before kill -0, and code is then that of the signal
[ "$ended" -eq 127 ] || code=$ended
trap : TERM USR1 USR2
"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"
exit $?
