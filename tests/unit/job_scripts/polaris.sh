#!/bin/bash -l
#PBS -N recmill-run-s-5
#PBS -l select=2:system=polaris
#PBS -l walltime=01:00:00
#PBS -A project
#PBS -q debug-scaling
#PBS -j oe
#PBS -r y
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -k doe
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
module use /soft/modulefiles
module load conda
conda activate
export TMPDIR=/tmp
nvidia-smi -q > "$jobs/$id.gpus.txt"
export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_PORT=$(( 20000 + ${id//[^0-9]/} % 20000 ))
export RECMILL_WORLD_SIZE=8
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-8589934592}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-17179869184}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}"
export CUDA_VISIBLE_DEVICES=3,2,1,0
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export RECMILL_DEADLINE=$(( started + 3480 ))
mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth --envall --line-buffer /env/bin/python -P -m recmill train '/data/Run'"'"'s 5%/jobs/config.toml' --run-dir '/data/Run'"'"'s 5%' --init-from '/data/$(old)' &
child=$!
trap 'kill -USR1 "$child"' TERM USR1 USR2
while true; do
    wait "$child"; code=$?  # returns early when a signal is trapped
    kill -0 "$child" 2>/dev/null || break
done
wait "$child"; ended=$?  # it may have ended before kill -0, and code is then that of the signal
[ "$ended" -eq 127 ] || code=$ended
trap : TERM USR1 USR2
"$python" -P -m recmill trace "${jobs%/jobs}"
"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"
exit $?
