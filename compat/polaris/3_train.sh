#!/bin/sh
# Stands in for 3_train.sh of argonne-lcf/dlio_ml_workloads. Give your project:
#   qsub -A PROJECT -v "DATASET_DIR=/path/to/final_dir,WORKDIR=/path/to/project/root" 3_train.sh
# Arguments are added to those of dlrm_main.py. PPN: processes per node instead of one per GPU. MPIEXEC_OPTIONS: other
# options of mpiexec than those of PALS.
#PBS -l filesystems=eagle:home
#PBS -l nodes=1:ppn=4
#PBS -l walltime=60:00
#PBS -q debug-scaling
set -eu
cd "${PBS_O_WORKDIR:-.}"
: "${PBS_NODEFILE:=/dev/null}"
hosts=$(sort -u "$PBS_NODEFILE" | wc -l)
ppn=${PPN:-$( (nvidia-smi -L 2>/dev/null || echo cpu) | wc -l)}
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29500}" NCCL_COLLNET_ENABLE=1
export DFTRACER_ENABLE="${DFTRACER_ENABLE:-1}" DFTRACER_INC_METADATA="${DFTRACER_INC_METADATA:-1}"
# shellcheck disable=SC2086
exec mpiexec -np $(((hosts > 0 ? hosts : 1) * ppn)) --ppn "$ppn" \
    ${MPIEXEC_OPTIONS---cpu-bind depth -d $((64 / ppn))} recmill run-like 3_train.sh -- "$@"
