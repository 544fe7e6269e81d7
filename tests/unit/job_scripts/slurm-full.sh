#!/bin/bash -l
#SBATCH --job-name=recmill-run-s-5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=26:00:00
#SBATCH --account=a1
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=4
#SBATCH --mem=100G
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output='/data/Run'"'"'s 5%%/jobs/%j.out'
#SBATCH --qos=high
jobs='/data/Run'"'"'s 5%/jobs'
python=/env/bin/python
id="$SLURM_JOB_ID"
started=$(date +%s)
cd "$jobs" || {
    echo "recmill: resource error: $jobs is not visible on $(hostname). Choose a --run on a shared disk." >&2
    exit 5
}
export RECMILL_ERRORS="$jobs/$id.errors"
rm -rf "$RECMILL_ERRORS" "$id.end.json" && mkdir "$RECMILL_ERRORS"  # those of a start before a requeue
module load conda
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol -o show node "$head" | tr " " "\n" | sed -n "s/^NodeAddr=//p")
export MASTER_ADDR="${address:-$head}"
export MASTER_PORT=$(( 20000 + id % 20000 ))
export RECMILL_WORLD_SIZE=8
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-8589934592}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-17179869184}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}"
export NCCL_DEBUG='it'"'"'s $(date)'
export RECMILL_DEADLINE=$(( started + 93480 ))
trap : TERM USR1 USR2  # this shell must outlive its tasks
srun --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 --unbuffered /env/bin/python -P -m recmill train '/data/Run'"'"'s 5%/jobs/config.toml' --run-dir '/data/Run'"'"'s 5%' --init-from '/data/$(old)'
code=$?
date
"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"
exit $?
